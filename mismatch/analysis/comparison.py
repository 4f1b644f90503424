"""Two scorings of the same tokens in, :class:`Comparison` out: numbers, no judgement."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mismatch.analysis.breakdowns import breakdowns
from mismatch.analysis.exact_kl import exact_estimates
from mismatch.analysis.routing_tables import prompt_routing, routing_tables
from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.registry import Array, Metric
from mismatch.metrics.routing_pairs import (
    PairedRouting,
    RouterNoise,
    action_rows,
    pair_routing,
    with_noise,
)
from mismatch.types import Comparison, Estimate, Pair, Rollout, Scoring

# What a pair of the noise floor is measured by: enough to sit next to the headline numbers.
NOISE_METRICS = (
    "logprob_abs_diff_mean",
    "logprob_abs_diff_max",
    "kl",
    "k3_kl",
    "token_mult_prob_error",
    "ratio_outside_2",
    "probs_diff_mean",
    "probs_pearson",
    "routing_disagree_layer",
    "routing_disagree_any",
)


def compare(
    rollout: Rollout,
    left: Scoring,
    right: Scoring,
    *,
    sampled_by_left: bool,
    seed: int = 0,
    headline_only: bool = False,
    noise: RouterNoise | None = None,
    keys_noise: RouterNoise | None = None,
    texts: Mapping[int, str] | None = None,
) -> Comparison:
    """Compute every metric that the two scorings allow, with 95 % intervals by prompt.

    A metric is absent, never 0, where its data is missing (no entropy, no routing weights) or where
    it is undefined (the correlation of constants).

    Args:
        left: the rollout side; ``delta = right - left``.
        sampled_by_left: what :func:`is_sampling_law` says of ``left``.
        seed: of the bootstrap.
        headline_only: just ``NOISE_METRICS``, and no breakdowns.
        noise: how far the trainer's router scores move by themselves; without it no near-ties.
        keys_noise: the same of the indexers of sparse attention.
        texts: id -> text of the rollout's tokens, for the tables that name tokens.

    Raises:
        EmptyComparison: no action token.
        MismatchError: other token ids, non-finite logprobs, or routing that cannot be compared.
        CorruptCapture: routed experts that cannot be true.
    """
    pair = Pair.of(rollout, left, right)
    estimator = Estimator(pair.sequence, pair.prompt, seed=seed)
    routes = paired_routing(rollout, left, right, noise)
    token_metrics = [metric for metric in METRICS.values() if not is_routing(metric)]
    if headline_only:
        token_metrics = [metric for metric in token_metrics if metric.name in NOISE_METRICS]
    metrics = estimator.all(token_metrics, inputs(pair, left, right))
    metrics |= exact_estimates(
        pair, left, right, sampled_by_left=sampled_by_left, seed=seed, headline_only=headline_only
    )
    routing = routing_estimates(
        rollout, left, right, routes, estimator, seed=seed, headline_only=headline_only
    )
    tables = {}
    if not headline_only:
        routing |= keys_estimates(rollout, left, right, keys_noise, seed)
        disagree = None if routes is None else routes.differs.mean(axis=1)
        tables = breakdowns(rollout, left, right, pair, texts, disagree)
        if routes is not None:
            tables |= routing_tables(left, right, pair, routes, noise)
    return Comparison(left.name, right.name, sampled_by_left, metrics, routing, tables)


def routing_estimates(
    rollout: Rollout,
    left: Scoring,
    right: Scoring,
    routes: PairedRouting | None,
    estimator: Estimator,
    *,
    seed: int = 0,
    headline_only: bool = False,
) -> dict[str, Estimate]:
    """Return every routing metric that the data allow; those over prompt rows are last."""
    if routes is None or left.routing is None or right.routing is None:
        return {}
    wanted = [
        metric
        for metric in METRICS.values()
        if is_routing(metric) and (not headline_only or metric.name in NOISE_METRICS)
    ]
    arrays = routes.arrays | {"delta": right.logprobs - left.logprobs}
    estimates = estimator.all(wanted, arrays)
    if headline_only:
        return estimates
    return estimates | prompt_routing(rollout, left.routing, right.routing, seed)


def keys_estimates(
    rollout: Rollout, left: Scoring, right: Scoring, noise: RouterNoise | None, seed: int = 0
) -> dict[str, Estimate]:
    """Return how far sparse attention selected the same keys for what predicts an action."""
    if left.keys is None or right.keys is None:
        return {}
    acting = np.isin(left.keys.rows, action_rows(rollout))
    if not np.array_equal(left.keys.rows, right.keys.rows) or not acting.any():
        return {}
    rows = np.flatnonzero(acting)
    routes = pair_routing(rollout, left.keys.choices, right.keys.choices, rows)
    arrays = with_noise(routes, noise).arrays
    names = {"differs": "keys_differ", "overlap": "keys_common", "near_tie": "keys_near_tie"}
    named = {names[name]: values for name, values in arrays.items() if name in names}
    sequences = rollout.sequence_of_token[left.keys.rows[rows]]
    estimator = Estimator(sequences, rollout.distinct_prompts, seed=seed)
    wanted = [metric for name, metric in METRICS.items() if name.startswith("keys_")]
    return estimator.all(wanted, named)


def is_routing(metric: Metric) -> bool:
    """Return whether a metric is about experts: those have a separate table."""
    return metric.name.startswith(("routing_", "experts_", "keys_"))


def is_sampling_law(rollout: Rollout, scoring: Scoring) -> bool:
    """Whether a scoring holds the logprobs of the distribution that sampled the rollout's tokens.

    It does if it was taken while decoding, by the engine that sampled, at the temperature in force,
    renormalised over the kept tokens where top-p or top-k cut the tail, and after a penalty. Greedy
    sampling (T = 0) is no distribution with a density: never.
    """
    facts, sampling = scoring.fingerprint, rollout.sampling
    engine = facts.get("engine")
    temperature = facts.get("logprobs_temperature")
    return bool(
        facts.get("mode") == "decode"
        and engine is not None
        and engine == rollout.fingerprint.get("engine", engine)
        and sampling.temperature > 0.0
        and temperature is not None
        and np.isclose(float(temperature), sampling.temperature, rtol=1e-9)
        and (facts.get("logprobs_truncated", False) or not sampling.truncates)
        and (facts.get("logprobs_penalised", False) or not sampling.penalises)
    )


def paired_routing(
    rollout: Rollout, left: Scoring, right: Scoring, noise: RouterNoise | None = None
) -> PairedRouting | None:
    """Return validated routing of both sides on their common layers; None where a side has none."""
    if left.routing is None or right.routing is None:
        return None
    left.routing.validate(rollout, left.name)
    right.routing.validate(rollout, right.name)
    return with_noise(pair_routing(rollout, left.routing, right.routing), noise)


def inputs(pair: Pair, left: Scoring, right: Scoring) -> dict[str, Array]:
    """Return the arrays that metrics ask for by name, those of them that were measured."""
    arrays: dict[str, Array] = {
        "rollout": pair.rollout,
        "train": pair.train,
        "delta": pair.delta,
        "sequence": pair.sequence,
    }
    if right.entropy is not None:
        finite = np.isfinite(right.entropy)
        if not finite.all():
            fault = f"{right.name}: {int((~finite).sum())} entropies are not finite"
            raise MismatchError(fault, "look for overflow (fp16) in the logits")
        arrays["train_entropy"] = right.entropy.astype(np.float64)
    if left.top1 is not None and right.top1 is not None:
        arrays["rollout_top1"], arrays["train_top1"] = left.top1, right.top1
    return arrays
