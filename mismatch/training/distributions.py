"""The trainer's full distributions, at the positions and ids that the engine captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Distributions
from mismatch.errors import MismatchError
from mismatch.types import Ints, Rollout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DistributionCapture:
    """Which distributions of a pass to keep.

    Attributes:
        engine: the engine's distributions; their positions and ids are used, not their logprobs.
        slots: [T] row of ``engine`` for each token of the rollout, or -1.
    """

    engine: Distributions
    slots: Ints

    @classmethod
    def of(cls, engine: Distributions | None, rollout: Rollout) -> DistributionCapture | None:
        """The positions of this rollout that the engine captured; None where it captured none."""
        if engine is None:
            return None
        slots = np.full(len(rollout.token_ids), -1, np.int64)
        slots[rollout.actions[engine.positions]] = np.arange(len(engine.positions))
        return cls(engine, slots)

    def rows(self, targets: Ints) -> CapturedRows:
        """Which rows to keep of the tokens ``targets`` [n], indices into T."""
        import torch

        slots = self.slots[targets]
        ids = self.engine.ids
        return CapturedRows(torch.from_numpy(slots), None if ids is None else torch.from_numpy(ids))

    def joined(self, parts: Sequence[tuple[Ints, NDArray[np.float32]]]) -> Distributions:
        """The distributions of all micro-batches, in the engine's order.

        Args:
            parts: (targets, indices into T; rows of :func:`select_rows`) of each micro-batch.

        Raises:
            MismatchError: a position is missing, or occurs twice.
        """
        slots = np.concatenate([self.slots[targets] for targets, _ in parts])
        slots = slots[slots >= 0]
        order = np.argsort(slots, kind="stable")
        if not np.array_equal(slots[order], np.arange(len(self.engine.positions))):
            raise MismatchError(
                f"{len(slots)} distributions were taken, {len(self.engine.positions)} asked for",
                "a rank lost its part; run the pass again",
            )
        values = np.concatenate([rows for _, rows in parts])[order]
        if self.engine.ids is None:
            return Distributions(self.engine.positions, values, values.shape[1])
        return Distributions(
            self.engine.positions,
            values[:, :-1],
            self.engine.vocabulary,
            self.engine.ids,
            values[:, -1],
        )


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Which rows of one forward pass to keep; CPU tensors, so that reading them never syncs.

    Attributes:
        slots: [n] row of ``ids`` for each forwarded row, or -1: not kept.
        ids: [M, k], or None: keep the whole vocabulary.
    """

    slots: torch.Tensor
    ids: torch.Tensor | None


def select_rows(logps: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The rows to keep of log-probabilities [n, V]: whole, or at the ids and the log of the rest.

    Returns:
        [kept, V] or [kept, k + 1], float32, in the order of the rows.
    """
    import torch

    selected = slots >= 0
    if not selected.any():
        return logps.new_empty((0, logps.shape[-1] if ids is None else ids.shape[-1] + 1))
    rows = logps.detach()[selected.nonzero()[:, 0].to(logps.device)]
    if ids is None:
        return rows
    columns = ids[slots[selected]].to(logps.device)
    rest = rows.scatter(-1, columns, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([rows.gather(-1, columns), rest], dim=-1)
