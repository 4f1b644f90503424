"""Seconds and memory of one layer's forward and backward pass, at growing lengths."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch

from mismatch.experiments.kernels.types import Cost
from mismatch.processes.kernels.cases import DTYPES, Inputs, Scene, full, inputs_of
from mismatch.processes.kernels.checks import line
from mismatch.processes.kernels.geometry import ModelGeometry, Options
from mismatch.processes.kernels.precision import leaves_of
from mismatch.processes.kernels.runner import Runner

RUNS = 3
QUICK_S = 5.0  # a pass that takes longer is not run again
FIRST = 1024  # longest length that is tried without knowing what a shorter one took
SHARE_OF_FREE = 0.5  # of the machine's memory: others work on it too


def cost_dtype(device: str, accepted: list[str]) -> str:
    """What trainers compute in there; on a CPU, where bfloat16 is often emulated, float32."""
    wanted = ("bf16", "fp16", "fp32") if device.startswith("cuda") else ("fp32", "bf16")
    return next((name for name in wanted if name in accepted), accepted[0])


def costs(
    runner: Runner, geometry: ModelGeometry, options: Options, accepted: list[str]
) -> tuple[Cost, ...]:
    """One entry per length of the options, shortest first.

    A length that would not fit, or take too long, by what the one before took (both grow with the
    square at most), is left out with a note. Memory is that beyond inputs and their gradients; the
    mask counts.
    """
    return tuple(_costs(runner, geometry, options, cost_dtype(options.device, accepted)))


def _costs(runner: Runner, geometry: ModelGeometry, options: Options, dtype: str) -> Iterator[Cost]:
    last: Cost | None = None
    lengths = sorted(set(options.tokens))
    if lengths and lengths[0] > FIRST:
        last = _one(runner, geometry, options, dtype, FIRST)
    for tokens in lengths:
        note = _too_much(last, tokens, options)
        if note:
            yield Cost(tokens, None, None, note)
            continue
        cost = _one(runner, geometry, options, dtype, tokens)
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


def _one(
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
                held = _pass(runner, scene, inputs, device)
            seconds.append(peak.seconds)
            peaks.append(max(0, (peak.bytes or 0) - held))
    except torch.OutOfMemoryError:
        return Cost(tokens, None, None, "out of memory")
    except Exception as error:
        return Cost(tokens, None, None, line(error))
    return Cost(tokens, statistics.median(seconds), max(peaks))


def _pass(runner: Runner, scene: Scene, inputs: Inputs, device: torch.device) -> int:
    """Forward and backward; bytes of what is not the kernel's: inputs' copies and gradients."""
    leaves = leaves_of(inputs)
    torch.autograd.backward(runner(scene, leaves).sum())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return sum(2 * x.numel() * x.element_size() for x in leaves.named.values())
