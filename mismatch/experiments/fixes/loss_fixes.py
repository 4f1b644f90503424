"""Fixes of the estimator: weights in the loss. No log-probability changes, so none is ranked."""

from __future__ import annotations

from mismatch.experiments.fixes.base import Fix
from mismatch.metrics.corrections import OVERRIDE

UNMOVED = "delta stays as it is; gradients are reweighted"


def _fix(id: str, summary: str, cost: str, corrects: str, hides: bool = False) -> Fix:
    effect = "hides the mismatch: the ratio is 1 by construction" if hides else UNMOVED
    return Fix(id, "estimator", summary, effect, cost, corrects=corrects, hides=hides)


ESTIMATOR_FIXES = (
    _fix(
        "on-policy-ratio",
        "the trainer's own logprobs stand in for the engine's in the ratio",
        "whatever bias the mismatch brings stays, unseen",
        OVERRIDE,
        hides=True,
    ),
    _fix("tis", "token ratios as weights, truncated above", "bias of the cut", "tis-token"),
    _fix(
        "seq-tis", "sequence ratios as weights, truncated above", "variance grows with length",
        "tis-sequence",
    ),
    _fix("icepop", "tokens whose ratio leaves a band are dropped", "dropped tokens", "icepop"),
    _fix("mis", "tokens whose ratio is too large are dropped", "dropped tokens", "mis-token"),
    _fix(
        "geo-rs", "sequences whose geometric mean ratio leaves a band are dropped",
        "dropped sequences", "geometric",
    ),
    _fix("veto", "sequences with one tiny token ratio are dropped", "dropped sequences", "veto"),
)  # fmt: skip
