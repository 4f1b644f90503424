"""A metric on its scale: where the value and its interval lie among healthy, warn and critical."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mismatch.reports.summary import Row

# Fixed for every metric, so that a column of gauges can be read at a glance.
HEALTHY_AT, CRITICAL_AT = 0.5, 0.78


@dataclass(frozen=True, slots=True)
class Gauge:
    """Positions from 0 (agreement) to 1 (worst), as shares of the gauge's width.

    Attributes:
        low, high: the interval's ends; both equal ``value`` where there is none.
        marks: (position, text) of values measured elsewhere.
    """

    value: float
    low: float
    high: float
    marks: tuple[tuple[float, str], ...] = ()

    @property
    def span(self) -> float:
        return self.high - self.low


def gauge_of(row: Row, elsewhere: list[tuple[float, str]] | None = None) -> Gauge | None:
    """The gauge of a judged metric, or None without levels.

    Args:
        elsewhere: values of the same metric measured by others, with what is said about them.
    """
    if row.judgement is None or not math.isfinite(row.estimate.value):
        return None
    low, high = row.estimate.low, row.estimate.high
    ends = sorted(place(row, end if end is not None else row.estimate.value) for end in (low, high))
    marks = tuple((place(row, value), text) for value, text in elsewhere or [])
    return Gauge(place(row, row.estimate.value), ends[0], ends[1], marks)


def place(row: Row, value: float) -> float:
    """Position of a value, in [0.01, 0.99]: logarithmic in its distance from agreement, per zone.

    The healthy zone shows two decades below its bound, the critical one a decade above its own.
    """
    judgement = row.judgement
    assert judgement is not None
    distance = _distance(row, value)
    healthy, critical = _distance(row, judgement.healthy), _distance(row, judgement.critical)
    warn_width = CRITICAL_AT - HEALTHY_AT
    if distance <= 0:
        return 0.01
    if distance <= healthy:
        position = HEALTHY_AT * (1 + math.log10(distance / healthy) / 2)
    elif distance > critical:
        position = CRITICAL_AT + (1 - CRITICAL_AT) * math.log10(distance / critical)
    elif healthy > 0:
        position = HEALTHY_AT + warn_width * math.log(distance / healthy, critical / healthy)
    else:  # a bound of 0 leaves no room for a logarithm
        position = HEALTHY_AT + warn_width * distance / critical
    return min(max(position, 0.01), 0.99)


def _distance(row: Row, value: float) -> float:
    """How far a value is from that of perfect agreement: 1 for factors and correlations, else 0."""
    if row.low_is_bad:
        return 1.0 - value
    agreement = 1.0 if row.metric in {"token_mult_prob_error", "seq_mult_prob_error_max"} else 0.0
    return value - agreement
