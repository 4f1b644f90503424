"""Sequences while they are being sampled, and the draw of their next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from mismatch.engines.base import Sample
from mismatch.engines.seeds import sample_seed

if TYPE_CHECKING:
    import torch


@dataclass
class Row:
    """One sequence, with the generator that all its draws come from.

    Attributes:
        job: (prompt, sample).
        routed: experts [tokens, L, K] of every forward so far.
    """

    job: tuple[int, int]
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed: list[NDArray[Any]] = field(default_factory=list)

    @classmethod
    def seeded(cls, seed: int, job: tuple[int, int]) -> Self:
        """A row that depends on the run's seed and its own place, not on the batch."""
        import torch

        return cls(job, torch.Generator().manual_seed(sample_seed(seed, *job)))

    def finish(self, reason: str) -> Sample:
        routed = np.concatenate(self.routed) if self.routed else None
        return Sample(self.ids, np.asarray(self.logprobs, np.float64), reason, routed)


def draw(rows: Sequence[Row], logprobs: torch.Tensor, greedy: bool) -> None:
    """Append one token to every row: argmax of p / q with exponential q, which samples p.

    Args:
        logprobs: [rows, V] of the law.
        greedy: argmax of p alone.
    """
    import torch

    if greedy:
        chosen = logprobs.argmax(dim=-1)
    else:
        # On the CPU, row by row: the same draws on every device.
        size = logprobs.shape[-1]
        noise = [torch.empty(size).exponential_(generator=row.generator) for row in rows]
        chosen = (logprobs - torch.stack(noise).to(logprobs.device).log()).argmax(dim=-1)
    values = logprobs.gather(1, chosen[:, None])[:, 0].double().tolist()
    for row, token, value in zip(rows, chosen.tolist(), values, strict=True):
        row.ids.append(token)
        row.logprobs.append(value)
