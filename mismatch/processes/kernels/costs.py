"""Seconds and memory of attention and experts, forward and backward, at growing lengths."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from mismatch.errors import named_line
from mismatch.experiments.kernel_audit import Cost
from mismatch.processes.kernels import expert_layer as layer
from mismatch.processes.kernels.cases import DTYPES, Case, Inputs, full, inputs_of, positions_of
from mismatch.processes.kernels.findings import leaves_of
from mismatch.processes.kernels.geometry import ModelGeometry, Options
from mismatch.training.distributed import MemoryPeak


class Runner:
    """One registered attention implementation at a model's geometry.

    Args:
        registered: its name in transformers' registry.
    """

    def __init__(self, geometry: ModelGeometry, registered: str) -> None:
        self.geometry, self.registered = geometry, registered
        self._function = function_of(geometry, registered)

    def __call__(self, case: Case, inputs: Inputs) -> torch.Tensor:
        """[B, T, H, Dv].

        Raises:
            Exception: whatever the kernel raises.
            ValueError: it returns another shape.
        """
        device = str(inputs.query.device)
        config = self._config(case, inputs.query.dtype)
        extra = {} if inputs.sinks is None else {"s_aux": inputs.sinks}
        result = self._function(
            _layer(self.geometry, config, inputs),
            *inputs[:3],
            self.mask(case, config, inputs),
            dropout=0.0,
            scaling=case.scaling,
            sliding_window=case.window,
            position_ids=positions_of(case, device),
            **extra,
        )
        out = result[0] if isinstance(result, tuple) else result
        wanted = (case.rows, case.queries, self.geometry.heads, self.geometry.value_dim)
        if not isinstance(out, torch.Tensor) or tuple(out.shape) != wanted:
            shape = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise ValueError(f"it returns {shape}, not [B, T, H, Dv] = {wanted}")
        return out

    def mask(self, case: Case, config: Any, inputs: Inputs) -> Any:
        """What transformers makes for this implementation, from positions, padding and cache."""
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        query = inputs.query
        build: Any = create_sliding_window_causal_mask if case.window else create_causal_mask
        return build(
            config=config,
            inputs_embeds=query.new_empty(case.rows, case.queries, 1),
            attention_mask=_padding(case, query.device),
            past_key_values=_Cache(case) if case.queries < case.keys else None,
            position_ids=positions_of(case, str(query.device)),
        )

    def _config(self, case: Case, dtype: torch.dtype) -> Any:
        return SimpleNamespace(
            _attn_implementation=self.registered,
            sliding_window=case.window,
            dtype=dtype,
            is_causal=True,
        )


class _Cache:
    """What mask builders ask of a cache that holds the keys before the queries."""

    is_compileable = False

    def __init__(self, case: Case) -> None:
        self._keys, self._before = case.keys, case.keys - case.queries

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._before

    def get_mask_sizes(self, q_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._keys, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._before


def function_of(geometry: ModelGeometry, registered: str) -> Callable[..., Any]:
    """The function behind a name; ``eager`` is the family's own.

    Raises:
        KeyError: no such name, or a family without a function for eager attention.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if registered != "eager":
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[registered]
        return function
    for module in geometry.bare.modules():
        home = sys.modules[type(module).__module__]
        if "attention" in type(module).__name__.lower() and hasattr(
            home, "eager_attention_forward"
        ):
            own: Callable[..., Any] = home.eager_attention_forward
            return own
    raise KeyError(f"{geometry.model_type} has no eager attention behind transformers' interface")


def _layer(geometry: ModelGeometry, config: Any, inputs: Inputs) -> torch.nn.Module:
    """What kernels ask of the attention layer that calls them."""
    layer: Any = torch.nn.Linear(1, 1, dtype=inputs.query.dtype)  # flash looks for a weight's dtype
    layer.config, layer.layer_idx, layer.is_causal = config, 0, True
    layer.num_key_value_groups = geometry.heads // geometry.kv_heads
    layer.head_dim, layer.scaling = geometry.head_dim, geometry.scaling
    layer.sliding_window = config.sliding_window
    layer.train()
    if inputs.sinks is not None:
        layer.sinks = inputs.sinks  # eager reads it here
    return layer  # type: ignore[no-any-return]


def _padding(case: Case, device: torch.device) -> torch.Tensor | None:
    """[B, S] 1 for real tokens; None where there is no padding."""
    if not case.lengths:
        return None
    lengths = torch.tensor(case.lengths, device=device)
    return (torch.arange(case.keys, device=device) < lengths[:, None]).long()


RUNS = 3
QUICK_S = 5.0  # a pass that takes longer is not run again
FIRST = 1024  # longest length that is tried without the costs of a shorter one
SHARE_OF_FREE = 0.5  # of the machine's memory: others work on it too


def cost_dtype(device: str, accepted: list[str]) -> str:
    """A trainer's dtype on a GPU; float32 on a CPU, where bfloat16 is often emulated."""
    preferred = ("bf16", "fp16", "fp32") if device.startswith("cuda") else ("fp32", "bf16")
    return next((name for name in preferred if name in accepted), accepted[0])


