"""A family's own module of experts, reduced in size, and its definition.

Letters: E experts, T tokens, K of them per token, H hidden size, I width of an expert.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mismatch.errors import MismatchError
from mismatch.features.kernels.findings import OUT, Tensors, gradients
from mismatch.features.kernels.geometry import ModelGeometry
from mismatch.training.experts import implementations_for

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


class ExpertInputs(NamedTuple):
    """Inputs of the layer, and a router before it."""

    hidden: torch.Tensor
    """[T, H]."""
    router: torch.Tensor
    """[E, H], whose logits weigh the chosen experts."""
    ids: torch.Tensor
    """[T, K], fixed: rounding must not change the choice."""
    weights: torch.Tensor
    """[T, H] that reduce the output to one number."""

    def routed(self) -> torch.Tensor:
        """[T, K] softmax over the logits of the chosen experts, in float32 or float64.

        The hidden states are detached: a fault in the router's gradient would show in theirs too.
        """
        wide = torch.promote_types(self.hidden.dtype, torch.float32)
        logits = self.hidden.detach().to(wide) @ self.router.to(wide).T
        return logits.gather(1, self.ids).softmax(-1).to(self.hidden.dtype)


def module_of(geometry: ModelGeometry) -> Any:
    """Return the first module of experts that transformers' interface serves, without weights.

    Raises:
        MismatchError: a dense model, or one whose experts are behind no interface.
    """
    for module in geometry.bare.modules():
        if hasattr(module, "is_concatenated"):
            return module
    family, loop = geometry.model_type, implementations_for(geometry.bare)
    message = f"the experts of {family} are behind no interface of transformers"
    raise MismatchError(message if loop else f"{family} is dense", "there is nothing to choose")


def reduced_sizes(geometry: ModelGeometry) -> Sizes:
    """Return sizes of at most the model's for float64; H and I differ, so that no mix-up fits."""
    module = module_of(geometry)
    experts, first, second = module.down_proj.shape
    width, hidden = (first, second) if module.is_transposed else (second, first)
    experts = min(experts, 8)
    top_k = max(1, min(geometry.sizes.top_k or 1, experts - 2, 4))
    return Sizes(experts, min(hidden, 64), min(width, 48), top_k)


def build(geometry: ModelGeometry, sizes: Sizes, device: str, dtype: torch.dtype, seed: int) -> Any:
    """Make the family's module in other sizes, with random weights, equal in all dtypes."""
    module = copy.deepcopy(module_of(geometry))
    draw = torch.Generator().manual_seed(seed)
    e, h, i = sizes.experts, sizes.hidden, sizes.width
    up, out = ("gate_up_proj", 2 * i) if module.has_gate else ("up_proj", i)
    swap = module.is_transposed
    shapes: dict[str, tuple[int, ...]] = {
        up: (e, h, out) if swap else (e, out, h),
        "down_proj": (e, i, h) if swap else (e, h, i),
    }
    if module.has_bias:
        shapes |= {f"{up}_bias": (e, out), "down_proj_bias": (e, h)}
    for name, shape in shapes.items():
        fan_in = i if name == "down_proj" else h
        scale = BIAS if name.endswith("_bias") else fan_in**-0.5
        values = torch.randn(shape, generator=draw, dtype=torch.float64) * scale
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


def random_inputs(
    sizes: Sizes, tokens: int, device: str, dtype: torch.dtype, seed: int
) -> ExpertInputs:
    """Draw inputs; the last expert gets no token, the expert before it a single one."""
    draw = torch.Generator().manual_seed(seed + 1)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, sizes.hidden, generator=draw, dtype=torch.float64)

    hidden, router = normal(tokens), normal(sizes.experts) * sizes.hidden**-0.5
    usual = max(sizes.top_k, sizes.experts - 2)
    ids = torch.rand(tokens, usual, generator=draw).topk(sizes.top_k).indices
    if sizes.experts > usual:
        ids[tokens // 2, 0] = usual
    weights = 1 + normal(tokens)
    hidden, router = hidden.to(device, dtype), router.to(device, dtype)
    return ExpertInputs(hidden, router, ids.to(device), weights.to(device))


def run(module: Any, registered: str, inputs: ExpertInputs) -> torch.Tensor:
    """[T, H] by one implementation; raises what that raises, and ValueError for another shape."""
    module.config._experts_implementation = registered
    out = module(inputs.hidden, inputs.ids, inputs.routed())
    if not isinstance(out, torch.Tensor) or out.shape != inputs.hidden.shape:
        shape = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(f"it returns {shape}, not [T, H] = {tuple(inputs.hidden.shape)}")
    return out


def definition(module: Any, inputs: ExpertInputs) -> torch.Tensor:
    """[T, H] by the definition: every expert on every token, then the weighted sum of the chosen.

    out_t = Σ_k w_tk · (down_e(gate(up_e(x_t)))) with e = ids_tk; the gate is the family's own.
    """
    return weighed(every_expert(module, inputs.hidden), inputs.ids, inputs.routed())


def every_expert(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[T, E, H]: each expert's output on each token."""

    def linear(name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = getattr(module, name)[expert]
        out = x @ (weight if module.is_transposed else weight.T)
        return out + getattr(module, f"{name}_bias")[expert] if module.has_bias else out

    def output(expert: int) -> torch.Tensor:
        if module.has_gate:
            state = module._apply_gate(linear("gate_up_proj", expert, hidden))
        else:
            state = module.act_fn(linear("up_proj", expert, hidden))
        return linear("down_proj", expert, state)

    return torch.stack([output(expert) for expert in range(module.down_proj.shape[0])], 1)


def weighed(every: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, H]: of [T, E, H] the chosen outputs, times their weights."""
    chosen = every.gather(1, ids[..., None].expand(-1, -1, every.shape[-1]))
    return (chosen * weights[..., None]).sum(1)


def results(
    module: Any, registered: str | None, inputs: ExpertInputs
) -> tuple[Tensors, Exception | None]:
    """Return output and gradients by the names of ``results.Error``, and what backward raised.

    Args:
        registered: the implementation's name; None: by the definition.
    """
    hidden, router = (x.detach().clone().requires_grad_() for x in inputs[:2])
    inputs = inputs._replace(hidden=hidden, router=router)
    leaves = {"hidden": hidden, "router": router}
    leaves |= {name.replace("_proj", ""): x for name, x in module.named_parameters()}
    out = definition(module, inputs) if registered is None else run(module, registered, inputs)
    try:
        return {OUT: out.detach(), **gradients(leaves, out, inputs.weights)}, None
    except Exception as error:
        if registered is None:
            raise
        return {OUT: out.detach()}, error
