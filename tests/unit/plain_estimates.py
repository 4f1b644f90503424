"""Estimates the plain way: all terms of a metric at once. What the estimator is checked against."""

from __future__ import annotations

import numpy as np

from mismatch.metrics.inference import (
    PERCENTILE_FROM,
    PromptSums,
    central,
    heavy_tail,
    student,
    wilson,
    woodruff,
)
from mismatch.metrics.registry import Metric, columns, floats
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
        unseen = metric.unit == "share" and "delta" in metric.needs and not terms.any()
        flags += ["no-events"] if unseen and arrays["delta"].any() else []
    if interval is None:
        return None, None, flags
    low, high = np.clip(interval, *metric.bounds)
    return min(float(low), value), max(float(high), value), flags


def _means(metric, terms, cluster, prompts):
    sums = PromptSums.of(columns(terms), cluster, prompts, metric.combine)
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
    return sums.value - pivots[1] * sums.error, sums.value - pivots[0] * sums.error
