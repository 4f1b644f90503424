"""Two scorings with whole distributions in, the exact divergences between them out."""

from __future__ import annotations

import numpy as np

from mismatch.captures import why_incomparable
from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.exact import KL, KL_TOPK, arrays_of, divergences, law_arrays
from mismatch.metrics.registry import Array
from mismatch.types import Check, Comparison, Estimate, Pair, Scoring

LAW_GAP = "exact_law_gap"
HEADLINE = (KL, KL_TOPK)
CHECK = "exact-kl"


def is_exact(name: str) -> bool:
    """Return whether a metric is one of whole distributions: those have a separate table."""
    return name.startswith("exact_") or name.endswith("_at_exact")


def exact_reason(left: Scoring, right: Scoring) -> str:
    """Return why two scorings have no exact divergence; empty where they have one.

    Values that are no distribution (NaN, not summing to 1) are a reason too: what the sampled
    tokens say is not lost because of them.
    """
    try:
        exact_arrays(left, right)
    except MismatchError as error:
        return error.message
    return ""


def exact_arrays(
    left: Scoring, right: Scoring, *, sampled_by_left: bool = False
) -> dict[str, Array]:
    """Return what the metrics of mismatch.metrics.exact ask for, [M] each.

    Raises:
        MismatchError: a side without distributions, other positions, ids or tokens, NaN, or rows
            that do not sum to 1.
    """
    if left.distributions is None or right.distributions is None:
        silent = left.name if left.distributions is None else right.name
        raise MismatchError(f"{silent} holds no whole distributions", "run with --exact-kl 512")
    reason = why_incomparable(left.distributions, right.distributions)
    if reason:
        fault = f"{left.name} and {right.name}: {reason}"
        raise MismatchError(fault, "score again the tokens of one rollout")
    if not np.array_equal(left.token_ids, right.token_ids):
        fault = f"{left.name} and {right.name}: they scored other tokens"
        raise MismatchError(fault, "score the rollout's token ids, never re-tokenised text")
    laws = left.distributions.law(left.name), right.distributions.law(right.name)
    terms = divergences(*laws)
    positions = left.distributions.positions
    arrays = arrays_of(terms, whole=left.distributions.whole)
    if left.fingerprint.get("logprobs_truncated"):
        arrays.pop("exact_reverse_kl_topk", None)  # infinite, which the merged tail hides
    arrays["delta_at_exact"] = (right.logprobs - left.logprobs)[positions]
    if sampled_by_left:
        column = left.distributions.column(left.token_ids[positions])
        arrays |= law_arrays(terms, *laws, column)
    return arrays


def exact_estimates(
    pair: Pair,
    left: Scoring,
    right: Scoring,
    *,
    sampled_by_left: bool,
    seed: int = 0,
    headline_only: bool = False,
) -> dict[str, Estimate]:
    """Exact divergences with intervals by prompt; empty where :func:`exact_reason` says why."""
    if left.distributions is None:
        return {}
    try:
        arrays = exact_arrays(left, right, sampled_by_left=sampled_by_left)
    except MismatchError:
        return {}
    names = HEADLINE if headline_only else [name for name in METRICS if is_exact(name)]
    estimator = Estimator(pair.sequence[left.distributions.positions], pair.prompt, seed=seed)
    return estimator.all([METRICS[name] for name in names], arrays)


def exact_checks(comparison: Comparison) -> list[Check]:
    """Whether the sampled tokens agree with the distributions that they are said to come from.

    Empty where there are none. k1 is the log-ratio of what was sampled, the exact KL is what it is
    expected to be under that distribution: they differ by chance alone, by a known amount.
    """
    gap = comparison.metrics.get(LAW_GAP)
    if gap is None:
        return []
    name = KL if KL in comparison.metrics else KL_TOPK
    exact, sampled = comparison.metrics[name], comparison.metrics["kl_at_exact"]
    what = (
        f"k1 {sampled.value:.3g}, exact {exact.value:.3g} nats at {exact.n_tokens:,} positions: "
        f"{100 * gap.value:.0f} % of what chance allows"
    )
    if np.isfinite(gap.value) and gap.value <= 1.0:
        return [Check(CHECK, "passed", what)]
    fix = (
        "the tokens were not drawn from the reported distribution: look for penalties, a bias, or "
        "a logits processor in the engine's sampling"
    )
    return [Check(CHECK, "warning", what, fix)]
