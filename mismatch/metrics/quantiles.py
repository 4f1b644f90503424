"""Intervals of quantiles by Woodruff's method, over prompts."""

from __future__ import annotations

import math

from mismatch.metrics.inference import Interval, student
from mismatch.types import Floats

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
