"""What a metric is: per-unit terms, how their means combine, and how it is read.

A metric is declared once, by decorating the function that computes its terms. The result is
callable on plain arrays (``k3_kl(delta)`` is the reported number) and carries what the interval
estimator needs, so that a number and its interval can never follow two formulas.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.types import Floats

Array = NDArray[Any]
Combine = Callable[[Floats], Floats]
Kind = Literal["mean", "ratio", "quantile", "extreme"]
Reduction = Literal["token", "sequence"]
Good = Literal["low", "high", "neither"]
Bounds = tuple[float, float]

REAL: Bounds = (-np.inf, np.inf)
POSITIVE: Bounds = (0.0, np.inf)
SHARE: Bounds = (0.0, 1.0)
METRICS: dict[str, Metric] = {}


@dataclass(frozen=True)
class Metric:
    """One reported number.

    Attributes:
        kind: what interval it can have. "mean": a mean of one term per unit; "ratio": a smooth
            function of several such means; "quantile": an order statistic of the terms;
            "extreme": a maximum, minimum, count or other number without an interval.
        reduction: whether a unit is an action token or a sequence with at least one.
        terms: arrays -> [U] or [U, M] terms; for "extreme" the number itself.
        needs: names of the arrays that ``terms`` takes; without one of them the metric is absent.
        combine: means [..., M] -> value [...].
        probability: of a quantile; unused otherwise.
        bounds: the values that the metric can take at all; intervals are cut to them.
        good: which direction is agreement. "neither": no level can be set on it.
        aliases: the same quantity elsewhere, with the difference where there is one.
    """

    name: str
    kind: Kind
    reduction: Reduction
    terms: Callable[..., Any]
    needs: tuple[str, ...]
    combine: Combine
    unit: str
    bounds: Bounds = REAL
    good: Good = "low"
    probability: float = 0.5
    aliases: tuple[str, ...] = ()

    def __call__(self, *arrays: Any, **named: Any) -> float:
        """The number itself; the arguments are those of the declaring function.

        Raises:
            EmptyComparison: the arrays hold no unit.
            MismatchError: arrays of different lengths, non-finite input, or an undefined value
                (a correlation of constants, a division by zero entropy).
        """
        inputs = [_checked(self.name, array) for array in arrays]
        if len({len(array) for array in inputs}) > 1:
            lengths = ", ".join(str(len(array)) for array in inputs)
            raise MismatchError(f"{self.name}: arrays of different lengths: {lengths}")
        value = self.value(self.terms(*inputs, **named))
        if np.isnan(value):
            raise MismatchError(f"{self.name} is undefined here: zero variance or entropy")
        return value

    def value(self, terms: Any) -> float:
        """The number, from its terms; NaN where it is undefined."""
        with np.errstate(all="ignore"):
            if self.kind == "extreme":
                value = terms
            elif self.kind == "quantile":
                value = np.quantile(terms, self.probability, method="inverted_cdf")
            else:  # rounding can leave the range
                value = np.clip(self.combine(columns(terms).mean(axis=0)), *self.bounds)
        return float(value) + 0.0  # no -0.0

    def available(self, arrays: Mapping[str, Array]) -> bool:
        """Whether everything that the metric is computed from was measured."""
        return all(name in arrays for name in self.needs)


def floats(values: Any) -> Floats:
    """Anything numeric (shares of booleans, counts) as float64."""
    return np.asarray(values, dtype=np.float64)


def columns(terms: Floats) -> Floats:
    """Terms as [U, M], also where there is only one per unit."""
    return terms[:, None] if terms.ndim == 1 else terms


def _checked(name: str, values: Any) -> Array:
    array: Array = np.asarray(values)
    if array.ndim == 0 or len(array) == 0:
        raise EmptyComparison(f"{name}: no action tokens to compare")
    if array.dtype.kind != "f":
        return array
    if not np.isfinite(array).all():
        raise MismatchError(f"{name}: {int((~np.isfinite(array)).sum())} inputs are not finite")
    return array.astype(np.float64)


def _single(means: Floats) -> Floats:
    return means[..., 0]


def excess(means: Floats) -> Floats:
    """For metrics that are 1 at agreement: terms hold x - 1, exact where x is nearly 1."""
    return 1.0 + means[..., 0]


def spread(means: Floats) -> Floats:
    """Population standard deviation from the means of (x, x²)."""
    return floats(np.sqrt(np.maximum(means[..., 1] - means[..., 0] ** 2, 0.0)))


def quotient(means: Floats) -> Floats:
    """Ratio of two means; undefined where the second is not positive."""
    return np.where(means[..., 1] > 0.0, means[..., 0] / means[..., 1], np.nan)


def effective_share(means: Floats) -> Floats:
    """Effective sample size over the sample size, from the means of (w, w²)."""
    return floats(means[..., 0] ** 2 / means[..., 1])


def metric(
    kind: Kind = "mean",
    *,
    unit: str,
    reduction: Reduction = "token",
    combine: Combine = _single,
    bounds: Bounds = REAL,
    good: Good = "low",
    aliases: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Metric]:
    """Declare the decorated function's terms as the metric of the function's name."""

    def declare(terms: Callable[..., Any]) -> Metric:
        return register(
            terms.__name__,
            terms,
            kind=kind,
            unit=unit,
            reduction=reduction,
            combine=combine,
            bounds=bounds,
            good=good,
            aliases=aliases,
        )

    return declare


def register(
    name: str,
    terms: Callable[..., Any],
    *,
    kind: Kind,
    unit: str,
    reduction: Reduction = "token",
    combine: Combine = _single,
    bounds: Bounds = REAL,
    good: Good = "low",
    probability: float = 0.5,
    aliases: tuple[str, ...] = (),
    doc: str = "",
) -> Metric:
    """Declare a metric of a family (quantiles, thresholds) by name."""
    parameters = inspect.signature(terms).parameters.values()
    needs = tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)
    made = Metric(
        name, kind, reduction, terms, needs, combine, unit, bounds, good, probability, aliases
    )
    object.__setattr__(made, "__doc__", doc or terms.__doc__)
    METRICS[name] = made
    return made
