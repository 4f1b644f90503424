"""Two scorings of the same tokens in, :class:`Comparison` out: numbers, no judgement."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.estimate import Estimator
from mismatch.metrics.registry import Array, Metric
from mismatch.metrics.routing import (
    PairedRouting,
    load_variation,
    pair_routing,
    routing_disagree_layer,
)
from mismatch.types import Comparison, Floats, Ints, Pair, Rollout, Scoring

# What a pair of the noise floor is measured by: enough to sit beside the headline numbers.
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
POSITION_BUCKETS = 32
PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
MOST_FLIPS = 2
WORST_SEQUENCES = 10
Table = dict[str, list[Any]]


def compare(
    rollout: Rollout,
    left: Scoring,
    right: Scoring,
    *,
    sampled_by_left: bool,
    seed: int = 0,
    headline_only: bool = False,
) -> Comparison:
    """Every metric of docs/metrics.md that the two scorings allow, with 95 % intervals by prompt.

    A metric is absent, never 0, where its data is missing (no entropy, no routing weights) or where
    it is undefined (the correlation of constants).

    Args:
        left: the rollout side; ``delta = right - left``.
        sampled_by_left: what :func:`is_sampling_law` says of ``left``.
        seed: of the bootstrap.
        headline_only: just ``NOISE_METRICS``, and no breakdowns.

    Raises:
        EmptyComparison: no action token.
        MismatchError: other token ids, non-finite logprobs, or routing that cannot be compared.
        CorruptCapture: routed experts that cannot be true.
    """
    pair = Pair.of(rollout, left, right)
    estimator = Estimator(pair.sequence, pair.prompt, seed=seed)
    routes = paired_routing(rollout, left, right)
    token_metrics = [metric for metric in METRICS.values() if not is_routing(metric)]
    routing_metrics = [metric for metric in METRICS.values() if is_routing(metric)]
    if headline_only:
        token_metrics = [metric for metric in token_metrics if metric.name in NOISE_METRICS]
        routing_metrics = [metric for metric in routing_metrics if metric.name in NOISE_METRICS]
    return Comparison(
        rollout=left.name,
        train=right.name,
        sampled_by_left=sampled_by_left,
        metrics=estimator.all(token_metrics, inputs(pair, left, right)),
        routing=estimator.all(routing_metrics, routes.arrays) if routes else {},
        breakdowns={} if headline_only else breakdowns(rollout, pair, routes, estimator),
    )


def is_routing(metric: Metric) -> bool:
    """Whether a metric is about experts: those have a table of their own."""
    return metric.name.startswith(("routing_", "experts_"))


def is_sampling_law(rollout: Rollout, scoring: Scoring) -> bool:
    """Whether a scoring holds the logprobs of the law that sampled the rollout's tokens.

    It does if it was taken while decoding, by the engine that sampled, at the temperature in force,
    and renormalised over the kept tokens where top-p or top-k cut the tail. Greedy sampling (T = 0)
    is no law with a density: never.
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
    )


def flips_per_token(rollout: Rollout, left: Scoring, right: Scoring) -> Ints:
    """Number of MoE layers whose set of experts differs, per action token, [A] int64.

    Raises:
        MismatchError: a side without routing, or no common layer.
        CorruptCapture: routed experts that cannot be true.
    """
    routes = paired_routing(rollout, left, right)
    if routes is None:
        silent = left.name if left.routing is None else right.name
        raise MismatchError(
            f"{silent} holds no routed experts", "score with routing on: drop --no-routing"
        )
    return routes.flips


def paired_routing(rollout: Rollout, left: Scoring, right: Scoring) -> PairedRouting | None:
    """Validated routing of both sides on their common layers; None where a side has none."""
    if left.routing is None or right.routing is None:
        return None
    left.routing.validate(rollout, left.name)
    right.routing.validate(rollout, right.name)
    return pair_routing(rollout, left.routing, right.routing)


def inputs(pair: Pair, left: Scoring, right: Scoring) -> dict[str, Array]:
    """The arrays that metrics ask for by name, those of them that were measured."""
    arrays: dict[str, Array] = {
        "rollout": pair.rollout,
        "train": pair.train,
        "delta": pair.delta,
        "sequence": pair.sequence,
    }
    if right.entropy is not None:
        finite = np.isfinite(right.entropy)
        if not finite.all():
            raise MismatchError(
                f"{right.name}: {int((~finite).sum())} entropies are not finite",
                "look for overflow (fp16) in the logits",
            )
        arrays["train_entropy"] = right.entropy.astype(np.float64)
    if left.top1 is not None and right.top1 is not None:
        arrays["rollout_top1"], arrays["train_top1"] = left.top1, right.top1
    return arrays