def costs(
    runner: Runner, geometry: ModelGeometry, options: Options, accepted: list[str]
) -> tuple[Cost, ...]:
    """One entry per length of the options, shortest first.

    A length that would not fit or take too long, extrapolated from the one before with the square,
    is left out with a note. Memory is that beyond inputs and their gradients, with the mask.
    """
    return tuple(_costs(runner, geometry, options, cost_dtype(options.device, accepted)))


def _costs(runner: Runner, geometry: ModelGeometry, options: Options, dtype: str) -> Iterator[Cost]:
    last: Cost | None = None
    lengths = sorted(set(options.tokens))
    if lengths and lengths[0] > FIRST:
        last = _attention_cost(runner, geometry, options, dtype, FIRST)
    for tokens in lengths:
        note = _too_much(last, tokens, options)
        if note:
            yield Cost(tokens, None, None, note)
            continue
        cost = _attention_cost(runner, geometry, options, dtype, tokens)
        yield cost
        last = cost if cost.seconds is not None else last


def _too_much(last: Cost | None, tokens: int, options: Options) -> str:
    """Why a length is left out; "" if it is not."""
    if last is None or last.seconds is None or last.peak_bytes is None:
        return ""
    growth = (tokens / last.tokens) ** 2
    seconds, memory = last.seconds * growth, last.peak_bytes * growth
    if memory > _budget(options):
        return f"may take {memory / 2**30:.3g} GiB, by its {last.tokens} tokens; not tried"
    if seconds > options.budget_s:
        return f"may take {seconds:.3g} s, by its {last.tokens} tokens; not tried"
    return ""


def _budget(options: Options) -> int:
    return options.budget_bytes or int(SHARE_OF_FREE * free_bytes(options.device))


def free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _attention_cost(
    runner: Runner, geometry: ModelGeometry, options: Options, dtype: str, tokens: int
) -> Cost:
    case = replace(full(geometry)[0], queries=tokens, keys=tokens)
    inputs = inputs_of(geometry, case, options.device, DTYPES[dtype], options.seed)

    def forward_and_backward() -> int:
        leaves = leaves_of(inputs)
        torch.autograd.backward(runner(case, leaves).sum())
        return sum(2 * x.nbytes for x in leaves.named.values())

    return _cost(tokens, options.device, forward_and_backward)


def _cost(tokens: int, device: str, run: Callable[[], int]) -> Cost:
    """Median time and highest memory of a few runs; ``run`` returns bytes that do not count."""
    seconds: list[float] = []
    peaks: list[int] = []
    try:
        while len(seconds) < RUNS and sum(seconds) < QUICK_S:
            with MemoryPeak(torch.device(device), active=True) as peak:
                kept = run()
                if device.startswith("cuda"):
                    torch.cuda.synchronize(device)
            seconds.append(peak.seconds)
            peaks.append(max(0, (peak.bytes or 0) - kept))
    except torch.OutOfMemoryError:
        return Cost(tokens, None, None, "out of memory")
    except Exception as error:  # an implementation may raise anything
        return Cost(tokens, None, None, named_line(error))
    return Cost(tokens, statistics.median(seconds), max(peaks))


# ---------------------------------------------------------------- experts


def expert_costs(
    geometry: ModelGeometry, options: Options, registered: str, sizes: layer.Sizes
) -> Iterator[Cost]:
    """Forward and backward at the model's own sizes, in the smallest of the dtypes."""
    if not options.tokens:
        return
    name = min(options.dtypes, key=lambda dtype: torch.finfo(DTYPES[dtype]).bits)
    dtype, start = DTYPES[name], time.monotonic()
    weights = 3 * sizes.experts * sizes.hidden * sizes.width * dtype.itemsize
    module = None
    for tokens in options.tokens:
        needed = 3 * weights + _activations(sizes, registered, tokens, dtype)
        if needed > _budget(options):
            yield Cost(tokens, None, None, f"may take {needed / 2**30:.3g} GiB; not tried")
            continue
        if time.monotonic() - start > options.budget_s:
            yield Cost(tokens, None, None, f"left out after {options.budget_s:.0f} s")
            continue
        if module is None:
            module = layer.build(geometry, sizes, options.device, dtype, options.seed)
        inputs = layer.random_inputs(sizes, tokens, options.device, dtype, options.seed)
        run = partial(_experts_pass, module, registered, inputs)
        yield _cost(tokens, options.device, run)


def _experts_pass(module: Any, registered: str, inputs: layer.ExpertInputs) -> int:
    """Forward and backward; returns the bytes of the gradients."""
    _, gradients, raised = layer.run_backward(module, registered, inputs)
    if raised:
        raise raised
    return sum(x.nbytes for x in gradients.values() if x is not None)


def _activations(sizes: layer.Sizes, registered: str, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of activations: a rough upper estimate."""
    pairs = tokens * sizes.top_k
    if registered == "batched_mm":  # the weights of the chosen experts, and their gradient
        return 4 * pairs * 3 * sizes.hidden * sizes.width * dtype.itemsize
    return 4 * pairs * (sizes.hidden + 3 * sizes.width) * dtype.itemsize
