"""Exact divergences: sums over the whole vocabulary at a sample of positions, one term each, [M].

The estimators of mismatch.metrics.token look at the sampled token alone. Where both sides give the
distribution over all that could have come, the divergence at that position can be worked out, and
only the choice of positions is left to chance.

Of a large vocabulary the sides give k ids and the mass of everything else. Divergences over these
k + 1 outcomes can only be smaller than those over the vocabulary (merging outcomes never raises an
f-divergence), so they carry other names: ``exact_kl_topk`` is a lower bound of ``exact_kl``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.registry import (
    METRICS,
    POSITIVE,
    SHARE,
    Array,
    Kind,
    Metric,
    metric,
    register,
)
from mismatch.metrics.token import exp_minus_linear
from mismatch.types import Floats, Ints

Function = Callable[..., float]

ROWS = 256  # worked on at once: each takes a few float64 rows of the vocabulary's size
ALARM = 1e-4  # chance of a false alarm of ``exact_law_gap``


def kl_terms(left: Floats, right: Floats) -> Floats:
    """KL(left ‖ right) of every row of log-probabilities [M, V], [M]; never negative.

    Summed as p (q/p - 1 - log q/p): the same where both rows sum to 1, without cancellation, and
    exactly 0 for equal rows. Where p = 0 the term is q.
    """
    p, q = np.exp(left), np.exp(right)
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.where(p > 0.0, right - left, 0.0)
        near = p * exp_minus_linear(np.clip(d, -1.0, 1.0))
        terms = np.where(np.abs(d) < 1.0, near, q - p - p * d)
    return np.asarray(np.where(p > 0.0, terms, q).sum(axis=1), np.float64)


def divergences(left: Floats, right: Floats) -> dict[str, Floats]:
    """Return every divergence of two distributions, one term per position.

    Args:
        left: log-probabilities [M, V] that sum to 1 in each row; -inf: never sampled there.
        right: the same outcomes under the other side.

    Returns:
        "kl": KL(left ‖ right), infinite where right excludes what left samples. "reverse_kl":
        KL(right ‖ left), absent where left excludes what right allows (top-p, top-k): it is
        infinite there. "tv": total variation, half of sum |p - q|. "agree": 1.0 where the most
        likely outcome is the same. "variance": of log p/q under left. "k3_variance": of k3 under
        left, absent where "reverse_kl" is: k3 never sees what left excludes.

    Raises:
        EmptyComparison: no position.
        MismatchError: other shapes, NaN or +inf.
    """
    if left.shape != right.shape:
        raise MismatchError(f"distributions of shape {left.shape} and {right.shape}")
    if left.size == 0:
        raise EmptyComparison("exact KL: no position with distributions of both sides")
    for name, law in (("left", left), ("right", right)):
        if np.isnan(law).any() or np.isposinf(law).any():
            raise MismatchError(f"exact KL: NaN or infinite log-probabilities on the {name} side")
    parts = [_of_rows(left[i : i + ROWS], right[i : i + ROWS]) for i in range(0, len(left), ROWS)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name in ("reverse_kl", "k3_variance"):
        if not np.isfinite(joined[name]).all():
            del joined[name]
    return joined


def _of_rows(left: Floats, right: Floats) -> dict[str, Floats]:
    p, q = np.exp(left), np.exp(right)
    value = kl_terms(left, right)
    with np.errstate(invalid="ignore", over="ignore"):
        square = np.where(p > 0.0, p * (right - left) ** 2, 0.0).sum(axis=1)
        variance = np.maximum(square - value**2, 0.0)
        variance = np.where(np.isfinite(value), variance, np.inf)
        k3 = exp_minus_linear(np.where(p > 0.0, right - left, 0.0))
        unseen = np.where(((p == 0.0) & (q > 0.0)).any(axis=1), np.inf, 0.0)
        k3_variance = np.maximum((p * k3**2).sum(axis=1) - value**2, 0.0) + unseen
    return {
        "kl": value,
        "reverse_kl": kl_terms(right, left),
        "tv": np.abs(p - q).sum(axis=1) / 2.0,
        "agree": np.asarray(left.argmax(axis=1) == right.argmax(axis=1), np.float64),
        "variance": np.asarray(variance, np.float64),
        "k3_variance": np.asarray(k3_variance, np.float64),
    }


def law_arrays(
    terms: dict[str, Floats], left: Floats, right: Floats, column: Ints
) -> dict[str, Array]:
    """Return what the sampled outcome says compared with what was to be expected of it.

    Args:
        column: [M] outcome that was sampled.

    Returns:
        "exact_surplus": log p/q of the sampled outcome minus its expectation, KL(left ‖ right).
        "exact_variance": its variance. Where left is what sampled, the sums of the first
        are a martingale, whatever the correlation of tokens, with the second as its variance.
    """
    row = np.arange(len(column))
    if not np.isfinite(left[row, column]).all():
        raise MismatchError("exact KL: a token was sampled that the left side excludes")
    if not np.isfinite(terms["kl"]).all():
        return {}  # nothing is to be expected of a log-ratio whose mean is infinite
    surplus = (left - right)[row, column] - terms["kl"]
    return {"exact_surplus": surplus, "exact_variance": terms["variance"]}


def arrays_of(terms: dict[str, Floats], *, whole: bool) -> dict[str, Array]:
    """Return terms under the names that the metrics of this module ask for."""
    suffix = "" if whole else "_topk"
    names = [name for name in NAMES if name in terms]
    arrays: dict[str, Array] = {f"exact_{name}{suffix}": terms[name] for name in names}
    if whole:  # the most likely of k + 1 outcomes may be all the others together
        arrays["exact_argmax_agree"] = terms["agree"]
        if "k3_variance" in terms:
            arrays["k3_variance"] = terms["k3_variance"]
    return arrays


# ---------------------------------------------------------------- the metrics

NAMES = ("kl", "reverse_kl", "tv")
WHOLE = "the whole vocabulary"
TOPK = "the engine's k most likely ids and all others as one: a lower bound"


def _declare(
    name: str, label: str, meaning: str, kind: Kind = "mean", unit: str = "nats"
) -> Function:
    """Return a number of an array of terms, named like the metric without ``_p99`` or ``_max``.

    Args:
        meaning: it is the definition as well, with the outcomes that are summed over.
    """
    array = name.removesuffix("_p99").removesuffix("_max")
    outcomes = TOPK if "_topk" in name else WHOLE

    def terms(*values: Any, **named: Any) -> Any:
        each = values[0] if values else named[array]
        return float(np.max(each)) if kind == "extreme" else each

    only = inspect.Parameter(array, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    terms.__signature__ = inspect.Signature([only])  # type: ignore[attr-defined]
    return register(
        Metric(
            name,
            terms,
            kind,
            unit,
            bounds=SHARE if unit == "probability" else POSITIVE,
            probability=0.99,
            label=label + (", top-k" if "_topk" in name else ""),
            meaning=meaning,
            definition=f"{meaning}; over {outcomes}.",
        )
    )


KL, KL_TOPK = "exact_kl", "exact_kl_topk"
_KL = "KL(rollout‖train) at a position, mean"
_REVERSE = "KL(train‖rollout), mean: a real one, unlike a k3 with the sides exchanged"
_TV = "share of the probability that the sides place elsewhere, half of Σ |p - q|"
_P99 = "99 % of the positions have no more KL(rollout‖train)"
_MAX = "KL(rollout‖train) of the position that has most"
exact_kl = _declare("exact_kl", "exact KL, mean", _KL)
exact_reverse_kl = _declare("exact_reverse_kl", "reverse KL", _REVERSE)
exact_tv = _declare("exact_tv", "total variation", _TV, unit="probability")
exact_kl_p99 = _declare("exact_kl_p99", "exact KL, 99 %", _P99, "quantile")
exact_kl_max = _declare("exact_kl_max", "exact KL, max", _MAX, "extreme")
exact_kl_topk = _declare("exact_kl_topk", "exact KL, mean", _KL)
exact_reverse_kl_topk = _declare("exact_reverse_kl_topk", "reverse KL", _REVERSE)
exact_tv_topk = _declare("exact_tv_topk", "total variation", _TV, unit="probability")
exact_kl_topk_p99 = _declare("exact_kl_topk_p99", "exact KL, 99 %", _P99, "quantile")
exact_kl_topk_max = _declare("exact_kl_topk_max", "exact KL, max", _MAX, "extreme")


@metric(
    "share", "top-1 agreement", "share of these positions where both sides prefer it", good="high"
)
def exact_argmax_agree(exact_argmax_agree: Array) -> Array:
    """Share of the sampled positions whose most likely token is the same on both sides."""
    return exact_argmax_agree


def _at_exact(name: str, label: str, meaning: str) -> Function:
    """Return an estimator of the sampled token, on the positions whose exact value is known."""
    estimator = METRICS[name]

    def terms(delta_at_exact: Floats) -> Floats:
        return np.asarray(estimator.terms(delta_at_exact), np.float64)

    return register(
        Metric(
            f"{name}_at_exact",
            terms,
            unit=estimator.unit,
            bounds=estimator.bounds,
            label=label,
            meaning=meaning,
            definition=f"`{name}` on the positions of the exact KL alone, to compare with it.",
        )
    )


kl_at_exact = _at_exact("kl", "k1, same positions", "what k1 says of the same positions")
k3_kl_at_exact = _at_exact("k3_kl", "k3, same positions", "what k3 gives on the same positions")


@metric(
    "nats",
    "k3, spread by chance",
    "over √tokens: how far mean k3 may be from the KL by the choice of tokens alone",
    "extreme",
    bounds=POSITIVE,
    good="neither",
)
def k3_spread_at_exact(k3_variance: Floats) -> float:
    """Standard deviation of one token's k3, from the distributions at the sampled positions.

    Unlike the spread of k3 itself it counts tokens that were not sampled.
    """
    return math.sqrt(float(k3_variance.mean()))


@metric(
    "1",
    "k1 - exact, of chance",
    "above 1: the tokens were not drawn from that distribution",
    "extreme",
    bounds=POSITIVE,
)
def exact_law_gap(exact_surplus: Floats, exact_variance: Floats) -> float:
    """|sum of (k1 - exact KL)| over what chance allows (Freedman's inequality for martingales at
    1e-4, with the largest step seen). Above 1: that distribution did not sample these tokens."""
    gap = abs(float(exact_surplus.sum()))
    if gap == 0.0:
        return 0.0
    chance = math.log(2.0 / ALARM)
    largest = float(np.abs(exact_surplus).max())
    allowed = math.sqrt(2.0 * chance * float(exact_variance.sum())) + largest * chance / 3.0
    return gap / allowed
