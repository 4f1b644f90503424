"""What there is to say about a metric, gathered from its declaration: for help and `--explain`."""

from __future__ import annotations

import math

from mismatch.metrics import framework_names
from mismatch.metrics.registry import Metric

ARRAYS = {
    "rollout": "[A] float: log-probability of each action token on the rollout side, nats",
    "train": "[A] float: the same on the train side, nats",
    "delta": "[A] float: train - rollout, nats",
    "sequence": "[A] int: sequence of each action token",
    "train_entropy": "[A] float: entropy of the train side at each action token, nats",
    "rollout_top1": "[A] int: most likely token on the rollout side",
    "train_top1": "[A] int: most likely token on the train side",
    "overlap": "[A, L] float: |A ∩ B| / K of the experts chosen, per action token and MoE layer",
    "margin": "[A, L] float: K-th minus (K+1)-th selection score, train side",
    "reordered": "[A, L] bool: the same set of experts in another slot order",
    "exact_kl": "[M] float: KL over the whole vocabulary at each sampled position, nats",
    "exact_kl_topk": "[M] float: the same over the likeliest ids and all others as one",
    "exact_argmax_agree": "[M] bool: the same most likely token on both sides",
    "delta_at_exact": "[M] float: train - rollout at the positions of the exact KL, nats",
    "exact_surplus": "[M] float: log(p/q) of the sampled token minus its expectation, nats",
    "exact_variance": "[M] float: variance of log(p/q) under the rollout side, nats²",
    "rollout_ids": "[A, L, K] int: experts chosen on the rollout side",
    "train_ids": "[A, L, K] int: experts chosen on the train side",
    "rollout_top_expert": "[A, L] int: heaviest expert on the rollout side",
    "train_top_expert": "[A, L] int: heaviest expert on the train side",
}
SCHULMAN = "J. Schulman, Approximating KL divergence (2020), joschu.net/blog/kl-approx.html"
SOURCES = {"kl": SCHULMAN, "k2_kl": SCHULMAN, "k3_kl": SCHULMAN}
DIRECTIONS = {
    "low": "low is agreement",
    "high": "high is agreement",
    "neither": "neither is agreement as such: no level can be set on it",
}
INTERVALS = {
    "mean": "95 %, resampling whole prompts (bootstrap-t; percentiles from 256 prompts on)",
    "quantile": "95 %, Woodruff's method, clustered by prompt",
    "extreme": "none: a maximum, a minimum or a count",
}
INTERVALS["ratio"] = INTERVALS["mean"]


def formula(metric: Metric) -> str:
    """The first paragraph of the definition, on one line."""
    return " ".join(metric.definition.strip().split("\n\n")[0].split())


def interval(metric: Metric) -> str:
    """How its interval is made."""
    rare = metric.kind == "mean" and metric.unit == "share"
    return INTERVALS[metric.kind] + ("; Wilson's where few prompts show it" if rare else "")


def values(metric: Metric) -> str:
    """The range that it can have.

    >>> from mismatch.metrics import METRICS
    >>> values(METRICS["k3_kl"]), values(METRICS["probs_pearson"]), values(METRICS["kl"])
    ('0 and above', '-1 to 1', 'any')
    """
    low, high = metric.bounds
    if math.isfinite(low) and math.isfinite(high):
        return f"{low:g} to {high:g}"
    return f"{low:g} and above" if math.isfinite(low) else "any"


def source(metric: Metric) -> str:
    """Where the formula comes from."""
    same = [alias.source for alias in framework_names.of(metric.name) if alias.value is None]
    return SOURCES.get(metric.name) or (same[0] if same else "defined by mismatch")


def elsewhere(metric: Metric) -> list[str]:
    """Its names in other frameworks, each with how theirs differs."""
    return [
        f"{alias.label}: {alias.remark(metric.reduction) or 'the same'}"
        for alias in framework_names.of(metric.name)
    ]


def arrays(metric: Metric) -> list[tuple[str, str]]:
    """The arrays that it takes, in order, with shape, dtype and unit."""
    return [(name, ARRAYS.get(name, "see docs/metrics.md")) for name in metric.needs]


def docstring(metric: Metric) -> str:
    """What help() shows of the metric as a function on plain arrays."""
    per = "action tokens" if metric.reduction == "token" else "sequences"
    parts = [
        formula(metric),
        "\n".join(["Args:", *(f"    {name}: {what}." for name, what in arrays(metric))]),
        f"Returns:\n    float, unit: {metric.unit}; over {per}; {values(metric)}; "
        f"{DIRECTIONS[metric.good]}.",
        "Raises:\n    EmptyComparison: no action token.\n"
        "    MismatchError: arrays of different lengths, inputs that are not finite, or an "
        "undefined value.",
        f"Interval: {interval(metric)}.",
        f"Source: {source(metric)}.",
        "\n".join(
            ["Elsewhere:", *(f"    {line}" for line in elsewhere(metric) or ["no alias known"])]
        ),
    ]
    return "\n\n".join(parts)
