"""Estimates the plain way: all terms of a metric at once. What the estimator is checked against."""

from __future__ import annotations

import numpy as np

from mismatch.metrics.inference import (
    PERCENTILE_FROM,
    PromptSums,
    central,
    quantile_cuts,
    student,
    wilson,
    with_unseen,
    woodruff_ends,
)
from mismatch.metrics.registry import Metric, columns, floats
from mismatch.metrics.tails import heavy_tail
from mismatch.types import Estimate

RARE_PROMPTS, FEW_PROMPTS, RESAMPLES = 10, 16, 1000


def plain(
    metric: Metric, arrays: dict, sequence: np.ndarray, prompt: np.ndarray
) -> Estimate | None:
    """One estimate; seed 0."""
    present, code = np.unique(sequence, return_inverse=True)
    prompts, of_sequence = np.unique(prompt[present], return_inverse=True)
    cluster = of_sequence[code] if metric.reduction == "token" else of_sequence
    with np.errstate(all="ignore"):
        terms = metric.terms(**{name: arrays[name] for name in metric.needs})
    if isinstance(terms, tuple):
        terms = columns(terms)
    value = metric.value(terms)
    if np.isnan(value):
        return None
    low, high, flags = _interval(metric, terms, cluster, len(prompts), arrays, value)
    counts = len(sequence), len(present), len(prompts)
    return Estimate(value, low, high, *counts, flags=tuple(flags))


def woodruff(values, cluster, probability):
    """Interval of a quantile, from all values [U] and the prompt of each, numbered from 0."""
    ordered, count = np.sort(values), floats(np.bincount(cluster))
    under, tail = (
        floats(np.bincount(cluster, weights=values <= cut))
        for cut in quantile_cuts(ordered, probability)
    )
    return woodruff_ends(ordered, under, tail, count, probability)


def _interval(metric, terms, cluster, prompts, arrays, value):
    if metric.kind == "extreme":
        return None, None, []
    if not np.isfinite(value) or not np.isfinite(terms).all():
        return None, None, ["overflow"]
    if prompts < 2:
        return None, None, ["one-prompt"]
    flags = ["few-prompts"] if prompts < FEW_PROMPTS else []
    if metric.kind == "quantile":
        interval = woodruff(terms, cluster, metric.probability)
        flags += ["few-tokens"] if interval is None else []
    else:
        interval = _means(metric, terms, cluster, prompts)
        flags += ["heavy-tail"] if heavy_tail(terms) else []
        flags += ["heavy-prompts"] if _heavy_prompts(metric, terms, cluster, prompts) else []
        unseen = metric.unit == "share" and "delta" in metric.needs and not terms.any()
        if unseen and arrays["delta"].any():
            bound = rule_of_three(metric, arrays["delta"], cluster, prompts)
            return 0.0, bound / tenfold(metric, arrays), [
                *(flag for flag in flags if flag == "few-prompts"), "no-events"]  # fmt: skip
    if interval is None:
        return None, None, flags
    if metric.kind != "quantile":
        interval = with_unseen(metric, value, interval, prompts)
    low, high = np.clip(interval, *metric.bounds)
    return min(float(low), value), max(float(high), value), flags


def summed(terms, cluster, prompts, combine):
    """Sums per prompt, from terms [U, M] and the prompt of each unit."""
    count = floats(np.bincount(cluster, minlength=prompts))
    sums = np.stack([np.bincount(cluster, each, minlength=prompts) for each in terms.T], axis=1)
    constant = [float(each[0]) if (each == each[0]).all() else None for each in terms.T]
    return PromptSums.of(floats(sums), count, constant, combine)


def rule_of_three(metric, delta, cluster, prompts):
    """Bound on a share of which no event was seen: 3 / n, n of independent tokens."""
    if metric.reduction == "sequence":
        return 1.0 - 0.05 ** (1.0 / prompts)
    top = np.abs(delta) >= np.quantile(np.abs(delta), 0.99)
    sums = summed(columns(floats(top)), cluster, prompts, lambda means: means[..., 0])
    n = sums.value * (1 - sums.value) / sums.error**2 if sums.error else np.inf
    return 1.0 - 0.05 ** (1.0 / max(min(n, len(delta)), prompts))


def tenfold(metric, arrays):
    """The largest power of ten, up to a million, by which delta can grow without an event."""
    powers = [10.0**power for power in range(7)]
    seen = [
        np.any(metric.terms(**{n: arrays[n] * (p if n == "delta" else 1) for n in metric.needs}))
        for p in powers
    ]
    power = powers[seen.index(True) - 1 if True in seen else -1]
    return power if power >= 1000 else 1


def _means(metric, terms, cluster, prompts):
    sums = summed(columns(terms), cluster, prompts, metric.combine)
    if metric.unit == "share" and metric.kind == "mean" and terms.ndim == 1:
        seen = [len(np.unique(cluster[terms != outcome])) for outcome in (0.0, 1.0)]
        if 0 < min(seen) < RARE_PROMPTS:
            return wilson(sums.value, sums.error, student(prompts - 1))
    if not sums.residual.any():
        return sums.value, sums.value
    drawn = np.random.default_rng(0).integers(0, prompts, (RESAMPLES, prompts))
    weights = floats([np.bincount(row, minlength=prompts) for row in drawn])
    values, errors = sums.resampled(weights)
    if prompts >= PERCENTILE_FROM:
        return central(values)
    with np.errstate(all="ignore"):
        pivots = central(np.where(values == sums.value, 0.0, (values - sums.value) / errors))
    if pivots is None or not np.isfinite(pivots).all():
        wide, arm = central(values) or (sums.value, sums.value), student(prompts - 1) * sums.error
        return min(sums.value - arm, wide[0]), max(sums.value + arm, wide[1])
    most = 3.0 * student(prompts - 1)
    low, high = min(pivots[1], most), max(pivots[0], -most)
    return sums.value - low * sums.error, sums.value - high * sums.error


def _heavy_prompts(metric, terms, cluster, prompts):
    square = summed(columns(terms), cluster, prompts, metric.combine).residual ** 2
    if prompts < 12 or not square.any():
        return False
    return square.sum() ** 2 / (square**2).sum() < 3 + prompts / 24
