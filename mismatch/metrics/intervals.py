"""What intervals are made of: sums per prompt. :mod:`mismatch.metrics.estimate` puts it together.

Whole prompts are the unit of chance. A metric's terms are summed once per prompt; resamples and
standard errors work on those sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mismatch.metrics.registry import Combine, columns, floats
from mismatch.types import Estimate, Floats, Ints

PERCENTILE_FROM = 256  # prompts
HEAVY_SHARE = 0.2  # of a metric, carried by one unit
HILL_LEAST = 2.0  # tail index below which the variance is infinite
LEVELS = (0.025, 0.975)
ROUNDING = 1e-9  # of the standard error: a resample with less spread than this has none
STEP = 1e-3  # of a mean's own standard deviation, for numeric gradients
Interval = tuple[float, float]


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
    return hill_of_largest(np.abs(terms), len(terms))


def largest_used(units: int) -> int:
    """How many of the largest terms :func:`hill_index` looks at."""
    return max(10, units // 100)


def hill_of_largest(size: Floats, units: int) -> float:
    """:func:`hill_index` of ``units`` terms from at least their ``largest_used + 1`` largest sizes.

    Fewer sizes mean that all others are 0.
    """
    top = largest_used(units)
    if units < 10 * top or np.count_nonzero(size) <= top:
        return math.inf
    ordered = np.partition(size, len(size) - top - 1)
    threshold, largest = ordered[-top - 1], ordered[len(size) - top :]
    mean_excess = float(np.log(largest / threshold).mean())
    return 1.0 / mean_excess if mean_excess > 0.0 else math.inf


def heavy_tail(terms: Floats) -> bool:
    """Whether few units carry the number: one has over 20 %, or the Hill index is under 2."""
    return any(
        is_heavy(np.abs(column), float(np.abs(column).sum()), len(column))
        for column in columns(terms).T
    )


def is_heavy(size: Floats, total: float, units: int) -> bool:
    """:func:`heavy_tail` of one column from its largest sizes and the sum of all."""
    if total <= 0.0 or not len(size):
        return False
    return carries(size, total) or hill_of_largest(size, units) < HILL_LEAST


def carries(size: Floats, total: float) -> bool:
    """Whether one unit has over 20 % of the total."""
    return bool(size.max() > HEAVY_SHARE * total)


@dataclasses.dataclass(frozen=True)
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
        return dataclasses.replace(made, residual=residual)

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
    """97.5 % point of Student's t: exact at 1 and 2, else its expansion about the normal's."""
    if freedom <= 2:
        return (12.706, 4.303)[freedom - 1]
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def woodruff(values: Floats, cluster: Ints, probability: float) -> Interval | None:
    """Interval of a quantile: that of the distribution function there, inverted.

    The share of values at or under the quantile has a standard error over prompts; the interval
    of that share, taken on the logit scale to stay in (0, 1), is read off the order statistics.
    None where its upper end lies beyond the sample: then the data bound the quantile only below.
    """
    ordered = np.sort(values)
    total = len(ordered)
    if ordered[0] == ordered[-1]:
        return float(ordered[0]), float(ordered[0])
    under = values <= ordered[rank_of(probability, total) - 1]
    counts = np.bincount(cluster, weights=under), np.bincount(cluster)
    ranks = woodruff_ranks(floats(counts[0]), floats(counts[1]), probability)
    if ranks is None:
        return None
    return float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1])


def rank_of(probability: float, total: int) -> int:
    """Rank, from 1, of the smallest value that a share ``probability`` does not exceed."""
    return max(math.ceil(probability * total), 1)


def woodruff_ranks(under: Floats, count: Floats, probability: float) -> tuple[int, int] | None:
    """Ranks, from 1, of the interval's ends; from the values at or under the quantile, [P]."""
    total, prompts = round(float(count.sum())), len(count)
    residual = under - under.sum() / total * count
    error = math.sqrt(prompts / (prompts - 1) * float((residual**2).sum())) / total
    arm = student(prompts - 1) * error / (probability * (1.0 - probability))
    centre = math.log(probability / (1.0 - probability))
    low, high = (1.0 / (1.0 + math.exp(-(centre + side * arm))) for side in (-1, 1))
    if high * total > total - 1:
        return None
    return rank_of(low, total), rank_of(high, total)
