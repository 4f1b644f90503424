"""Intervals and tests: how far a number would move had other prompts been drawn.

All samples of a prompt and all tokens of a sample are correlated, so whole prompts are the unit of
chance. A metric's terms are summed once per prompt; resamples and standard errors work on those
sums, never on tokens again.

    means, ratios   >= 256 prompts: percentile bootstrap; fewer: bootstrap-t, whose standard error
                    is the linearised (delta-method) one over prompts
                    a size from fewer than 48 prompts reaches to where a kind of prompts that was
                    not drawn would put it (:func:`with_unseen`)
    rare shares     (seen in under 10 prompts) Wilson, on the number of independent units that the
                    standard error over prompts amounts to
    quantiles       Woodruff: the interval of the distribution function at the quantile, inverted
                    (:func:`woodruff_ends`)
    many groups     the linearised standard error over prompts times Student's t
    differences     MOVER, from the intervals of two independent numbers
    what is gone    with a cause: delete-one jackknife over prompts
    fixes           exchange of two sides within prompts (permutation test), Holm's adjustment
                    (:mod:`mismatch.metrics.permutation`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch.metrics.registry import Array, Combine, Metric, floats
from mismatch.types import Estimate, Floats, Ints

PERCENTILE_FROM = 256  # prompts
LEVELS = (0.025, 0.975)
RARE_PROMPTS = 10  # with events; below, resamples without any would stretch bootstrap-t to [0, 1]
FEW_PROMPTS = 16
FARTHEST = 3.0  # arms of Student's t that an end of bootstrap-t may lie away
HEAVY_FROM = 12  # prompts; of fewer, chance alone makes some that carry most
DRAWN = 1 << 17  # prompts drawn at a time: what they are counted in stays in the cache
ROUNDING = 1e-9  # of the standard error: a resample with less spread than this has none
OTHER_KIND = 8.0  # times as far off, that a kind of prompts may be: of benchmarks/coverage.py
KINDS_SEEN = 48  # prompts, of which a kind of 1 in 12 is missed in 2 % of runs
POWERS = {"nats": 1, "ratio": 1, "probability": 1}  # of delta, in the terms of a unit
SQUARES = ("k2_kl", "k3_kl", "exact_kl", "exact_reverse_kl")
STEP = 1e-3  # of a mean's own standard deviation, for numeric gradients
Interval = tuple[float, float]


def prompts_needed(estimate: Estimate, bound: float) -> int | None:
    """Return how many prompts would shrink the interval so that ``bound`` lies outside.

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
    def of(
        cls, sums: Floats, count: Floats, constant: Sequence[float | None], combine: Combine
    ) -> PromptSums:
        """Build from sums of the terms per prompt, [P, M], and units per prompt, [P].

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
        prompt_sums = cls(centre, away, count, combine, floats(step), floats(np.zeros(len(count))))
        residual = away @ prompt_sums.gradient(np.zeros((1, len(centre))))[0]
        return replace(prompt_sums, residual=residual)

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
        """Return the central differences of ``combine`` at centre + shift, [..., M]."""
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
        """Return the value at means that lie ``shift`` [R, M] away from the centre, [R]."""
        with np.errstate(all="ignore"):
            return floats(self.combine(self.centre + shift))

    def resampled(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return the value and linearised standard error of every resample, [R] and [R]."""
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
    """Yield how often each resample draws each prompt, [r, P]: a few resamples at a time."""
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
    """Each resample's distance from the value in the resample's standard error, scaled back.

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
    """Return the central 95 % of the values; None if too many are undefined to say."""
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


def with_unseen(metric: Metric, value: float, interval: Interval, prompts: int) -> Interval:
    """Let the interval of a size reach to where prompts of a kind that was not drawn would put it.

    No resample knows of a kind of :func:`missed_share`. It is taken to be ``OTHER_KIND`` times as
    far off, and that squared where terms are squares of delta, as the variance of weights is.
    """
    if metric.name == "ess_token" and prompts < KINDS_SEEN and 0 < value < 1:
        variance = (1.0 / value - 1.0) * (1.0 + (OTHER_KIND**2 - 1.0) * missed_share(prompts))
        return min(interval[0], 1.0 / (1.0 + variance)), interval[1]
    power = 2 if metric.name.startswith(SQUARES) else POWERS.get(metric.unit, 0)
    size = metric.kind == "mean" and metric.good == "low" and np.isfinite(metric.bounds[0])
    if not size or not power or prompts >= KINDS_SEEN or interval[0] == interval[1]:
        return interval
    least = metric.bounds[0]
    reach = 1.0 + (OTHER_KIND**power - 1.0) * missed_share(prompts)
    return interval[0], max(interval[1], least + (value - least) * reach)


def missed_share(prompts: int) -> float:
    """Return the share of all prompts that a kind may have which P prompts miss 1 time in 20.

    >>> [round(1 / missed_share(prompts)) for prompts in (16, 64, 256)]
    [6, 22, 86]
    """
    return float(1.0 - 0.05 ** (1.0 / prompts))


def student(freedom: int) -> float:
    """97.5 % point of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, LEVELS[1]))


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
    """Return sums of ``values`` [R] per prompt and group, [P, G]; ``prompt``, ``group``: [R]."""
    code = prompt * groups + group
    summed = np.bincount(code, weights=values, minlength=prompts * groups)
    return floats(summed.reshape(prompts, groups))


