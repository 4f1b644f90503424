"""Intervals and tests: how far a number would move had other prompts been drawn.

All samples of a prompt and all tokens of a sample are correlated, so whole prompts are the unit of
chance. A metric's terms are summed once per prompt; resamples and standard errors work on those
sums, never on tokens again.

    means, ratios   >= 256 prompts: percentile bootstrap; fewer: bootstrap-t, whose standard error
                    is the linearised (delta-method) one over prompts
    rare shares     (seen in under 10 prompts) Wilson, on the number of independent units that the
                    standard error over prompts amounts to
    quantiles       Woodruff: the interval of the distribution function at the quantile, inverted
    many groups     the linearised standard error over prompts times Student's t
    differences     MOVER, from the intervals of two independent numbers
    gradients       delete-one jackknife over prompts
    fixes           exchange of two sides within prompts (permutation test), Holm's adjustment
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from mismatch.errors import MismatchError
from mismatch.metrics.registry import Array, Combine, columns, floats
from mismatch.types import Estimate, Floats, Ints

PERCENTILE_FROM = 256  # prompts
HEAVY_SHARE = 0.2  # of a metric, carried by one unit
KEPT_SHARE = 0.02  # of the terms, by a floor from a sample; the Hill index needs 0.01
SAMPLED = 1 << 16
HILL_LEAST = 2.0  # tail index below which the variance is infinite
LEVELS = (0.025, 0.975)
LEVEL = 0.05  # of a family of tests
EXHAUSTIVE = 12  # prompts up to which all swaps are tried
SWAPS, CHUNK = 20_000, 2_000  # random swaps; worked on at once
RARE_PROMPTS = 10  # with events; below, resamples without any would stretch bootstrap-t to [0, 1]
FEW_PROMPTS = 16
FARTHEST = 3.0  # arms of Student's t that an end of bootstrap-t may lie away
HEAVY_FROM = 12  # prompts; of fewer, chance alone makes some that carry most
WIDER = 5.0  # times the share beyond a quantile
QUANTILE_PROMPTS = 14.0  # effective number, of those that hold the values in that wider tail
QUANTILE_FREEDOM = 2.5  # prompts of the rarer side for each degree of freedom
DRAWN = 1 << 17  # prompts drawn at a time: what they are counted in stays in the cache
ROUNDING = 1e-9  # of the standard error: a resample with less spread than this has none
STEP = 1e-3  # of a mean's own standard deviation, for numeric gradients
Interval = tuple[float, float]
PerPrompt = Mapping[int, tuple[float, float]]  # (sum of terms, number of tokens)


def prompts_needed(estimate: Estimate, bound: float) -> int | None:
    """How many prompts would shrink the interval so that ``bound`` lies outside.

    The distance from value to bound is fixed and the interval's arm on that side shrinks with
    1/sqrt(prompts). None: no interval, or the value is the bound itself. An estimate that is
    decided already needs what it has.
    """
    if estimate.low is None or estimate.high is None or estimate.value == bound:
        return None
    if not estimate.low <= bound <= estimate.high:
        return estimate.n_prompts
    end = estimate.low if bound < estimate.value else estimate.high
    factor = ((end - estimate.value) / (bound - estimate.value)) ** 2
    return math.floor(estimate.n_prompts * factor) + 1


def hill_index(terms: Floats) -> float:
    """Tail index of the largest 1 % (at least 10) of |terms|; infinite where there is no tail.

    Under 2 the variance is infinite and no interval from this sample can be trusted.
    """
    return _hill(np.abs(terms), len(terms))


def _hill(size: Floats, units: int) -> float:
    """:func:`hill_index` of ``units`` terms, from those sizes that are not too small to count."""
    top = max(10, units // 100)
    if units < 10 * top or np.count_nonzero(size) <= top:
        return math.inf
    ordered = np.partition(size, len(size) - top - 1)
    threshold, largest = ordered[-top - 1], ordered[len(size) - top :]
    mean_excess = float(np.log(largest / threshold).mean())
    return 1.0 / mean_excess if mean_excess > 0.0 else math.inf


def heavy_tail(terms: Floats) -> bool:
    """Whether few units carry the number: one has over 20 %, or the Hill index is under 2."""
    return any(_heavy(column) for column in columns(terms).T)


def _heavy(terms: Floats) -> bool:
    stride = len(terms) // SAMPLED
    for sample in (terms[::stride], None) if stride > 3 else (None,):
        tail = Tail(sample)
        tail.add(terms)
        found = tail.heavy(len(terms))
        if found is not None:
            break
    return bool(found)


class Tail:
    """The large ones of many terms that come in parts, and the sum of all sizes.

    Args:
        sample: some of the terms: the floor under which sizes are not kept comes from them.
    """

    def __init__(self, sample: Floats | None = None) -> None:
        self.floor = 0.0
        if sample is not None:
            self.floor = float(np.quantile(np.abs(sample), 1.0 - KEPT_SHARE))
        self.total, self._kept = 0.0, list[Floats]()

    def add(self, terms: Floats) -> None:
        size = np.abs(terms)
        self.total += float(size.sum())
        self._kept.append(size.compress(size >= self.floor if self.floor > 0.0 else size > 0.0))

    def heavy(self, units: int) -> bool | None:
        """:func:`heavy_tail` of ``units`` terms; None where the floor was too high to tell."""
        if self.total <= 0.0:
            return False
        size = np.concatenate(self._kept)
        if self.floor > 0.0 and len(size) <= max(10, units // 100):
            return None
        return bool(size.max() > HEAVY_SHARE * self.total) or _hill(size, units) < HILL_LEAST


@dataclass(frozen=True)
class PromptSums:
    """A metric's terms, summed per prompt after centring.

    Attributes:
        centre: [M] overall means of the terms.
        sums: [P, M] per-prompt sums of (terms - centre).
        count: [P] units per prompt.
        residual: [P] linearised influence of each prompt on the value, times the number of units.
    """

    centre: Floats
    sums: Floats
    count: Floats
    combine: Combine
    step: Floats
    residual: Floats

    @classmethod
    def of(cls, terms: Floats, cluster: Ints, prompts: int, combine: Combine) -> PromptSums:
        """From terms [U, M] and the prompt of each unit."""
        count = np.bincount(cluster, minlength=prompts)
        sums = [np.bincount(cluster, column, minlength=prompts) for column in terms.T]
        constant = (terms == terms[0]).all(axis=0)
        known = [float(t) if same else None for t, same in zip(terms[0], constant, strict=True)]
        return cls.of_sums(floats(np.stack(sums, axis=1)), floats(count), known, combine)

    @classmethod
    def of_sums(
        cls, sums: Floats, count: Floats, constant: Sequence[float | None], combine: Combine
    ) -> PromptSums:
        """From sums of the terms per prompt, [P, M], and units per prompt, [P].

        Args:
            constant: the one value of all terms of a column, where there is but one: rounding of
                a mean is no variation.
        """
        centre = sums.sum(axis=0) / count.sum()
        away = sums - centre * count[:, None]
        for j, value in enumerate(constant):
            if value is not None:
                centre[j], away[:, j] = value, 0.0
        step = STEP * np.sqrt((away**2).sum(axis=0)) / count.sum()
        made = cls(centre, away, count, combine, floats(step), floats(np.zeros(len(count))))
        residual = away @ made.gradient(np.zeros((1, len(centre))))[0]
        return replace(made, residual=residual)

    @property
    def heavy(self) -> bool:
        """Whether few prompts carry the variation: then others would have given another number.

        The effective number of prompts, (sum r²)² / sum r⁴ of their residuals r, is a third of all
        of them where they are alike.
        """
        square = self.residual**2
        if len(square) < HEAVY_FROM or not square.any():
            return False
        return bool(square.sum() ** 2 / (square**2).sum() < 3.0 + len(square) / 24.0)

    @property
    def value(self) -> float:
        with np.errstate(all="ignore"):
            return float(self.combine(self.centre))

    @property
    def error(self) -> float:
        """Linearised standard error of the value over prompts."""
        prompts = len(self.count)
        spread = prompts / (prompts - 1) * (self.residual**2).sum()
        return float(math.sqrt(spread) / self.count.sum())

    def gradient(self, shift: Floats) -> Floats:
        """Central differences of ``combine`` at centre + shift, [..., M]."""
        slopes = np.zeros_like(shift)
        with np.errstate(all="ignore"):
            for j in np.flatnonzero(self.step):
                move = np.zeros(len(self.step))
                move[j] = self.step[j]
                above = self.combine(self.centre + (shift + move))
                below = self.combine(self.centre + (shift - move))
                slopes[..., j] = (above - below) / (2.0 * self.step[j])
        return slopes

    def shifted(self, shift: Floats) -> Floats:
        """The value at means that lie ``shift`` [R, M] beside the centre, [R]."""
        with np.errstate(all="ignore"):
            return floats(self.combine(self.centre + shift))

    def resampled(self, weights: Floats) -> tuple[Floats, Floats]:
        """Value and linearised standard error of every resample, [R] and [R]."""
        prompts = len(self.count)
        units = weights @ self.count
        shift = weights @ self.sums / units[:, None]
        values = self.shifted(shift)
        slope = self.gradient(shift)
        with np.errstate(all="ignore"):  # an undefined resample is NaN, which `central` leaves out
            residual = slope @ self.sums.T - (slope * shift).sum(axis=1)[:, None] * self.count
            spread = prompts / (prompts - 1) * (weights * residual**2).sum(axis=1)
            errors = np.sqrt(spread) / units
        return values, np.where(errors < ROUNDING * self.error, 0.0, errors)


def draws(prompts: int, resamples: int, seed: int) -> Iterator[Floats]:
    """How often each resample draws each prompt, [r, P]: a few resamples at a time, for memory."""
    rng = np.random.default_rng(seed)
    left = resamples
    while left:
        rows = min(left, max(1, DRAWN // prompts))
        drawn = rng.integers(0, prompts, (rows, prompts))
        drawn += prompts * np.arange(rows)[:, None]  # one count for all rows
        counts = np.bincount(drawn.ravel(), minlength=rows * prompts)
        yield floats(counts.reshape(rows, prompts))
        left -= rows


def bootstrap_t(sums: PromptSums, weights: Floats) -> Interval | None:
    """Each resample's distance from the value in its own standard error, scaled back.

    Args:
        weights: [R, P] of :func:`draws`.
    """
    values, errors = sums.resampled(weights)
    percentile, error = central(values), sums.error
    with np.errstate(all="ignore"):
        pivot = np.where(values == sums.value, 0.0, (values - sums.value) / errors)
    pivots = central(pivot)
    arm = student(len(sums.count) - 1) * error
    if pivots is None or not np.isfinite(pivots).all():
        # Resamples without spread: few prompts, or one that carries everything.
        wide = percentile or (sums.value, sums.value)
        return min(sums.value - arm, wide[0]), max(sums.value + arm, wide[1])
    # One prompt that carries most of the number makes pivots of any size: of resamples without it.
    down, up = min(pivots[1] * error, FARTHEST * arm), min(-pivots[0] * error, FARTHEST * arm)
    return sums.value - down, sums.value + up


def central(values: Floats) -> Interval | None:
    """The central 95 % of the values; None if too many are undefined to say."""
    defined = values[~np.isnan(values)]
    if len(defined) < 0.95 * len(values):
        return None
    low, high = np.quantile(defined, LEVELS, method="inverted_cdf")
    return float(low), float(high)


def wilson(share: float, error: float, z: float) -> Interval:
    """Wilson's score interval of a share whose standard error is known.

    The error stands for the number of independent units, share (1 - share) / error². An error of 0,
    every prompt has the same share, gives the share itself, as for every other metric.
    """
    if error == 0.0:
        return share, share
    units = share * (1.0 - share) / error**2
    centre = (share + z**2 / (2.0 * units)) / (1.0 + z**2 / units)
    arm = z / (1.0 + z**2 / units) * math.sqrt(error**2 + z**2 / (4.0 * units**2))
    return centre - arm, centre + arm


def student(freedom: int) -> float:
    """97.5 % point of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, LEVELS[1]))


