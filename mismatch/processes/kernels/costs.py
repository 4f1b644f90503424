"""Seconds and memory of attention and experts, forward and backward, at growing lengths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mismatch.errors import named_line
from mismatch.experiments.kernels import Cost
from mismatch.processes.kernels import expert_layer as layer
from mismatch.processes.kernels.cases import DTYPES, full, inputs_of
from mismatch.processes.kernels.findings import leaves_of
from mismatch.processes.kernels.geometry import ModelGeometry, Options
from mismatch.processes.kernels.runner import Runner
from mismatch.training.distributed import MemoryPeak

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
