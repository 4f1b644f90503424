"""Time and memory of experts, forward and backward, at the model's own sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from mismatch.experiments.kernels.types import Cost
from mismatch.processes.kernels import expert_layer as layer
from mismatch.processes.kernels.cases import DTYPES
from mismatch.processes.kernels.checks import line
from mismatch.processes.kernels.costs import QUICK_S, SHARE_OF_FREE, free_bytes
from mismatch.processes.kernels.geometry import ModelGeometry, Options
from mismatch.training.memory import MemoryPeak


def costs(
    geometry: ModelGeometry, options: Options, registered: str, sizes: layer.Sizes
) -> Iterator[Cost]:
    """Forward and backward at the model's own sizes, in the least of the dtypes."""
    if not options.tokens:
        return
    name = min(options.dtypes, key=lambda one: torch.finfo(DTYPES[one]).bits)
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
        yield _cost(module, registered, sizes, tokens, dtype, options)


def _cost(
    module: Any,
    registered: str,
    sizes: layer.Sizes,
    tokens: int,
    dtype: torch.dtype,
    options: Options,
) -> Cost:
    inputs = layer.given(sizes, tokens, options.device, dtype, options.seed)
    times, peaks = [], []
    for _ in range(max(2, options.repeats)):  # the first one warms up
        try:
            with MemoryPeak(torch.device(options.device), True) as peak:
                _, gradients, raised = layer.ran(module, registered, inputs)
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
    """Roughly, and more rather than less."""
    pairs, size = tokens * sizes.top_k, torch.finfo(dtype).bits // 8
    if registered == "batched_mm":  # the weights of the chosen experts, and their gradient
        return 4 * pairs * 3 * sizes.hidden * sizes.width * size
    return 4 * pairs * (sizes.hidden + 3 * sizes.width) * size
