"""The trainer's whole distributions, at the positions and ids that the engine chose."""

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
class Watch:
    """What to keep of a pass.

    Attributes:
        asked: what the engine kept: its positions and ids, not its logprobs.
        slots: [T] row of ``asked`` that each token of the rollout is, or -1.
    """

    asked: Distributions
    slots: Ints

    @classmethod
    def of(cls, asked: Distributions | None, rollout: Rollout) -> Watch | None:
        """The engine's choice for this rollout; None where it made none."""
        if asked is None:
            return None
        slots = np.full(len(rollout.token_ids), -1, np.int64)
        slots[rollout.actions[asked.positions]] = np.arange(len(asked.positions))
        return cls(asked, slots)

    def rows(self, targets: Ints) -> Rows:
        """What to keep of the tokens ``targets`` [n], indices into T."""
        import torch

        slots = self.slots[targets]
        ids = self.asked.ids
        return Rows(torch.from_numpy(slots), None if ids is None else torch.from_numpy(ids))

    def joined(self, parts: Sequence[tuple[Ints, NDArray[np.float32]]]) -> Distributions:
        """The distributions of all parts: (their tokens, indices into T; rows of :func:`kept`).

        Raises:
            MismatchError: a position is missing, or was given twice.
        """
        slots = np.concatenate([self.slots[targets] for targets, _ in parts])
        slots = slots[slots >= 0]
        order = np.argsort(slots, kind="stable")
        if not np.array_equal(slots[order], np.arange(len(self.asked.positions))):
            raise MismatchError(
                f"{len(slots)} distributions were taken, {len(self.asked.positions)} asked for",
                "a rank lost its part; run the pass again",
            )
        values = np.concatenate([rows for _, rows in parts])[order]
        if self.asked.ids is None:
            return Distributions(self.asked.positions, values, values.shape[1])
        return Distributions(
            self.asked.positions,
            values[:, :-1],
            self.asked.vocabulary,
            self.asked.ids,
            values[:, -1],
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """What to keep of the rows of one forward pass; on the CPU, so that looking costs no wait.

    Attributes:
        slots: [n] row of ``ids`` that each forwarded row is, or -1: not wanted.
        ids: [M, k], or None: keep whole distributions.
    """

    slots: torch.Tensor
    ids: torch.Tensor | None


def kept(logps: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Of log-probabilities [n, V] the wanted rows: whole, or at the ids and the log of the rest.

    Returns:
        [wanted, V] or [wanted, k + 1], float32, in the order of the rows.
    """
    import torch

    wanted = slots >= 0
    if not wanted.any():
        return logps.new_empty((0, logps.shape[-1] if ids is None else ids.shape[-1] + 1))
    rows = logps.detach()[wanted.nonzero()[:, 0].to(logps.device)]
    if ids is None:
        return rows
    columns = ids[slots[wanted]].to(logps.device)
    rest = rows.scatter(-1, columns, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([rows.gather(-1, columns), rest], dim=-1)