def woodruff(values: Floats, cluster: Ints, probability: float) -> Interval | None:
    """Interval of a quantile: that of the distribution function there, inverted.

    The share of values at or under the quantile has a standard error over prompts; the interval
    of that share, taken on the logit scale to stay in (0, 1), is read off the order statistics.
    None where its upper end lies beyond the sample: then the data bound the quantile only below;
    and where too few prompts hold the values of the tail to say how these vary.

    Args:
        values: [U].
        cluster: [U] prompt of each, numbered from 0.
    """
    ordered, count = np.sort(values), floats(np.bincount(cluster))
    under, tail = (
        floats(np.bincount(cluster, weights=values <= cut))
        for cut in quantile_cuts(ordered, probability)
    )
    return woodruff_ends(ordered, under, tail, count, probability)


def quantile_cuts(ordered: Floats, probability: float) -> tuple[float, float]:
    """The quantile of sorted values, and the one that cuts off a tail ``WIDER`` times as large.

    Whether prompts share the tail evenly is told from the wider one. To tell it from the values
    beyond the quantile itself would choose the runs in which these happen to be spread evenly,
    and in those the quantile is too small: benchmarks/coverage.py.
    """
    rare = min(WIDER * min(probability, 1.0 - probability), 0.5)
    wider = rare if probability < 0.5 else 1.0 - rare
    first, second = (
        float(ordered[rank_of(share, len(ordered)) - 1]) for share in (probability, wider)
    )
    return first, second


