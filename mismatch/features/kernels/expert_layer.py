"""A family's own module of experts, reduced or at the model's size, and its definition.

Letters: E experts, T tokens, K of them per token, H hidden size, I width of an expert.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mismatch.errors import MismatchError
from mismatch.features.kernels.findings import Tensors, gradients
from mismatch.features.kernels.geometry import ModelGeometry

BIAS = 0.3  # of random biases: large enough to be missed
SIZES = {  # what families call the three sizes on the module; some code reads them
    "experts": ("num_experts", "num_local_experts"),
    "hidden": ("hidden_dim", "hidden_size"),
    "width": ("intermediate_dim", "intermediate_size", "expert_dim"),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one layer of experts."""

    experts: int
    hidden: int
    width: int
    top_k: int

    def reduced(self) -> Sizes:
        """Small enough for float64 and every dtype; H and I differ, so that no mix-up fits."""
        experts, hidden = min(self.experts, 8), min(self.hidden, 64)
        width = min(self.width, 48)
        return Sizes(experts, hidden, width, max(1, min(self.top_k, experts - 2, 4)))


class ExpertInputs(NamedTuple):
    """Inputs of the layer, and a router before it.

    Attributes:
        hidden: [T, H].
        router: [E, H], whose logits weigh the chosen experts.
        ids: [T, K], fixed: rounding must not change the choice.
        weights: [T, H] that reduce the output to one number.
    """

    hidden: torch.Tensor
    router: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def module_of(geometry: ModelGeometry) -> Any:
    """The first module of experts that transformers' interface serves, on the meta device.

    Raises:
        MismatchError: a dense model, or one whose experts are behind no interface.
    """
    for module in geometry.bare.modules():
        if hasattr(module, "is_concatenated"):
            return module
    from mismatch.training.experts import implementations_for

    family, loop = geometry.model_type, implementations_for(geometry.bare)
    message = f"the experts of {family} are behind no interface of transformers"
    raise MismatchError(message if loop else f"{family} is dense", "there is nothing to choose")


def sizes_of(geometry: ModelGeometry) -> Sizes:
    """The sizes of the model."""
    module = module_of(geometry)
    experts, first, second = module.down_proj.shape
    width, hidden = (first, second) if module.is_transposed else (second, first)
    return Sizes(experts, hidden, width, geometry.top_k or 1)


def build(geometry: ModelGeometry, sizes: Sizes, device: str, dtype: torch.dtype, seed: int) -> Any:
    """The family's module in other sizes, with random weights that are equal up to rounding."""
    module = copy.deepcopy(module_of(geometry))
    draw = torch.Generator().manual_seed(seed)
    for name, shape in _shapes(module, sizes).items():
        scale = BIAS if name.endswith("_bias") else _fan_in(module, name, sizes) ** -0.5
        values = _normal(shape, draw, dtype) * scale
        setattr(module, name, torch.nn.Parameter(values.to(device, dtype)))
    for size, names in SIZES.items():
        for name in names:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, getattr(sizes, size))
    left = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if left:
        raise MismatchError(
            f"the experts of {geometry.model_type} have weights of a kind unknown here: {left[0]}",
            "audit another model",
        )
    return module.train()


