"""Sequences while they are being sampled, and the draw of their next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from mismatch.engines.base import Sample
from mismatch.engines.sequences import sample_seed

if TYPE_CHECKING:
    import torch

    from mismatch.training.routing.capture import LayerRoutes


# An expert that a token went to: its id, and its weight among the token's experts.
EXPERT = np.dtype([("id", np.uint16), ("weight", np.float32)])


@dataclass
class Row:
    """One sequence, with the generator that all its draws come from.

    Attributes:
        job: (prompt, sample).
        routed: experts [tokens, L, K] of every forward so far, as ``EXPERT``.
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
        logprobs = np.asarray(self.logprobs, np.float64)
        if not self.routed:
            return Sample(self.ids, logprobs, reason)
        routed = np.concatenate(self.routed)
        return Sample(self.ids, logprobs, reason, routed["id"], routed["weight"])


def experts_of(layers: Sequence[LayerRoutes]) -> NDArray[Any]:
    """The experts of R rows in all layers, [R, L, K] of ``EXPERT``."""
    experts = np.empty((len(layers[0].ids), len(layers), layers[0].ids.shape[-1]), EXPERT)
    for column, routes in enumerate(layers):
        experts["id"][:, column] = routes.ids.cpu().numpy()
        experts["weight"][:, column] = routes.weights.cpu().numpy()
    return experts


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