def woodruff_ends(
    ordered: Floats, under: Floats, tail: Floats, count: Floats, probability: float
) -> Interval | None:
    """:func:`woodruff` from sorted values and how many of ``count`` [P] lie at or below the two
    :func:`quantile_cuts`, ``under`` and ``tail`` [P]."""
    if ordered[0] == ordered[-1]:
        return float(ordered[0]), float(ordered[0])
    total, prompts = len(ordered), len(count)
    residual = under - under.sum() / total * count
    rare, wide = (side if probability < 0.5 else count - side for side in (under, tail))
    if _effective(wide) < QUANTILE_PROMPTS:
        return None
    # The standard error rests on the prompts of the rarer side, and is the less sure the fewer
    # they are: degrees of freedom that cover what is simulated in benchmarks.
    freedom = max(math.floor((min(_effective(rare), prompts) - 1.0) / QUANTILE_FREEDOM), 1)
    error = math.sqrt(prompts / (prompts - 1) * float((residual**2).sum())) / total
    arm = student(freedom) * error / (probability * (1.0 - probability))
    centre = math.log(probability / (1.0 - probability))
    low, high = (1.0 / (1.0 + math.exp(-(centre + side * arm))) for side in (-1, 1))
    if high * total > total - 1:
        return None
    first, last = rank_of(low, total), rank_of(high, total)
    return float(ordered[first - 1]), float(ordered[last - 1])


