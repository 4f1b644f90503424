"""Before and after a fix: what changed, by how much more than chance, and in what order. Pure.

A change is tested by exchanging the two sides within whole prompts: where the fix does nothing, a
prompt's numbers with it and without it could as well be swapped (an exact permutation test; the
statistic is the difference of the two means over tokens). That holds for few prompts and for heavy
tails, and for tokens that were sampled anew as well as for the same ones. Every fix is tested for
k3 and for mean |delta|, and all these tests together keep the chance of a single false claim under
5 % (Holm 1979, "A simple sequentially rejective multiple test procedure").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.fixes.base import RANKED_BY, Effect, FixOutcome
from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample, difference, paired
from mismatch.metrics.registry import floats
from mismatch.types import Estimate, Floats, Ints

PerPrompt = Mapping[int, tuple[float, float]]

LEVEL = 0.05
EXHAUSTIVE = 12  # prompts up to which all swaps are tried
SWAPS = 20_000
CHUNK = 2_000
METHOD = (
    "A fix is significant where its change of k3 or of mean |delta| is: a permutation test that "
    "exchanges before and after within prompts, adjusted for all fixes and both metrics (Holm), "
    "at 5 %. Intervals are 95 % each, not adjusted."
)


@dataclass(frozen=True, slots=True)
class Measured:
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


def change_of(
    metric: str, before: Measured, after: Measured, *, same_tokens: bool, seed: int
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


def p_value(metric: str, before: Measured, after: Measured, seed: int = 0) -> float:
    """Probability of such a change, or a larger one, if before and after could be exchanged.

    Raises:
        EmptyComparison: no token on a side.
        MismatchError: no prompt that both sides hold.
    """
    return exchange(*(per_prompt(metric, side.sample) for side in (before, after)), seed=seed)


def exchange(before: PerPrompt, after: PerPrompt, *, seed: int = 0) -> float:
    """The permutation test itself, on (sum of terms, number of tokens) of every prompt.

    Raises:
        MismatchError: no prompt that both sides hold.
    """
    sums = (before, after)
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise MismatchError("before and after share no prompt", "use the same prompts")
    table = np.array([[*sums[0][prompt], *sums[1][prompt]] for prompt in shared])
    first, count, second, other = table.T
    observed = _statistic(first.sum(), count.sum(), second.sum(), other.sum())
    if not np.isfinite(observed):
        return 1.0
    moved, shift = second - first, other - count
    # Sums in another order differ in their last bits: a change of that size is none.
    rounding = 1e-12 * (abs(first.sum() / count.sum()) + abs(second.sum() / other.sum()))
    least = max(0.0, abs(observed) - rounding)
    extreme = tried = 0
    for swaps in _swaps(len(shared), seed):
        one, n_one = first.sum() + swaps @ moved, count.sum() + swaps @ shift
        two, n_two = second.sum() - swaps @ moved, other.sum() - swaps @ shift
        extreme += int((np.abs(_statistic(one, n_one, two, n_two)) >= least).sum())
        tried += len(swaps)
    if len(shared) <= EXHAUSTIVE:
        return extreme / tried
    return (extreme + 1) / (tried + 1)


def holm(values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given.

    >>> holm([0.01, 0.04])
    [0.02, 0.04]
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    adjusted, highest = [1.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = highest
    return adjusted


def prompts_to_tell(tests: int) -> int:
    """Prompts below which no change, however large, is significant in that many tests.

    Exchanging before and after within n prompts gives no p-value under 2 / 2^n (an arrangement and
    its mirror image are equally extreme), and Holm's method multiplies the least by ``tests``.

    >>> prompts_to_tell(1), prompts_to_tell(3)
    (6, 7)
    """
    return math.ceil(math.log2(2 * tests / LEVEL))


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
    signs = {
        1 if row.changes[metric].value > 0 else -1
        for metric, p in p_values.items()
        if p <= LEVEL and row.changes[metric].value != 0
    }
    outcome: Effect = "none"
    if signs:
        outcome = "mixed" if len(signs) == 2 else "worse" if 1 in signs else "better"
    return replace(row, p_values=p_values, significant=bool(signs), outcome=outcome)


def ranked(rows: Sequence[FixOutcome]) -> tuple[FixOutcome, ...]:
    """Best first, see :class:`FixTable`."""
    group = {"better": 0, "none": 1, "mixed": 2, "worse": 3, None: 4}

    def key(row: FixOutcome) -> tuple[float, ...]:
        if not row.measured:
            return (5 if row.applies is False else 4, 0.0, 0.0)
        return (group[row.outcome], *(row.after[metric].value for metric in RANKED_BY))

    return tuple(sorted(rows, key=key))


def best_of(rows: Sequence[FixOutcome]) -> tuple[str | None, str | None]:
    """Ids of the best single fix and of the best of all, of ranked rows; None where none helps."""
    helpful = [row for row in rows if row.outcome == "better"]
    single = next((row.id for row in helpful if not row.together), None)
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


def _statistic(one: Floats, n_one: Floats, two: Floats, n_two: Floats) -> Floats:
    with np.errstate(all="ignore"):
        change: Floats = two / n_two - one / n_one
    return change


def _swaps(prompts: int, seed: int) -> Iterable[Floats]:
    """Rows of 0 and 1: which prompts are exchanged."""
    if prompts <= EXHAUSTIVE:
        return [np.array(list(product((0.0, 1.0), repeat=prompts)))]
    draw = np.random.default_rng(seed)
    return (floats(draw.random((CHUNK, prompts)) < 0.5) for _ in range(SWAPS // CHUNK))
