"""What a metric is: per-unit terms, how their means combine, and how it is read.

A metric is declared once, by decorating the function that computes its terms. The result is
callable on plain arrays (``k3_kl(delta)`` is the reported number) and carries what the interval
estimator needs, so that a number and its interval can never follow two formulas.
"""

from __future__ import annotations

import functools
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
Fold = Literal["max", "min", "sum"]
Bounds = tuple[float, float]

REAL: Bounds = (-np.inf, np.inf)
POSITIVE: Bounds = (0.0, np.inf)
SHARE: Bounds = (0.0, 1.0)
METRICS: dict[str, Metric] = {}
ORIGIN_UNITS = 1 << 16


@dataclass(frozen=True)
class Metric:
    """One reported number.

    Attributes:
        kind: what interval it can have. "mean": a mean of one term per unit; "ratio": a smooth
            function of several such means; "quantile": an order statistic of the terms;
            "extreme": a maximum, minimum, count or other number without an interval.
        reduction: whether a unit is an action token or a sequence with at least one.
        terms: arrays -> [U] or [U, M] terms; for "extreme" without ``fold`` the number itself.
            A unit's terms depend on that unit alone (and on ``origin``): large comparisons are
            worked through in blocks of whole sequences.
        needs: names of the arrays that ``terms`` takes; without one of them the metric is absent.
        combine: means [..., M] -> value [...]; for an "extreme" with ``fold``, what the terms
            were folded to [M] -> value.
        probability: of a quantile; unused otherwise.
        bounds: the values that the metric can take at all; intervals are cut to them.
        good: which direction is agreement. "neither": no level can be set on it.
        fold: of an "extreme" whose terms are one per unit: how they make one number.
        outermost: of token terms that depend on ``delta`` alone: no |term| between two deltas
            exceeds both of theirs, so that the largest terms are those of outermost deltas.
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
    fold: Fold | None = None
    outermost: bool = False

    @property
    def origin(self) -> Callable[..., Any] | None:
        """Arrays -> what ``terms`` measures from, and takes as ``origin``.

        It cancels in the value and only keeps digits. Blocks of one comparison share it, hence it
        looks at the first ``ORIGIN_UNITS`` units only.
        """
        found: Callable[..., Any] | None = getattr(self.terms, "origin", None)
        return found

    @property
    def declared(self) -> Callable[..., Any]:
        """The function that computes the terms, as it was declared: a family has one."""
        made: Callable[..., Any] = getattr(self.terms, "__wrapped__", self.terms)
        return made

    def __call__(self, *arrays: Any, **named: Any) -> float:
        """The number itself; the arguments are those of the declaring function.

        Raises:
            EmptyComparison: the arrays hold no unit.
            MismatchError: arrays of different lengths or of another shape than stated, input that
                is masked, not finite or no number, negative entropy, sequence numbers that are not
                whole, or an undefined value (a correlation of constants, a division by zero
                entropy).
        """
        if len(arrays) > len(self.needs):
            raise MismatchError(
                f"{self.name} takes {', '.join(self.needs)}: {len(arrays)} arrays are too many"
            )
        given = dict(zip(self.needs, arrays, strict=False))
        given |= {name: named.pop(name) for name in self.needs if name in named}
        inputs = {
            name: _checked(f"{self.name}: {name}", name, array) for name, array in given.items()
        }
        if len({len(array) for array in inputs.values()}) > 1:
            lengths = ", ".join(str(len(array)) for array in inputs.values())
            raise MismatchError(f"{self.name}: arrays of different lengths: {lengths}")
        value = self.value(self.terms(**inputs, **named))
        if np.isnan(value):
            raise MismatchError(f"{self.name} is undefined here: zero variance or entropy")
        return value

    def value(self, terms: Any) -> float:
        """The number, from its terms; NaN where it is undefined."""
        if self.kind == "extreme":
            return (
                float(terms) + 0.0
                if self.fold is None
                else self.folded_value(folded(self.fold, terms))
            )
        if self.kind == "quantile":
            return float(np.quantile(terms, self.probability, method="inverted_cdf")) + 0.0
        with np.errstate(all="ignore"):
            return self.of_means(columns(terms).mean(axis=0))

    def of_means(self, means: Floats) -> float:
        """The number of a "mean" or "ratio", from the means of its terms, [M]."""
        with np.errstate(all="ignore"):
            value = float(floats(self.combine(means)).reshape(-1)[0])
        # Rounding can leave the range. What is further out has a cause (logprobs above 0, which the
        # check positive-logprobs names) and must not be made to look possible.
        inside = float(np.clip(value, *self.bounds))
        return (inside if abs(inside - value) <= ROUNDING else value) + 0.0  # no -0.0

    def folded_value(self, found: Floats) -> float:
        """The number of an "extreme", from what its terms were folded to, [M]."""
        with np.errstate(all="ignore"):
            return float(floats(self.combine(found)).reshape(-1)[0]) + 0.0

    def parts(self, arrays: Mapping[str, Array], origin: Any = None) -> tuple[Array, ...]:
        """The terms as M separate arrays [U], without copies: what large comparisons work on."""
        named = {name: arrays[name] for name in self.needs}
        raw = self.declared
        found = raw(**named) if self.origin is None else raw(**named, origin=origin)
        if isinstance(found, tuple):
            return found
        table: Array = np.asarray(found)  # one array stays the object that other metrics share
        return (table,) if table.ndim == 1 else tuple(columns(table).T)

    def available(self, arrays: Mapping[str, Array]) -> bool:
        """Whether everything that the metric is computed from was measured."""
        return all(name in arrays for name in self.needs)


def floats(values: Any) -> Floats:
    """Anything numeric (shares of booleans, counts) as float64."""
    return np.asarray(values, dtype=np.float64)


def folded(fold: Fold, terms: Array) -> Floats:
    """The largest, smallest or total term of each column, [M]."""
    table = columns(terms)
    if fold == "sum":
        return floats(table.sum(axis=0))
    return floats(table.max(axis=0) if fold == "max" else table.min(axis=0))


def columns(terms: Floats) -> Floats:
    """Terms as [U, M], also where there is only one per unit."""
    return terms[:, None] if terms.ndim == 1 else terms


def _side_by_side(
    terms: Callable[..., Any], origin: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The same function with its columns, where it returns several, in one [U, M] array."""

    @functools.wraps(terms)
    def made(*arrays: Any, **named: Any) -> Any:
        found = terms(*arrays, **named)
        return np.stack(found, axis=1) if isinstance(found, tuple) else found

    made.origin = origin  # type: ignore[attr-defined]
    return made


