"""Planted gradients: a reference per prompt, and trainers off by a known bias and noise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from mismatch.experiments.gradients.analysis import check_gradients
from mismatch.experiments.gradients.types import (
    GradientBatch,
    GradientCheck,
    Gradients,
    Trainer,
)
from mismatch.types import Floats

REFERENCE, TRAIN = "reference:fp32", "fsdp"
SIZES = {"attention": 400, "sinks": 20, "experts": 600, "head": 300}
DIMENSION = sum(SIZES.values())
SLOTS = 512
TRAINERS = (
    Trainer(REFERENCE, "reference", "reference", "float32 reference"),
    Trainer(TRAIN, "baseline", "baseline", "the trainer as it is"),
    Trainer("fix:attention-sinks", "attention-sinks", "fix", "the kernel honours the sinks"),
    Trainer("fix:fp16", "fp16", "fix", "the trainer computes in fp16"),
    Trainer("fix:fp32", "fp32", "fix", "the trainer computes in float32"),
)


def slices() -> dict[str, slice]:
    """Where each group lies in a gradient [D]."""
    ends = np.cumsum([0, *SIZES.values()])
    return {
        name: slice(int(a), int(b)) for name, a, b in zip(SIZES, ends[:-1], ends[1:], strict=True)
    }


def sketch(parts: Floats, slots: int = SLOTS) -> Floats:
    """Signed and folded per group, [P, G, slots]."""
    draw = np.random.default_rng([11, 7])
    signs, slot = draw.choice([-1.0, 1.0], DIMENSION), draw.integers(0, slots, DIMENSION)
    sketches = np.zeros((len(parts), len(SIZES), slots))
    for index, group in enumerate(slices().values()):
        for number, part in enumerate(parts):
            sketches[number, index] = np.bincount(
                slot[group], weights=(signs * part)[group], minlength=slots
            )
    return sketches


def taken(
    name: str,
    parts: Floats,
    reference: Floats | None = None,
    same_as: str = "",
    slots: int = SLOTS,
) -> Gradients:
    """As an artefact holds it; ``parts`` and ``reference`` are [P, D]."""
    total = parts.sum(axis=0)
    squares = [float((total[group] ** 2).sum()) for group in slices().values()]
    dot = size = None
    if reference is not None:
        theirs = reference.sum(axis=0)
        dot = np.array([float(total[group] @ theirs[group]) for group in slices().values()])
        size = np.array([float((theirs[group] ** 2).sum()) for group in slices().values()])
    return Gradients(
        name, tuple(SIZES), np.array(squares), dot, size,
        sketch(parts, slots), np.arange(len(parts)), None if same_as else 1.5,
        None if same_as else 3 << 20, same_as,
    )  # fmt: skip


def batch_of(prompts: int, trainers: Sequence[Trainer] = TRAINERS) -> GradientBatch:
    return GradientBatch(
        trainers=tuple(trainers),
        prompts=tuple(range(prompts)),
        deciding=prompts,
        sequences=4 * prompts,
        tokens=200 * prompts,
        advantages="rewards",
        sketch_size=SLOTS,
        not_tested=("gradient of vllm-fp32: it samples tokens of its own",),
    )


def reference_parts(prompts: int, seed: int = 0) -> Floats:
    """A common direction, and what each prompt adds."""
    draw = np.random.default_rng(seed)
    common = draw.normal(size=DIMENSION)
    parts: Floats = common + 1.5 * draw.normal(size=(prompts, DIMENSION))
    return parts


def planted(prompts: int = 16, seed: int = 0) -> tuple[list[Gradients], GradientBatch]:
    """A trainer without sinks, and fixes that repair and worsen it."""
    draw = np.random.default_rng([seed, 1])
    ref = reference_parts(prompts, seed)
    bias, noise = draw.normal(size=DIMENSION), draw.normal(size=ref.shape)
    base = ref + 0.5 * bias + 0.4 * noise
    base[:, slices()["sinks"]] = 0.0
    gradients = [
        taken(REFERENCE, ref),
        taken(TRAIN, base, ref),
        taken("fix:attention-sinks", ref + 0.05 * noise, ref),
        taken("fix:fp16", ref + 0.9 * bias + 0.8 * noise, ref),
        taken("fix:fp32", ref, ref, same_as=REFERENCE),
    ]
    return gradients, batch_of(prompts)


@cache
def make_check(prompts: int = 16) -> GradientCheck:
    return check_gradients(*planted(prompts))
