"""Before and after a fix: what changed, by how much more than chance, and in what order. Pure.

A change is tested by exchanging the two sides within whole prompts
(:func:`mismatch.metrics.permutation.exchange`). Every fix is tested for k3 and for mean |delta|,
and all these tests together keep the chance of a single false claim under 5 % (Holm).

The fix that looks best of many looks better than it is: chance had a say in its being chosen. So
the choice is made once more on half of the prompts, by the same rules, and the fix that they choose
is measured on the other half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.fixes.catalogue import is_combination
from mismatch.experiments.results import RANKED_BY, Effect, FixOutcome, HeldOut
from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample, difference, paired
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.permutation import LEVEL, exchange, holm
from mismatch.metrics.registry import Metric
from mismatch.types import Estimate, Ints

LEAST = 0.05  # share of the mismatch that a change has to move to matter
FEWEST = 2  # prompts of a half
METHOD = (
    "A fix is significant where its change of k3 or of mean |delta| is: a permutation test that "
    "exchanges before and after within prompts, adjusted for all fixes and both metrics (Holm), "
    "at 5 %. A change by less than 5 % of what there was is negligible, whatever its p-value. The "
    "best is chosen again on half of the prompts and measured on the others. Intervals are 95 % "
    "each, not adjusted."
)


@dataclass(frozen=True, slots=True)
class Tried:
    """One fix as it was measured."""

    row: FixOutcome
    before: Sample
    """``delta`` of the action tokens without it."""
    after: Sample
    """With it; prompts are numbered as in ``before``."""
    same_tokens: bool

    def change(self, metric: str, seed: int) -> Estimate:
        """Return after - before of one metric, with its 95 % interval.

        Raises:
            EmptyComparison: no token.
        """
        compare = paired if self.same_tokens else difference
        return compare(METRICS[metric], self.before, self.after, seed=seed)

    def removed(self, metric: str, seed: int) -> Estimate | None:
        """Return 1 - after / before of one metric: its practical size; None where before is 0.

        On the same tokens the interval is that of the ratio; where a side sampled again it is that
        of the change, over the value before.
        """
        if self.same_tokens:
            formula = METRICS[metric].terms
            share = Metric(
                f"removed:{metric}",
                lambda before, after: (formula(delta=before), formula(delta=after)),
                "ratio",
                combine=lambda means: 1.0 - means[..., 1] / means[..., 0],
            )
            estimator = Estimator(self.before.sequence, self.before.prompt, seed=seed)
            sides = {"before": self.before.arrays["delta"], "after": self.after.arrays["delta"]}
            with np.errstate(all="ignore"):
                ratio = estimator.one(share, sides)
            return ratio if ratio is not None and np.isfinite(ratio.value) else None
        whole, change = METRICS[metric](**self.before.arrays), self.change(metric, seed)
        if not (0.0 < whole < np.inf and np.isfinite(change.value)):
            return None
        low, high = (None if end is None else -end / whole for end in (change.high, change.low))
        return replace(change, value=-change.value / whole, low=low, high=high)

    def p_values(self, seed: int) -> dict[str, float]:
        """Return the chance of changes of this size if before and after were exchangeable.

        Raises:
            EmptyComparison: no token on a side.
            MismatchError: no prompt that both sides hold.
        """
        return {
            metric: exchange(
                *(per_prompt(metric, side) for side in (self.before, self.after)), seed=seed
            )
            for metric in RANKED_BY
        }

    def measured(self, seed: int) -> FixOutcome:
        """Return its row with changes and removed shares."""
        changes = {metric: self.change(metric, seed) for metric in RANKED_BY}
        shares = {metric: self.removed(metric, seed) for metric in RANKED_BY}
        return replace(
            self.row,
            paired=changes["k3_kl"] if self.same_tokens else None,
            difference=None if self.same_tokens else changes["k3_kl"],
            changes=changes,
            removed={metric: share for metric, share in shares.items() if share is not None},
        )

    def on(self, prompts: Ints) -> Tried | None:
        """Return the fix on some prompts, with bare values; None where a side has no token."""
        sides = []
        for side in (self.before, self.after):
            kept = np.isin(side.prompt[side.sequence], prompts)
            if not kept.any():
                return None
            delta = {"delta": side.arrays["delta"][kept]}
            sides.append(Sample(delta, side.sequence[kept], side.prompt))
        before, after = ({m: METRICS[m](**side.arrays) for m in RANKED_BY} for side in sides)
        row = replace(
            self.row,
            before={m: _bare(value) for m, value in before.items()},
            after={m: _bare(value) for m, value in after.items()},
            changes={m: _bare(after[m] - before[m]) for m in RANKED_BY},
        )
        return Tried(row, sides[0], sides[1], self.same_tokens)


def per_prompt(metric: str, sample: Sample) -> dict[int, tuple[float, float]]:
    """Return (sum of the metric's terms, number of tokens) of every prompt, for a mean over tokens.

    Raises:
        EmptyComparison: no token.
    """
    if len(sample.sequence) == 0:
        raise EmptyComparison("no action tokens before or after the change")
    needed = {name: sample.arrays[name] for name in METRICS[metric].needs}
    with np.errstate(all="ignore"):
        terms = np.asarray(METRICS[metric].terms(**needed), np.float64)
    prompts, code = np.unique(sample.prompt[sample.sequence], return_inverse=True)
    totals, counts = np.bincount(code, weights=terms), np.bincount(code)
    return {
        int(prompt): (float(total), float(count))
        for prompt, total, count in zip(prompts, totals, counts, strict=True)
    }


def judged(rows: Sequence[FixOutcome], raw: Mapping[str, Mapping[str, float]]) -> list[FixOutcome]:
    """Return rows with adjusted p-values and what they mean; rows without numbers stay.

    Args:
        raw: row id -> metric -> p-value.
    """
    keys = [(row.id, metric) for row in rows if row.measured for metric in raw[row.id]]
    adjusted = dict(zip(keys, holm([raw[id][metric] for id, metric in keys]), strict=True))
    result = []
    for row in rows:
        if row.measured:
            p_values = {metric: adjusted[row.id, metric] for metric in raw[row.id]}
            changes = {m: row.changes[m].value for m, p in p_values.items() if p <= LEVEL}
            sure = {metric: change for metric, change in changes.items() if change}
            signs = set()
            for metric, change in sure.items():
                before = row.before[metric].value if metric in row.before else 0.0
                if abs(change) >= LEAST * abs(before):
                    signs.add(change > 0)
            outcome: Effect = "negligible" if sure else "none"
            if signs:
                outcome = "mixed" if len(signs) == 2 else "worse" if True in signs else "better"
            row = replace(row, p_values=p_values, significant=bool(sure), outcome=outcome)
        result.append(row)
    return result


def ranked(rows: Sequence[FixOutcome]) -> tuple[FixOutcome, ...]:
    """Return rows, best first, see :class:`FixTable`."""
    group = {"better": 0, "negligible": 1, "none": 1, "mixed": 2, "worse": 3, None: 4}

    def key(row: FixOutcome) -> tuple[float, ...]:
        if not row.measured:
            return (4 if row.applies else 5, 0.0, 0.0)
        # What chance alone may have lowered does not count for a rank.
        sure = [row.p_values.get(m, 1.0) <= LEVEL or m not in row.before for m in RANKED_BY]
        left = [
            (row.after if certain else row.before)[metric].value
            for metric, certain in zip(RANKED_BY, sure, strict=True)
        ]
        return (group[row.outcome], *left, *(row.after[metric].value for metric in RANKED_BY))

    return tuple(sorted(rows, key=key))


def best_of(rows: Sequence[FixOutcome]) -> tuple[str | None, str | None]:
    """Return the ids of the best single fix and of the best of all, of ranked rows."""
    helpful = [row for row in rows if row.outcome == "better"]
    single = next((row.id for row in helpful if not is_combination(row)), None)
    return single, helpful[0].id if helpful else None


def held_out(best: str, tried: Sequence[Tried], seed: int) -> HeldOut:
    """Choose the best fix again on half of the prompts and measure it on the others.

    Args:
        best: of all prompts; one of ``tried``. A single fix is chosen among single fixes.
    """
    prompts = np.unique(np.concatenate([each.before.prompt for each in tried]))
    order = np.random.default_rng(seed).permutation(prompts)
    half = len(order) // 2
    held = HeldOut(best, None, half, len(order) - half)
    if half < FEWEST:
        return replace(held, reason="too few prompts to leave half of them out")
    by_id = {each.row.id: each for each in tried}
    together = is_combination(by_id[best].row)
    rows: list[FixOutcome] = []
    raw: dict[str, Mapping[str, float]] = {}
    for each in tried:
        part = each.on(order[:half])
        if part is None or is_combination(each.row) > together:
            continue
        try:
            raw[each.row.id] = part.p_values(seed)
        except MismatchError:  # no prompt that both sides hold
            continue
        rows.append(part.row)
    _, chosen = best_of(ranked(judged(rows, raw)))
    if chosen is None:
        return replace(held, reason="half of the prompts find no fix that helps")
    held = replace(held, chosen=chosen)
    rest = by_id[chosen].on(order[half:])
    if rest is None:
        return replace(held, reason="the other prompts have no token")
    try:
        (row,) = judged([rest.measured(seed)], {chosen: rest.p_values(seed)})
    except MismatchError as error:
        return replace(held, reason=error.message)
    confirmed = chosen == best and row.outcome == "better"
    return replace(held, removed=row.removed, p_values=row.p_values, confirmed=confirmed)


def _bare(value: float) -> Estimate:
    return Estimate(value, None, None, 0, 0, 0)
