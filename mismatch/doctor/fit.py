"""Does it fit? Predictions against a device's memory, and the setting that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mismatch.doctor.parts import Prediction
from mismatch.run.machine import gib

GIB = 1 << 30
ERROR = 0.15  # the prediction's own: what needs more than this share of the rest is tight
# What a process takes beside its tensors: CUDA context, NCCL and library workspaces on a GPU;
# Python, torch and transformers (and vLLM's) on a CPU, measured.
GPU_RESERVE = int(1.5 * GIB)
CPU_TRAINER_RESERVE = int(0.6 * GIB)
CPU_ENGINE_RESERVE = int(1.8 * GIB)

Level = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class Fit:
    """One side on one device.

    Attributes:
        needed: predicted peak and reserve, bytes.
        capacity: bytes that one process may take.
        warnings: what is wrong, each with the setting that mends it.
    """

    prediction: Prediction
    needed: int
    capacity: int
    level: Level
    warnings: tuple[str, ...] = field(default=())


def fits(
    prediction: Prediction,
    capacity: int,
    reserve: int,
    smaller: Callable[[], str] | None = None,
) -> Fit:
    """Compare a prediction with the memory of one device.

    Args:
        reserve: what the process takes beside its tensors.
        smaller: called where it does not surely fit; names a setting that would (or "").
    """
    needed = prediction.peak_bytes + reserve
    level: Level = "fits"
    if needed > capacity:
        level = "does not fit"
    elif needed + ERROR * prediction.peak_bytes > capacity:
        level = "tight"
    if level == "fits":
        return Fit(prediction, needed, capacity, level)
    found = smaller() if smaller is not None else ""
    remedies = [found, *remedies_of(prediction)]
    text = (
        f"{prediction.side}: {gib(needed)} needed at its highest ({prediction.moment}), "
        f"{gib(capacity)} there: {level}. What would help: {'; '.join(r for r in remedies if r)}"
    )
    return Fit(prediction, needed, capacity, level, (text,))


REMEDIES = {
    "attention scores": "--attention auto (the eager kernel holds every score)",
    "attention weights held on": "--attention auto (the eager kernel holds every score)",
    "weights gathered per token and expert": "--experts-implementation bounded",
    "kept for the backward pass": "a smaller --micro-batch-tokens",
    "experts workspace": "--experts-implementation bounded, or a smaller --micro-batch-tokens",
    "expert by expert": "--experts-implementation bounded",
    "MLP": "a smaller --micro-batch-tokens",
    "attention states": "a smaller --micro-batch-tokens",
    "sharded parameters": "--master-dtype bf16, or more memory in all",
    "logits of the prefill": "--no-prefill, or a smaller --max-tokens",
    "KV cache": "a smaller --max-tokens or --max-model-len, or --engine-arg max_num_seqs=64",
    "weights": "a larger --tensor-parallel-size",
    "activations": "--engine-arg max_num_batched_tokens=4096",
    "logits": "--engine-arg max_num_seqs=64",
}


def remedies_of(prediction: Prediction) -> list[str]:
    """Settings for the parts that take at least a fifth of the peak, largest first."""
    parts = sorted(prediction.highest.parts, key=lambda part: -part.bytes)
    large = [part for part in parts if part.bytes >= prediction.peak_bytes / 5]
    named = [REMEDIES[part.name] for part in large if part.name in REMEDIES]
    return list(dict.fromkeys(named))


def highest(predictions: Sequence[Prediction]) -> Prediction:
    """The one that needs most: passes of one world run one after the other."""
    return max(predictions, key=lambda prediction: prediction.peak_bytes)
