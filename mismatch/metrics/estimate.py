"""Intervals: how far a number would move had other prompts been drawn.

All samples of a prompt and all tokens of a sample are correlated, so whole prompts are the unit of
chance. A metric's terms are summed once per prompt; a resample draws prompts and works on those
sums, never on tokens again.

    means, ratios   >= 256 prompts: percentile bootstrap; fewer: bootstrap-t, whose standard error
                    is the linearised (delta-method) one over prompts
    rare shares     (seen in under 10 prompts) Wilson, on the number of independent units that the
                    standard error over prompts amounts to
    quantiles       Woodruff: the interval of the distribution function at the quantile, inverted
    extremes        none
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np

from mismatch.metrics.registry import Array, Combine, Metric, columns, floats
from mismatch.types import Estimate, Floats, Ints

RESAMPLES = 1000
PERCENTILE_FROM = 256  # prompts
FEW_PROMPTS = 16
RARE_PROMPTS = 10  # with events; below, resamples without any would stretch bootstrap-t to [0, 1]
HEAVY_SHARE = 0.2  # of a metric, carried by one unit
HILL_LEAST = 2.0  # tail index below which the variance is infinite
LEVELS = (0.025, 0.975)
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
    size = np.sort(np.abs(terms))
    top = max(10, len(size) // 100)
    if len(size) < 10 * top or size[-top - 1] == 0.0:
        return math.inf
    mean_excess = float(np.log(size[-top:] / size[-top - 1]).mean())
    return 1.0 / mean_excess if mean_excess > 0.0 else math.inf


def heavy_tail(terms: Floats) -> bool:
    """Whether few units carry the number: one has over 20 %, or the Hill index is under 2."""
    for column in columns(terms).T:
        size = np.abs(column)
        total = size.sum()
        if total > 0.0 and (size.max() > HEAVY_SHARE * total or hill_index(column) < HILL_LEAST):
            return True
    return False


class Estimator:
    """Turns terms into estimates; one per comparison, so that its metrics share the resamples.

    Args:
        sequence: [A] sequence of each action token.
        prompt: [N] prompt of each sequence.
        seed: of the resamples; the same seed gives the same intervals.
    """

    def __init__(
        self, sequence: Ints, prompt: Ints, *, seed: int = 0, resamples: int = RESAMPLES
    ) -> None:
        present = np.unique(sequence)
        prompts, of_sequence = np.unique(prompt[present], return_inverse=True)
        position = np.searchsorted(present, sequence)
        self.clusters: dict[str, Ints] = {
            "token": of_sequence[position],
            "sequence": of_sequence,
        }
        self.n_tokens, self.n_sequences = len(sequence), len(present)
        self.n_prompts = len(prompts)
        self._seed, self._resamples = seed, resamples

    @cached_property
    def weights(self) -> Floats:
        """How often each resample draws each prompt, [resamples, P]."""
        rng = np.random.default_rng(self._seed)
        shape = self._resamples, self.n_prompts
        drawn = (
            rng.integers(0, self.n_prompts, shape) + self.n_prompts * np.arange(shape[0])[:, None]
        )
        return floats(np.bincount(drawn.ravel(), minlength=shape[0] * shape[1]).reshape(shape))

    def all(self, metrics: Iterable[Metric], arrays: Mapping[str, Array]) -> dict[str, Estimate]:
        """Every metric whose arrays are there and whose value is defined, by name."""
        made: dict[str, Estimate] = {}
        for metric in metrics:
            if metric.available(arrays):
                estimate = self.one(metric, arrays)
                if estimate is not None:
                    made[metric.name] = estimate
        return made

    def one(self, metric: Metric, arrays: Mapping[str, Array]) -> Estimate | None:
        """One metric with its interval; None where its value is undefined."""
        with np.errstate(all="ignore"):
            terms = metric.terms(**{name: arrays[name] for name in metric.needs})
        value = metric.value(terms)
        if np.isnan(value):
            return None
        bare = Estimate(value, None, None, self.n_tokens, self.n_sequences, self.n_prompts)
        if metric.kind == "extreme":
            return bare
        if not np.isfinite(value) or not np.isfinite(terms).all():
            return dataclasses.replace(bare, flags=("overflow",))
        if self.n_prompts < 2:
            return dataclasses.replace(bare, flags=("one-prompt",))
        flags = ["few-prompts"] if self.n_prompts < FEW_PROMPTS else []
        cluster = self.clusters[metric.reduction]
        if metric.kind == "quantile":
            interval = woodruff(terms, cluster, metric.probability)
            flags += ["few-tokens"] if interval is None else []
        else:
            interval = self._rare_share(metric, terms, cluster) or self._smooth(
                columns(terms), metric.combine, cluster
            )
            flags += ["heavy-tail"] if heavy_tail(terms) else []
            flags += ["no-events"] if self._unseen(metric, terms, arrays) else []
        if interval is None:
            return dataclasses.replace(bare, flags=tuple(flags))
        low, high = np.clip(interval, *metric.bounds)
        return dataclasses.replace(
            bare, low=min(float(low), value), high=max(float(high), value), flags=tuple(flags)
        )

    @staticmethod
    def _unseen(metric: Metric, terms: Floats, arrays: Mapping[str, Array]) -> bool:
        """A share of 0 although the sides differ: [0, 0] is then no bound on rarer events."""
        share = metric.unit == "share" and "delta" in metric.needs
        return bool(share and not terms.any() and arrays["delta"].any())

    def _rare_share(self, metric: Metric, terms: Floats, cluster: Ints) -> Interval | None:
        """Wilson's interval where a share's rarer outcome is seen in few prompts, but is seen."""
        if metric.unit != "share" or metric.kind != "mean" or terms.ndim != 1:
            return None
        seen = [len(np.unique(cluster[terms != outcome])) for outcome in (0.0, 1.0)]
        if not 0 < min(seen) < RARE_PROMPTS:
            return None
        sums = PromptSums.of(columns(terms), cluster, self.n_prompts, metric.combine)
        return wilson(sums.value, sums.error, student(self.n_prompts - 1))

    def _smooth(self, terms: Floats, combine: Combine, cluster: Ints) -> Interval | None:
        sums = PromptSums.of(terms, cluster, self.n_prompts, combine)
        if not sums.residual.any():  # nothing varies between prompts: identical sides, above all
            return sums.value, sums.value
        values, errors = sums.resampled(self.weights)
        percentile = _quantiles(values)
        if self.n_prompts >= PERCENTILE_FROM:
            return percentile
        error = sums.error
        with np.errstate(all="ignore"):
            pivot = np.where(values == sums.value, 0.0, (values - sums.value) / errors)
        pivots = _quantiles(pivot)
        if pivots is None or not np.isfinite(pivots).all():
            # Resamples without spread: few prompts, or one that carries everything.
            arm = student(self.n_prompts - 1) * error
            wide = percentile or (sums.value, sums.value)
            return min(sums.value - arm, wide[0]), max(sums.value + arm, wide[1])
        return sums.value - pivots[1] * error, sums.value - pivots[0] * error


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
        centre = terms.mean(axis=0)
        count = floats(np.bincount(cluster, minlength=prompts))
        constant = (terms == terms[0]).all(axis=0)  # rounding of the mean is no variation
        centre = np.where(constant, terms[0], centre)
        away = (terms - centre).T
        per_prompt = [np.bincount(cluster, column, minlength=prompts) for column in away]
        sums = floats(np.stack(per_prompt, axis=1))
        step = STEP * np.sqrt((sums**2).sum(axis=0)) / count.sum()
        made = cls(centre, sums, count, combine, floats(step), floats(np.zeros(prompts)))
        residual = sums @ made.gradient(np.zeros((1, len(centre))))[0]
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

    def resampled(self, weights: Floats) -> tuple[Floats, Floats]:
        """Value and linearised standard error of every resample, [R] and [R]."""
        prompts = len(self.count)
        units = weights @ self.count
        shift = weights @ self.sums / units[:, None]
        with np.errstate(all="ignore"):
            values = self.combine(self.centre + shift)
        if prompts >= PERCENTILE_FROM:
            return values, np.zeros_like(values)
        slope = self.gradient(shift)
        residual = slope @ self.sums.T - (slope * shift).sum(axis=1)[:, None] * self.count
        spread = prompts / (prompts - 1) * (weights * residual**2).sum(axis=1)
        return values, np.sqrt(spread) / units


def _quantiles(values: Floats) -> Interval | None:
    """The central 95 % of the values; None if too many are undefined to say."""
    defined = values[~np.isnan(values)]
    if len(defined) < 0.95 * len(values):
        return None
    low, high = np.quantile(defined, LEVELS, method="inverted_cdf")
    return float(low), float(high)


def wilson(share: float, error: float, z: float) -> Interval:
    """Wilson's score interval of a share whose standard error is known.

    The error stands for the number of independent units, share (1 - share) / error².
    """
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
    quantile = ordered[math.ceil(probability * total) - 1]
    under = values <= quantile
    residual = np.bincount(cluster, weights=under - under.mean())
    prompts = len(residual)
    error = math.sqrt(prompts / (prompts - 1) * float((residual**2).sum())) / total
    arm = student(prompts - 1) * error / (probability * (1.0 - probability))
    centre = math.log(probability / (1.0 - probability))
    low, high = (1.0 / (1.0 + math.exp(-(centre + side * arm))) for side in (-1, 1))
    if high * total > total - 1:
        return None
    ranks = max(math.ceil(low * total), 1), math.ceil(high * total)
    return float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1])
