"""Every reported number in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch.metrics import METRICS
from mismatch.types import SidePair


@dataclass(frozen=True, slots=True)
class MetricLabel:
    """How one metric is introduced to a stranger.

    Attributes:
        label: at most 24 characters, for tables.
        meaning: one sentence.
        share: whether the value is a share, written in percent.
    """

    label: str
    meaning: str
    share: bool = False


def metric_label(name: str, *, sampled_by_left: bool = True) -> MetricLabel:
    """Return the words of a metric; one that this page does not know keeps the metric's name.

    Where neither side sampled the tokens, the KL estimators estimate no KL and are called scores.
    """
    metric = METRICS.get(name)
    words = MetricLabel(name, "")
    if metric is not None:
        words = MetricLabel(metric.label, metric.meaning, share=metric.unit == "share")
    if sampled_by_left or "KL" not in words.label or name.startswith("exact_"):
        return words
    meaning = "the KL formula on tokens that neither side sampled: a score, no estimate of a KL"
    return MetricLabel(words.label.replace("KL", "divergence score"), meaning)


def noise_label(pair: SidePair) -> MetricLabel:
    """Return what a pair of the noise floor compares, from the scorings' names."""
    left, right = pair.left, pair.right
    kinds = {_kind(left), _kind(right)}
    if kinds == {"decode", "prefill"}:
        return MetricLabel(
            "engine: prefill / decode", "the engine reads back the tokens it sampled"
        )
    if "reference" in kinds and kinds & {"decode", "prefill"}:
        return MetricLabel("engine vs float32", "what the engine's precision and kernels cost")
    if "reference" in kinds:
        return MetricLabel("trainer vs float32", "what the trainer's precision and kernels cost")
    for kind, words in _TRAINER.items():
        if kind in kinds:
            return words
    return MetricLabel(f"{left} vs {right}", "two passes that should agree")


def _kind(scoring: str) -> str:
    name, _, variant = scoring.partition(":")
    return "reference" if name == "reference" else variant


_TRAINER = {
    "regrouped": MetricLabel("trainer: regrouped", "the same tokens in other micro-batches"),
    "grad": MetricLabel(
        "trainer: gradients on", "the training forward against the scoring forward"
    ),
    "alone": MetricLabel("trainer: alone", "one sequence per forward pass"),
    "repeated": MetricLabel("trainer: repeated", "the same pass once more"),
}