def _effective(held: Floats) -> float:
    """Number of equal prompts that would share so many values as unevenly as these [P]."""
    return float(held.sum() ** 2 / max((held**2).sum(), 1e-300))


def rank_of(probability: float, total: int) -> int:
    """Rank, from 1, of the smallest value that a share ``probability`` does not exceed."""
    return max(math.ceil(probability * total), 1)


# ---------------------------------------------------------------- many groups


@dataclass(frozen=True, slots=True)
class Groups:
    """G groups. ``low`` and ``high`` are None where there is no interval: one prompt, no unit.

    Attributes:
        mean: [G], NaN in a group without units.
        count: [G] units.
    """

    mean: Floats
    low: list[float | None]
    high: list[float | None]
    count: Ints


def prompt_sums(prompt: Ints, prompts: int, group: Ints, groups: int, values: Array) -> Floats:
    """Sums of ``values`` [R] per prompt and group, [P, G]; ``prompt`` and ``group`` are [R]."""
    code = prompt * groups + group
    summed = np.bincount(code, weights=values, minlength=prompts * groups)
    return floats(summed.reshape(prompts, groups))


def group_means(sums: Floats, counts: Floats, bounds: tuple[float, float]) -> Groups:
    """Mean and 95 % interval of every group from sums and counts per prompt, both [P, G].

    The standard error is that of the ratio Σ sums / Σ counts, linearised over prompts.

    Args:
        bounds: values that the mean can take; (0, 1) makes it a share.
    """
    prompts = len(sums)
    total = counts.sum(axis=0)
    with np.errstate(all="ignore"):
        mean = sums.sum(axis=0) / total
        residual = sums - mean * counts
        error = np.sqrt(prompts / max(prompts - 1, 1) * (residual**2).sum(axis=0)) / total
    low: list[float | None] = [None] * len(total)
    high: list[float | None] = [None] * len(total)
    if prompts > 1:
        z = student(prompts - 1)
        for g in np.flatnonzero(total > 0):
            ends = mean[g] - z * error[g], mean[g] + z * error[g]
            if bounds == (0.0, 1.0) and _rare(sums[:, g], counts[:, g]):
                ends = wilson(float(mean[g]), float(error[g]), z)
            cut = np.clip(ends, *bounds)
            low[g], high[g] = float(min(cut[0], mean[g])), float(max(cut[1], mean[g]))
    return Groups(mean, low, high, np.rint(total).astype(np.int64))