def breakdowns(
    rollout: Rollout, pair: Pair, routes: PairedRouting | None, estimator: Estimator
) -> dict[str, Table]:
    """Where the mismatch lies, as columns of equal length; buckets without tokens are left out."""
    size = np.abs(pair.delta)
    tables = {
        "by_position": by_position(rollout, pair, size, routes),
        "by_probability": by_probability(pair, size),
        "worst_sequences": worst_sequences(pair),
    }
    if routes is not None:
        tables["routing_by_layer"] = routing_by_layer(routes, estimator)
        tables["routing_harm"] = routing_harm(routes, size)
    return tables


def by_position(rollout: Rollout, pair: Pair, size: Floats, routes: PairedRouting | None) -> Table:
    """Mean |delta| by position among the sequence's action tokens, in at most 32 equal buckets."""
    # Action tokens lie in order of sequence, so a token's rank is its distance from the first.
    first = np.searchsorted(pair.sequence, pair.sequence)
    position = np.arange(len(size)) - first
    width = 1
    while position.max() // width >= POSITION_BUCKETS:
        width *= 2  # powers of two: block and window boundaries stay bucket boundaries
    present, table = _bucketed(position // width, size)
    table = {
        "start": [int(bucket) * width for bucket in present],
        "end": [(int(bucket) + 1) * width for bucket in present],
    } | table
    if routes is not None:
        share = (routes.arrays["overlap"] < 1.0).mean(axis=1)
        table["routing_disagree"] = _bucketed(position // width, share)[1]["mean_abs_delta"]
    return table


def by_probability(pair: Pair, size: Floats) -> Table:
    """Mean |delta| by the probability that the rollout side gave: it rises as p falls."""
    edges = np.array(PROBABILITY_EDGES)
    bucket = np.clip(np.searchsorted(edges, np.exp(pair.rollout), "right") - 1, 0, len(edges) - 2)
    present, table = _bucketed(bucket, size)
    return {
        "low": [float(edges[i]) for i in present],
        "high": [float(edges[i + 1]) for i in present],
    } | table


def worst_sequences(pair: Pair) -> Table:
    """The sequences of largest |sum of delta|: where a sequence weight would break first."""
    total = np.bincount(pair.sequence, weights=pair.delta)
    tokens = np.bincount(pair.sequence)
    worst = [int(n) for n in np.argsort(-np.abs(total), kind="stable") if tokens[n]]
    worst = worst[:WORST_SEQUENCES]
    return {
        "sequence": worst,
        "prompt": [int(pair.prompt[n]) for n in worst],
        "seq_logratio": [float(total[n]) for n in worst],
        "tokens": [int(tokens[n]) for n in worst],
    }


def routing_by_layer(routes: PairedRouting, estimator: Estimator) -> Table:
    """Disagreement of each MoE layer with its interval; margin (None where not captured); load."""
    overlap, margin = routes.arrays["overlap"], routes.arrays.get("margin")
    table: Table = {"layer": list(routes.layers), "disagree": [], "low": [], "high": []}
    for column in range(len(routes.layers)):
        one = estimator.one(routing_disagree_layer, {"overlap": overlap[:, [column]]})
        assert one is not None
        for name, value in (("disagree", one.value), ("low", one.low), ("high", one.high)):
            table[name].append(value)
    means = [None] * len(routes.layers) if margin is None else margin.mean(axis=0).tolist()
    load = load_variation(routes.arrays["rollout_ids"], routes.arrays["train_ids"])
    return table | {"margin": means, "load_tv": load.tolist()}


def routing_harm(routes: PairedRouting, size: Floats) -> Table:
    """Mean |delta| of tokens with 0, 1 and 2 or more layers whose experts differ."""
    present, table = _bucketed(np.minimum(routes.flips, MOST_FLIPS), size)
    label = [str(flips) if flips < MOST_FLIPS else f"{flips}+" for flips in present]
    return {"flips": label} | table


def _bucketed(bucket: Ints, values: Floats) -> tuple[Ints, Table]:
    """Buckets that hold tokens, in order, with mean and count of each."""
    present, code, count = np.unique(bucket, return_inverse=True, return_counts=True)
    mean = np.bincount(code, weights=values) / count
    return present, {"mean_abs_delta": mean.tolist(), "count": count.tolist()}
