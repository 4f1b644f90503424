"""Seconds and memory of attention and experts, forward and backward, at growing lengths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mismatch.experiments.kernels.types import Cost
from mismatch.processes.kernels import expert_layer as layer
from mismatch.processes.kernels.cases import DTYPES, Inputs, Scene, full, inputs_of
from mismatch.processes.kernels.checks import line
from mismatch.processes.kernels.geometry import ModelGeometry, Options
from mismatch.processes.kernels.precision import leaves_of
from mismatch.processes.kernels.runner import Runner
from mismatch.training.memory import MemoryPeak

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
        last = _measured(runner, geometry, options, dtype, FIRST)
    for tokens in lengths:
        note = _too_much(last, tokens, options)
        if note:
            yield Cost(tokens, None, None, note)
            continue
        cost = _measured(runner, geometry, options, dtype, tokens)
        yield cost
        last = cost if cost.seconds is not None else last


def _too_much(last: Cost | None, tokens: int, options: Options) -> str:
    """Why a length is left out; "" if it is not."""
    if last is None or last.seconds is None or last.peak_bytes is None:
        return ""
    growth = (tokens / last.tokens) ** 2
    seconds, memory = last.seconds * growth, last.peak_bytes * growth
    free = options.budget_bytes or SHARE_OF_FREE * free_bytes(options.device)
    if memory > free:
        return f"may take {memory / 2**30:.3g} GiB, by its {last.tokens} tokens; not tried"
    if seconds > options.budget_s:
        return f"may take {seconds:.3g} s, by its {last.tokens} tokens; not tried"
    return ""


def free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _measured(
    runner: Runner, geometry: ModelGeometry, options: Options, dtype: str, tokens: int
) -> Cost:
    from mismatch.training.memory import MemoryPeak

    scene = replace(full(geometry)[0], queries=tokens, keys=tokens)
    inputs = inputs_of(geometry, scene, options.device, DTYPES[dtype], options.seed)
    device = torch.device(options.device)
    seconds: list[float] = []
    peaks: list[int] = []
    try:
        while len(seconds) < RUNS and sum(seconds) < QUICK_S:
            with MemoryPeak(device, active=True) as peak:
                inputs_bytes = _pass(runner, scene, inputs, device)
            seconds.append(peak.seconds)
            peaks.append(max(0, (peak.bytes or 0) - inputs_bytes))
    except torch.OutOfMemoryError:
        return Cost(tokens, None, None, "out of memory")
    except Exception as error:
        return Cost(tokens, None, None, line(error))
    return Cost(tokens, statistics.median(seconds), max(peaks))


def _pass(runner: Runner, scene: Scene, inputs: Inputs, device: torch.device) -> int:
    """Forward and backward; returns the bytes of the inputs' copies and gradients."""
    leaves = leaves_of(inputs)
    torch.autograd.backward(runner(scene, leaves).sum())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return sum(2 * x.numel() * x.element_size() for x in leaves.named.values())


# ---------------------------------------------------------------- experts


def expert_costs(
    geometry: ModelGeometry, options: Options, registered: str, sizes: layer.Sizes
) -> Iterator[Cost]:
    """Forward and backward at the model's own sizes, in the smallest of the dtypes."""
    if not options.tokens:
        return
    name = min(options.dtypes, key=lambda dtype: torch.finfo(DTYPES[dtype]).bits)
    dtype, start = DTYPES[name], time.monotonic()
    weights = 3 * sizes.experts * sizes.hidden * sizes.width * torch.finfo(dtype).bits // 8
    budget = options.budget_bytes or int(SHARE_OF_FREE * free_bytes(options.device))
    module = None
    for tokens in options.tokens:
        needed = 3 * weights + _activations(sizes, registered, tokens, dtype)
        if needed > budget:
            yield Cost(tokens, None, None, f"may take {needed / 2**30:.3g} GiB; not tried")
            continue
        if time.monotonic() - start > options.budget_s:
            yield Cost(tokens, None, None, f"left out after {options.budget_s:.0f} s")
            continue
        if module is None:
            module = layer.build(geometry, sizes, options.device, dtype, options.seed)
        yield _expert_cost(module, registered, sizes, tokens, dtype, options)


def _expert_cost(
    module: Any,
    registered: str,
    sizes: layer.Sizes,
    tokens: int,
    dtype: torch.dtype,
    options: Options,
) -> Cost:
    inputs = layer.random_inputs(sizes, tokens, options.device, dtype, options.seed)
    times, peaks = [], []
    for _ in range(max(2, options.repeats)):  # the first run warms up
        try:
            with MemoryPeak(torch.device(options.device), True) as peak:
                _, gradients, raised = layer.run_backward(module, registered, inputs)
                _settle(options.device)
        except Exception as error:
            return Cost(tokens, None, None, line(error))
        if raised:
            return Cost(tokens, None, None, raised)
        kept = sum(x.nbytes for x in gradients.values() if x is not None)
        times.append(peak.seconds)
        peaks.append(max(0, (peak.bytes or 0) - kept))
        del gradients
        if times[0] > QUICK_S:  # nothing to warm up that would show in it
            return Cost(tokens, times[0], peaks[0])
    return Cost(tokens, statistics.median(times[1:]), max(peaks[1:]))


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _activations(sizes: layer.Sizes, registered: str, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of activations: a rough upper estimate."""
    pairs, size = tokens * sizes.top_k, torch.finfo(dtype).bits // 8
    if registered == "batched_mm":  # the weights of the chosen experts, and their gradient
        return 4 * pairs * 3 * sizes.hidden * sizes.width * size
    return 4 * pairs * (sizes.hidden + 3 * sizes.width) * size