def group_means(sums: Floats, counts: Floats, bounds: tuple[float, float]) -> Groups:
    """Return mean and 95 % interval of every group from sums and counts per prompt, both [P, G].

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
            # The rarer outcome of a share is seen, but in few prompts.
            seen = (sums[:, g] > 0.0).sum(), (sums[:, g] < counts[:, g]).sum()
            if bounds == (0.0, 1.0) and 0 < min(seen) < RARE_PROMPTS:
                ends = wilson(float(mean[g]), float(error[g]), z)
            cut = np.clip(ends, *bounds)
            low[g], high[g] = float(min(cut[0], mean[g])), float(max(cut[1], mean[g]))
    return Groups(mean, low, high, np.rint(total).astype(np.int64))


# ---------------------------------------------------------------- differences


def mover(old: Estimate, new: Estimate) -> tuple[float, float] | None:
    """Return interval of new - old from the intervals of two independent numbers; None without."""
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return None
    value = new.value - old.value
    down = math.hypot(new.value - new.low, old.high - old.value)
    up = math.hypot(new.high - new.value, old.value - old.low)
    return value - down, value + up


# ---------------------------------------------------------------- jackknife


def jackknife_error(without: Floats) -> float:
    """Return the standard error from the values without one prompt each, [P]."""
    prompts = len(without)
    return math.sqrt((prompts - 1) / prompts * float(((without - without.mean()) ** 2).sum()))


# ---------------------------------------------------------------- quantiles

WIDER = 5.0  # times the share beyond a quantile
QUANTILE_PROMPTS = 14.0  # effective number, of those that hold the values in that wider tail
QUANTILE_FREEDOM = 2.5  # prompts of the rarer side for each degree of freedom


def quantile_cuts(ordered: Floats, probability: float) -> tuple[float, float]:
    """Return the quantile of sorted values, and that of a tail ``WIDER`` times as large.

    The wider one shows whether prompts share the tail evenly. To read it off the values
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
    """Return the interval of a quantile: that of the distribution function there, inverted.

    The share of values at or under the quantile has a standard error over prompts; the interval
    of that share, taken on the logit scale to stay in (0, 1), is read off the order statistics.
    None where its upper end lies beyond the sample: then the data bound the quantile only below;
    and where too few prompts hold the values of the tail to say how these vary.

    Args:
        ordered: all values, ascending.
        under, tail: how many of a prompt's values lie at or below the :func:`quantile_cuts`, [P].
        count: of all its values, [P].
    """
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
    """Return how many equal prompts would share so many values as unevenly as these [P]."""
    return float(held.sum() ** 2 / max((held**2).sum(), 1e-300))


def rank_of(probability: float, total: int) -> int:
    """Rank, from 1, of the smallest value that a share ``probability`` does not exceed."""
    return max(math.ceil(probability * total), 1)
