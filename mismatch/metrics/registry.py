"""What a metric is: per-unit terms, how their means combine, and how it is read.

A metric is declared once, by decorating the function that computes its terms:

    @metric("nats", "mean |delta|, nats", "average distance of …")
    def logprob_abs_diff_mean(delta): ...

``METRICS`` then holds the declaration, with what the interval estimator needs, and the decorated
name is a function from plain arrays to the reported number: both follow one formula.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec

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
P = ParamSpec("P")

REAL: Bounds = (-np.inf, np.inf)
POSITIVE: Bounds = (0.0, np.inf)
SHARE: Bounds = (0.0, 1.0)
METRICS: dict[str, Metric] = {}  # in the order of declaration, which is that of reports
ROUNDING = 1e-6  # by which float32 arithmetic can leave the range of a value
FLAT = frozenset(
    ("delta", "rollout", "train", "sequence", "train_entropy", "rollout_top1", "train_top1")
)  # one value per action token, [A]
REALS = FLAT - {"sequence", "rollout_top1", "train_top1"}  # computed with as float64


def first(means: Floats) -> Floats:
    """Return the mean of the only term."""
    return means[..., 0]


@dataclass(frozen=True)
class Metric:
    """One reported number.

    Attributes:
        terms: arrays -> [U] or [U, M] terms (M columns may come as a tuple of [U] arrays); for
            "extreme" the number itself. Its parameters without a default name the arrays.
        kind: what interval it can have. "mean": a mean of one term per unit; "ratio": a smooth
            function of several means; "quantile": an order statistic of the terms;
            "extreme": a maximum, minimum, count or other number without an interval.
        reduction: whether a unit is an action token or a sequence with at least one.
        combine: means [..., M] -> value [...]; unused for "quantile" and "extreme".
        bounds: the values that the metric can take at all; intervals are cut to them.
        good: which direction is agreement. "neither": no level can be set on it.
        probability: of a quantile; unused otherwise.
        label: at most 24 characters, for tables.
        meaning: one sentence for a reader who does not know the metric.
        definition: the formula in words; the docstring of ``terms`` by default.
    """

    name: str
    terms: Callable[..., Any]
    kind: Kind = "mean"
    unit: str = ""
    reduction: Reduction = "token"
    combine: Combine = first
    bounds: Bounds = REAL
    good: Good = "low"
    probability: float = 0.5
    label: str = ""
    meaning: str = ""
    definition: str = ""

    @functools.cached_property
    def needs(self) -> tuple[str, ...]:
        """Names of the arrays that ``terms`` takes; without one of them the metric is absent."""
        parameters = inspect.signature(self.terms).parameters.values()
        return tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)

    def __call__(self, *arrays: Any, **named: Any) -> float:
        """Return the number itself; the arguments are those of the declaring function.

        Tensors are accepted: detached, and bfloat16 as float32. Integers count as floats.

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
        """Return the number, from its terms; NaN where it is undefined."""
        if self.kind == "extreme":
            return float(terms) + 0.0
        if self.kind == "quantile":
            return float(np.quantile(terms, self.probability, method="inverted_cdf")) + 0.0
        with np.errstate(all="ignore"):
            return self.of_means(columns(terms).mean(axis=0))

    def of_means(self, means: Floats) -> float:
        """Return the number of a "mean" or "ratio", from the means of its terms, [M]."""
        with np.errstate(all="ignore"):
            value = float(floats(self.combine(means)).reshape(-1)[0])
        # Rounding can leave the range. What is further out has a cause (logprobs above 0, which the
        # check positive-logprobs names) and must not be made to look possible.
        inside = float(np.clip(value, *self.bounds))
        return (inside if abs(inside - value) <= ROUNDING else value) + 0.0  # no -0.0

    def parts(self, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
        """Return the terms as M separate arrays [U], without a copy."""
        with np.errstate(all="ignore"):
            terms = self.terms(**{name: arrays[name] for name in self.needs})
        if isinstance(terms, tuple):
            return terms
        table: Array = np.asarray(terms)
        return (table,) if table.ndim == 1 else tuple(columns(table).T)


def floats(values: Any) -> Floats:
    """Anything numeric (shares of booleans, counts) as float64."""
    return np.asarray(values, dtype=np.float64)


def columns(terms: Any) -> Floats:
    """Return terms as [U, M], also where there is only one per unit, or a tuple of M columns."""
    table = np.stack(terms, axis=1) if isinstance(terms, tuple) else np.asarray(terms)
    return table[:, None] if table.ndim == 1 else table


def plain_array(label: str, values: Any) -> Array:
    """Return as numpy sees it; a tensor is detached, bfloat16 (unknown there) read as float32."""
    if isinstance(values, np.ma.MaskedArray):
        raise MismatchError(f"{label} is a masked array", "pass the action tokens alone: x[mask]")
    if hasattr(values, "detach"):  # a torch tensor, without importing torch
        values = values.detach().cpu()
        values = (values.float() if "bfloat16" in str(values.dtype) else values).numpy()
    array: Array = np.asarray(values)
    return array


def _checked(label: str, name: str, values: Any) -> Array:
    """One argument of a metric that is called by hand, as an array that it is defined on."""
    array = plain_array(label, values)
    if array.ndim == 0 or len(array) == 0:
        raise EmptyComparison(f"{label}: no action tokens to compare")
    if name in FLAT and array.ndim != 1:
        fault = f"{label} has shape {array.shape}, expected one value per action token"
        raise MismatchError(fault, "flatten it without prompt and padding: x[mask]")
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
    real = array.dtype.kind == "f" or name in REALS
    return array.astype(np.float64) if real else array


def excess(means: Floats) -> Floats:
    """For metrics that are 1 at agreement: terms hold x - 1, exact where x is nearly 1."""
    return 1.0 + means[..., 0]


def spread(means: Floats) -> Floats:
    """Return the population standard deviation from the means of (x, x²)."""
    return floats(np.sqrt(np.maximum(means[..., 1] - means[..., 0] ** 2, 0.0)))


def quotient(means: Floats) -> Floats:
    """Return the ratio of two means; undefined where the second is not positive."""
    return np.where(means[..., 1] > 0.0, means[..., 0] / means[..., 1], np.nan)


def effective_share(means: Floats) -> Floats:
    """Effective sample size over the sample size, from the means of (w, w²)."""
    return floats(means[..., 0] ** 2 / means[..., 1])


def metric(
    unit: str, label: str, meaning: str, kind: Kind = "mean", **more: Any
) -> Callable[[Callable[P, Any]], Callable[P, float]]:
    """Declare the decorated function's terms as the metric of the function's name.

    The result is the metric as a function on plain arrays, see :meth:`Metric.__call__`.

    Args:
        more: further fields of :class:`Metric`; shares and probabilities have their bounds.
    """
    more = {"bounds": SHARE if unit in ("share", "probability") else REAL} | more
    more |= {"label": label, "meaning": meaning}

    def declare(terms: Callable[P, Any]) -> Callable[P, float]:
        definition = inspect.getdoc(terms) or ""
        return register(Metric(terms.__name__, terms, kind, unit, definition=definition, **more))

    return declare


def register(declared: Metric) -> Callable[..., float]:
    """Declare a metric of a family (quantiles, thresholds); it is a function then."""
    METRICS[declared.name] = declared
    signature = inspect.signature(declared.terms)

    def number(*arrays: Any, **named: Any) -> float:
        return declared(*arrays, **named)

    number.__name__ = number.__qualname__ = declared.name.replace(".", "_")
    number.__module__ = declared.terms.__module__
    number.__doc__ = declared.definition
    number.__signature__ = signature.replace(return_annotation="float")  # type: ignore[attr-defined]
    return number