def _rare(sums: Floats, counts: Floats) -> bool:
    """Whether the rarer outcome of a share is seen, but in few prompts."""
    seen = int((sums > 0.0).sum()), int((sums < counts).sum())
    return 0 < min(seen) < RARE_PROMPTS


# ---------------------------------------------------------------- differences


def mover(one: Estimate, other: Estimate) -> tuple[float, float] | None:
    """Interval of other - one from the intervals of two independent numbers; None without."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return None
    value = other.value - one.value
    down = math.hypot(other.value - other.low, one.high - one.value)
    up = math.hypot(other.high - other.value, one.value - one.low)
    return value - down, value + up


# ---------------------------------------------------------------- jackknife


def jackknife(values: Floats, centre: float, back: Callable[[float], float]) -> Interval | None:
    """95 % interval of a number from its jackknife.

    Args:
        values: [1 + P] on a scale without bounds: with all prompts, then without each.
        centre: the number on that scale, where it is known better than ``values[0]``.
        back: from that scale to the number's own.

    Returns:
        None: fewer than two prompts, or a number that some batches do not have. Where all batches
        have the same one, that.
    """
    without = values[1:]
    if len(without) < 2 or np.isnan(values).any():
        return None
    if (values == values[0]).all():
        return back(centre), back(centre)
    if not np.isfinite(values).all():
        return None
    arm = student(len(without) - 1) * jackknife_error(without)
    return back(centre - arm), back(centre + arm)


def jackknife_of_root(squared: Floats) -> Interval | None:
    """95 % interval of the root of a square that is estimated without bias, and so may be negative.

    Laid out on the square where it reaches 0 there, else on the root, which is less skewed.

    Args:
        squared: [1 + P] with all prompts, then without each.

    Returns:
        None: fewer than three prompts, for without one there must be two to tell noise by.
    """
    if len(squared) < 4:
        return None
    arm = student(len(squared) - 2) * jackknife_error(squared[1:])
    low, high = float(squared[0]) - arm, float(squared[0]) + arm
    if low <= 0.0:
        return 0.0, math.sqrt(max(0.0, high))
    centre = math.sqrt(float(squared[0]))
    roots = np.sign(squared[1:]) * np.sqrt(np.abs(squared[1:]))
    arm = student(len(squared) - 2) * jackknife_error(roots)
    return max(0.0, centre - arm), centre + arm


def jackknife_error(without: Floats) -> float:
    """Standard error from the values without one prompt each, [P]."""
    prompts = len(without)
    return math.sqrt((prompts - 1) / prompts * float(((without - without.mean()) ** 2).sum()))


# ---------------------------------------------------------------- tests


def exchange(before: PerPrompt, after: PerPrompt, *, seed: int = 0) -> float:
    """Permutation test of two sides, on (sum of terms, number of tokens) of every prompt.

    Where a change does nothing, a prompt's numbers with it and without it could as well be swapped;
    the statistic is the difference of the two means over tokens. That holds for few prompts and for
    heavy tails, and for tokens that were sampled anew as well as for the same ones.

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


def holm(values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given.

    Holm 1979, "A simple sequentially rejective multiple test procedure".

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