def _normal(shape: tuple[int, ...], draw: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Drawn in float64 for small tensors, so that every dtype rounds the same numbers."""
    small = torch.Size(shape).numel() < 1 << 22
    return torch.randn(shape, generator=draw, dtype=torch.float64 if small else dtype)


def _shapes(module: Any, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    e, h, i = sizes.experts, sizes.hidden, sizes.width
    out = 2 * i if module.has_gate else i
    up = "gate_up_proj" if module.has_gate else "up_proj"
    swap = bool(module.is_transposed)
    shapes: dict[str, tuple[int, ...]] = {
        up: (e, h, out) if swap else (e, out, h),
        "down_proj": (e, i, h) if swap else (e, h, i),
    }
    if module.has_bias:
        shapes |= {f"{up}_bias": (e, out), "down_proj_bias": (e, h)}
    return shapes


def _fan_in(module: Any, name: str, sizes: Sizes) -> int:
    return sizes.width if name == "down_proj" else sizes.hidden


def random_inputs(
    sizes: Sizes, tokens: int, device: str, dtype: torch.dtype, seed: int
) -> ExpertInputs:
    """Random inputs; the last expert gets no token, the one before it a single one."""
    draw = torch.Generator().manual_seed(seed + 1)
    wide = torch.float64 if tokens * sizes.hidden < 1 << 22 else torch.float32
    hidden = torch.randn(tokens, sizes.hidden, generator=draw, dtype=wide)
    router = torch.randn(sizes.experts, sizes.hidden, generator=draw, dtype=wide)
    usual = max(sizes.top_k, sizes.experts - 2)
    ids = torch.rand(tokens, usual, generator=draw).topk(sizes.top_k).indices
    if sizes.experts > usual:
        ids[tokens // 2, 0] = usual
    weights = 1 + torch.randn(tokens, sizes.hidden, generator=draw, dtype=wide)
    hidden, router = (x.to(device, dtype) for x in (hidden, router * sizes.hidden**-0.5))
    return ExpertInputs(hidden, router, ids.to(device), weights.to(device))


def routed(inputs: ExpertInputs) -> torch.Tensor:
    """[T, K] softmax over the logits of the chosen experts, in float32 or float64.

    The hidden states are detached: a fault in the router's gradient would show in theirs too.
    """
    wide = torch.promote_types(inputs.hidden.dtype, torch.float32)
    logits = inputs.hidden.detach().to(wide) @ inputs.router.to(wide).T
    return logits.gather(1, inputs.ids).softmax(-1).to(inputs.hidden.dtype)


def run(module: Any, registered: str, inputs: ExpertInputs) -> torch.Tensor:
    """[T, H] by one implementation.

    Raises:
        Exception: whatever it raises.
        ValueError: it returns another shape.
    """
    module.config._experts_implementation = registered
    out = module(inputs.hidden, inputs.ids, routed(inputs))
    if not isinstance(out, torch.Tensor) or out.shape != inputs.hidden.shape:
        shape = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(f"it returns {shape}, not [T, H] = {tuple(inputs.hidden.shape)}")
    return out


def definition(module: Any, inputs: ExpertInputs) -> torch.Tensor:
    """[T, H] by the definition: every expert on every token, then the weighted sum of the chosen.

    out_t = Σ_k w_tk · (down_e(gate(up_e(x_t)))) with e = ids_tk; the gate is the family's own.
    """
    return weighed(every_expert(module, inputs.hidden), inputs.ids, routed(inputs))


def every_expert(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[T, E, H]: each expert's output on each token."""
    experts = range(module.down_proj.shape[0])
    return torch.stack([_expert(module, expert, hidden) for expert in experts], 1)


def weighed(every: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, H]: of [T, E, H] the chosen ones, times their weights."""
    chosen = every.gather(1, ids[..., None].expand(-1, -1, every.shape[-1]))
    return (chosen * weights[..., None]).sum(1)


def _expert(module: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = getattr(module, name)[expert]
        out = x @ (weight if module.is_transposed else weight.T)
        return out + getattr(module, f"{name}_bias")[expert] if module.has_bias else out

    if module.has_gate:
        state = module._apply_gate(linear("gate_up_proj", rows))
    else:
        state = module.act_fn(linear("up_proj", rows))
    return linear("down_proj", state)


def leaves(module: Any, inputs: ExpertInputs) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that get gradients, by the names of ``experiments.kernels.Error``."""
    yield "hidden", inputs.hidden
    yield "router", inputs.router
    for name, parameter in module.named_parameters():
        yield name.replace("_proj", ""), parameter


def run_backward(
    module: Any, registered: str | None, inputs: ExpertInputs
) -> tuple[torch.Tensor, Tensors, Exception | None]:
    """Output, gradients, and the error of the backward pass.

    ``registered`` None: by the definition.
    """
    hidden, router = (x.detach().clone().requires_grad_() for x in inputs[:2])
    inputs = inputs._replace(hidden=hidden, router=router)
    out = definition(module, inputs) if registered is None else run(module, registered, inputs)
    try:
        return out.detach(), gradients(dict(leaves(module, inputs)), out, inputs.weights), None
    except Exception as error:
        return out.detach(), {}, error
