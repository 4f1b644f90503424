"""What a memory prediction is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mismatch.specs import TrainSpec
from mismatch.training.packing import plan_batches
from mismatch.types import Sampling

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that takes memory.

    >>> Part("logits chunk", 1 << 20, "16·rows·V").bytes
    1048576
    """

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time, and what is alive then."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Peak memory of one side on one device (GPU, or rank on a CPU).

    Attributes:
        side: "engine" or the name of a pass of the trainer.
        moments: every point that could be the highest; the highest one decides.
    """

    side: str
    moments: tuple[Moment, ...]

    @property
    def highest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def peak_bytes(self) -> int:
        return self.highest.bytes

    @property
    def moment(self) -> str:
        return self.highest.name

    def part(self, name: str) -> int:
        """Bytes of a part at the highest moment, 0 where it has none of that name."""
        return sum(part.bytes for part in self.highest.parts if part.name == name)


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be scored: tokens of every sequence, prompt included, and the sampling law."""

    lengths: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)

    def largest_batch(self, spec: TrainSpec) -> tuple[int, int]:
        """(B, T) of the micro-batch that takes most: by tokens², which attention scores cost."""
        sizes = []
        for batch in plan_batches(list(self.lengths), spec.micro_batch_tokens, spec.layout):
            lengths = [self.lengths[index] for index in batch.sequences]
            packed = spec.layout == "packing"
            sizes.append((1, sum(lengths)) if packed else (len(lengths), max(lengths)))
        return max(sizes, key=lambda size: (size[0] * size[1] ** 2, size[0] * size[1]))
