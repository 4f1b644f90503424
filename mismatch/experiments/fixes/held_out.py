"""The best fix again, on prompts that had no part in choosing it. Pure.

The fix that looks best of many looks better than it is: chance had a say in its being chosen. So
the choice is made once more on half of the prompts, by the same rules, and the fix that they choose
is measured on the other half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import RANKED_BY, FixOutcome, HeldOut
from mismatch.experiments.fixes.catalogue import is_combination
from mismatch.experiments.fixes.significance import (
    Measured,
    change_of,
    judged,
    p_value,
    ranked,
    removed_share,
)
from mismatch.metrics import METRICS
from mismatch.types import Estimate, Ints

FEWEST = 2  # prompts of a half


@dataclass(frozen=True, slots=True)
class Tried:
    """One fix as it was measured: log-ratios without it and with it.

    Attributes:
        row: its numbers on all prompts.
    """

    row: FixOutcome
    before: Measured
    after: Measured

    @property
    def same_tokens(self) -> bool:
        return self.row.paired is not None

    def of(self, prompts: Ints) -> Tried | None:
        """The same on some prompts; None where a side has no token of them."""
        halves = [side.only(np.isin(side.prompt[side.sequence], prompts)) for side in self.sides]
        if not all(len(side.delta) for side in halves):
            return None
        return Tried(self.row, *halves)

    @property
    def sides(self) -> tuple[Measured, Measured]:
        return self.before, self.after

    def chances(self, seed: int) -> dict[str, float]:
        return {metric: p_value(metric, *self.sides, seed) for metric in RANKED_BY}

    def rough(self) -> FixOutcome:
        """Its row, with the bare values of these prompts."""
        values = [
            {m: _bare(METRICS[m](delta=side.delta)) for m in RANKED_BY} for side in self.sides
        ]
        before, after = values
        changes = {m: _bare(after[m].value - before[m].value) for m in RANKED_BY}
        return replace(self.row, before=before, after=after, changes=changes)


def held_out(best: str, tried: Sequence[Tried], seed: int) -> HeldOut:
    """The best fix, chosen again on half of the prompts and measured on the others.

    Args:
        best: of all prompts; one of ``tried``. A single fix is chosen among single fixes.
    """
    prompts = np.unique(np.concatenate([each.before.prompt for each in tried]))
    order = np.random.default_rng(seed).permutation(prompts)
    half = len(order) // 2
    bare = HeldOut(best, None, half, len(order) - half)
    if half < FEWEST:
        return replace(bare, reason="too few prompts to leave half of them out")
    chosen = _chosen(best, tried, order[:half], seed)
    if chosen is None:
        return replace(bare, reason="half of the prompts find no fix that helps")
    rest = chosen.of(order[half:])
    if rest is None:
        return replace(bare, chosen=chosen.row.id, reason="the other prompts have no token")
    return _measured(replace(bare, chosen=chosen.row.id), rest, seed)


def _chosen(best: str, tried: Sequence[Tried], prompts: Ints, seed: int) -> Tried | None:
    """The best on these prompts, by the rules that hold for all."""
    by_id = {each.row.id: each for each in tried}
    together = is_combination(by_id[best].row)
    rows: list[FixOutcome] = []
    raw: dict[str, Mapping[str, float]] = {}
    for each in tried:
        part = each.of(prompts)
        if part is None or is_combination(each.row) > together:
            continue
        try:
            raw[each.row.id] = part.chances(seed)
        except MismatchError:  # no prompt that both sides hold
            continue
        rows.append(part.rough())
    first = next((row for row in ranked(judged(rows, raw)) if row.outcome == "better"), None)
    return by_id[first.id] if first else None


def _measured(bare: HeldOut, rest: Tried, seed: int) -> HeldOut:
    try:
        chances = rest.chances(seed)
        change = {
            m: change_of(m, *rest.sides, same_tokens=rest.same_tokens, seed=seed) for m in RANKED_BY
        }
    except MismatchError as error:
        return replace(bare, reason=error.message)
    row = judged([replace(rest.rough(), changes=change)], {rest.row.id: chances})[0]
    shares = {
        m: removed_share(m, *rest.sides, change[m], same_tokens=rest.same_tokens, seed=seed)
        for m in RANKED_BY
    }
    return replace(
        bare,
        removed={metric: share for metric, share in shares.items() if share is not None},
        p_values=row.p_values,
        confirmed=bare.chosen == bare.id and row.outcome == "better",
    )


def _bare(value: float) -> Estimate:
    return Estimate(value, None, None, 0, 0, 0)
