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
from mismatch.experiments.fixes.base import RANKED_BY, Effect, FixOutcome, HeldOut
from mismatch.experiments.fixes.catalogue import is_combination
from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample, difference, paired
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.permutation import LEVEL, exchange, holm
from mismatch.metrics.registry import Metric
from mismatch.types import Bools, Estimate, Floats, Ints

LEAST = 0.05  # share of the mismatch that a change has to move to matter
METHOD = (
    "A fix is significant where its change of k3 or of mean |delta| is: a permutation test that "
    "exchanges before and after within prompts, adjusted for all fixes and both metrics (Holm), "
    "at 5 %. A change by less than 5 % of what there was is negligible, whatever its p-value. The "
    "best is chosen again on half of the prompts and measured on the others. Intervals are 95 % "
    "each, not adjusted."
)


@dataclass(frozen=True, slots=True)
class TokenDeltas:
    """Token log-ratios of one side.

    Attributes:
        delta: [A].
        sequence: [A] sequence of each action token.
        prompt: [N] prompt of each sequence, numbered alike on both sides.
    """

    delta: Floats
    sequence: Ints
    prompt: Ints

    @property
    def sample(self) -> Sample:
        return Sample({"delta": self.delta}, self.sequence, self.prompt)

    def only(self, tokens: Bools) -> TokenDeltas:
        """Some of its tokens, [A]."""
        return TokenDeltas(self.delta[tokens], self.sequence[tokens], self.prompt)


def change_of(
    metric: str, before: TokenDeltas, after: TokenDeltas, *, same_tokens: bool, seed: int
) -> Estimate:
    """after - before of one metric, with its 95 % interval.

    Raises:
        EmptyComparison: no token.
    """
    if same_tokens:
        return paired(
            METRICS[metric],
            before.sample.arrays,
            after.sample.arrays,
            sequence=before.sequence,
            prompt=before.prompt,
            seed=seed,
        )
    return difference(METRICS[metric], before.sample, after.sample, seed=seed)


def removed_share(
    metric: str,
    before: TokenDeltas,
    after: TokenDeltas,
    change: Estimate,
    *,
    same_tokens: bool,
    seed: int,
) -> Estimate | None:
    """1 - after / before of one metric: the practical size of a fix; None where before is 0.

    On the same tokens its interval is that of the ratio; where a side sampled anew it is that of
    the change, over the value before.

    Args:
        change: after - before, as :func:`change_of` gives it.
    """
    if same_tokens:
        formula = METRICS[metric].terms
        share = Metric(
            f"removed:{metric}",
            lambda before, after: (formula(delta=before), formula(delta=after)),
            "ratio",
            combine=lambda means: 1.0 - means[..., 1] / means[..., 0],
        )
        estimator = Estimator(before.sequence, before.prompt, seed=seed)
        with np.errstate(all="ignore"):
            ratio = estimator.one(share, {"before": before.delta, "after": after.delta})
        return ratio if ratio is not None and np.isfinite(ratio.value) else None
    whole = METRICS[metric](delta=before.delta)
    if not (0.0 < whole < np.inf and np.isfinite(change.value)):
        return None
    low, high = (None if end is None else -end / whole for end in (change.high, change.low))
    return replace(change, value=-change.value / whole, low=low, high=high)


def p_value(metric: str, before: TokenDeltas, after: TokenDeltas, seed: int = 0) -> float:
    """Probability of such a change, or a larger one, if before and after could be exchanged.

    Raises:
        EmptyComparison: no token on a side.
        MismatchError: no prompt that both sides hold.
    """
    return exchange(*(per_prompt(metric, side.sample) for side in (before, after)), seed=seed)


def judged(rows: Sequence[FixOutcome], raw: Mapping[str, Mapping[str, float]]) -> list[FixOutcome]:
    """Rows with adjusted p-values and what they mean; rows that were not measured stay.

    Args:
        raw: row id -> metric -> p-value.
    """
    keys = [(row.id, metric) for row in rows if row.measured for metric in raw[row.id]]
    adjusted = dict(zip(keys, holm([raw[id][metric] for id, metric in keys]), strict=True))
    return [
        _with_outcome(row, {metric: adjusted[row.id, metric] for metric in raw[row.id]})
        if row.measured
        else row
        for row in rows
    ]


def _with_outcome(row: FixOutcome, p_values: dict[str, float]) -> FixOutcome:
    sure = [metric for metric, p in p_values.items() if p <= LEVEL and row.changes[metric].value]
    moved = [metric for metric in sure if _matters(row, metric)]
    signs = {1 if row.changes[metric].value > 0 else -1 for metric in moved}
    outcome: Effect = "negligible" if sure else "none"
    if signs:
        outcome = "mixed" if len(signs) == 2 else "worse" if 1 in signs else "better"
    return replace(row, p_values=p_values, significant=bool(sure), outcome=outcome)


def _matters(row: FixOutcome, metric: str) -> bool:
    """Whether a change is at least ``LEAST`` of what there was before."""
    change = row.changes[metric].value
    before = row.before[metric].value if metric in row.before else 0.0
    return change != 0 and not abs(change) < LEAST * abs(before)


def ranked(rows: Sequence[FixOutcome]) -> tuple[FixOutcome, ...]:
    """Best first, see :class:`FixTable`."""
    group = {"better": 0, "negligible": 1, "none": 1, "mixed": 2, "worse": 3, None: 4}

    def key(row: FixOutcome) -> tuple[float, ...]:
        if not row.measured:
            return (5 if row.applies is False else 4, 0.0, 0.0)
        # What chance alone may have lowered does not count for a rank.
        left = (_certain(row, metric) for metric in RANKED_BY)
        return (group[row.outcome], *left, *(row.after[metric].value for metric in RANKED_BY))

    return tuple(sorted(rows, key=key))


def _certain(row: FixOutcome, metric: str) -> float:
    """What is left of a metric, counting a change only where it is significant."""
    sure = row.p_values.get(metric, 1.0) <= LEVEL or metric not in row.before
    return (row.after if sure else row.before)[metric].value


def best_of(rows: Sequence[FixOutcome]) -> tuple[str | None, str | None]:
    """Ids of the best single fix and of the best of all, of ranked rows; None where none helps."""
    helpful = [row for row in rows if row.outcome == "better"]
    single = next((row.id for row in helpful if not is_combination(row)), None)
    return single, helpful[0].id if helpful else None


def per_prompt(metric: str, sample: Sample) -> dict[int, tuple[float, float]]:
    """(Sum of the metric's terms, number of tokens) of every prompt; for a mean over tokens.

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


FEWEST = 2  # prompts of a half


@dataclass(frozen=True, slots=True)
class Tried:
    """One fix as it was measured: log-ratios without it and with it.

    Attributes:
        row: its numbers on all prompts.
    """

    row: FixOutcome
    before: TokenDeltas
    after: TokenDeltas

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
    def sides(self) -> tuple[TokenDeltas, TokenDeltas]:
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