FLAT = frozenset(
    ("delta", "rollout", "train", "sequence", "train_entropy", "rollout_top1", "train_top1")
)  # one value per action token, [A]
ROUNDING = 1e-6  # by which float32 arithmetic can leave the range of a value


def _checked(label: str, name: str, values: Any) -> Array:
    """One argument of a metric that is called by hand, as an array that it is defined on."""
    if isinstance(values, np.ma.MaskedArray):
        raise MismatchError(f"{label} is a masked array", "pass the action tokens alone: x[mask]")
    array: Array = np.asarray(values)
    if array.ndim == 0 or len(array) == 0:
        raise EmptyComparison(f"{label}: no action tokens to compare")
    if name in FLAT and array.ndim != 1:
        raise MismatchError(
            f"{label} has shape {array.shape}, expected one value per action token",
            "flatten it without prompt and padding: x[mask]",
        )
    if array.dtype.kind not in ("fiu" if name in FLAT else "fiub"):
        raise MismatchError(f"{label} holds {array.dtype}, which are no real numbers")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise MismatchError(f"{label}: {int((~np.isfinite(array)).sum())} inputs are not finite")
    if name == "sequence" and array.dtype.kind == "f" and (array != np.floor(array)).any():
        raise MismatchError(f"{label} numbers are not whole")
    if name == "train_entropy" and array.min() < -ROUNDING:
        raise MismatchError(f"{label}: an entropy over the vocabulary is never negative")
    if name == "sequence":
        return array.astype(np.int64)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


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
    fold: Fold | None = None,
    origin: Callable[..., Any] | None = None,
    outermost: bool = False,
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
            fold=fold,
            origin=origin,
            outermost=outermost,
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
    doc: str = "",
    fold: Fold | None = None,
    origin: Callable[..., Any] | None = None,
    outermost: bool = False,
) -> Metric:
    """Declare a metric of a family (quantiles, thresholds) by name.

    ``terms`` may also return its M columns as a tuple of [U] arrays: they are then shared with
    other metrics where they are the same arrays, and never copied side by side for large inputs.
    """
    parameters = inspect.signature(terms).parameters.values()
    needs = tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)
    made = Metric(
        name, kind, reduction, _side_by_side(terms, origin), needs, combine, unit, bounds, good,
        probability, fold, outermost,
    )  # fmt: skip
    object.__setattr__(made, "__doc__", doc or terms.__doc__)
    METRICS[name] = made
    return made
