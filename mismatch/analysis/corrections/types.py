"""What a preview of corrections says; plain data."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch.analysis.corrections.recipes import Recipe
from mismatch.metrics.corrections import Level, Settings
from mismatch.types import Estimate


@dataclass(frozen=True, slots=True)
class Against:
    """A correction's weights w beside those of an exact correction, the target.

    Attributes:
        bias: mean of w - target over the tokens: what is left of the bias of the mean weight.
        distance: mean of |w - target|, tokens weighted by |A| where advantages are known: the most
            by which the weighted mean of a signal between -1 and 1 can be off.
        error: sqrt(distance² + mean w² / sequences of a batch): that and the sampling noise.
        rank: by ``error``; 1 is best. None for the override, which is not ranked.
        tied: as good as rank 1: its error is within 1 % of that, or cannot be told from it (the
            paired interval contains 0).
        cosine: between the vectors w A and target A. None without advantages.
        norm_ratio: length of w A over that of target A. None without advantages.
    """

    bias: Estimate
    distance: Estimate
    error: float
    rank: int | None
    tied: bool
    cosine: Estimate | None
    norm_ratio: Estimate | None


@dataclass(frozen=True, slots=True)
class Preview:
    """One correction on these rollouts.

    Attributes:
        kept_tokens, kept_sequences: shares; a sequence counts while it has a token left.
        ess: effective share of tokens (of sequences, where those share a weight); None where
            nothing is kept.
        weight_mean, weight_std, weight_max: over all tokens, dropped ones as 0.
        same_as: the correction listed before it that gives every token the same weight here.
        token, sequence: beside the token ratio and beside the sequence ratio; None where no side
            is the law that sampled.
    """

    id: str
    label: str
    level: Level
    setting: str
    kept_tokens: float
    kept_sequences: float
    ess: Estimate | None
    weight_mean: float
    weight_std: float
    weight_max: float
    same_as: str | None
    token: Against | None
    sequence: Against | None

    def against(self, target: Level) -> Against | None:
        """Its figures beside the token ratio or the sequence ratio."""
        return self.token if target == "token" else self.sequence


@dataclass(frozen=True, slots=True)
class Corrections:
    """Every correction on one comparison, with the one that the data favour.

    Attributes:
        target: the ratio that ``favoured`` and ``best`` were chosen by.
        batch: sequences of a batch, for the sampling noise 1 / sqrt(batch).
        favoured: id; "none" where the mismatch stays within the noise or nothing helps; None where
            no ranking has a meaning, or one prompt leaves it undecided.
        best: the best real correction, for those who want one anyway; None without a ranking.
        reason: why, in one sentence.
        clamped: tokens and sequences whose log-ratio was clamped to ±20.
        heavy_tail: few tokens carry the ratios.
        not_tested: what could not be said, and why.
        recipes: how each framework switches ``best`` on; empty without a ranking.
    """

    rollout: str
    train: str
    target: Level
    batch: int
    settings: Settings
    previews: tuple[Preview, ...]
    favoured: str | None
    best: str | None
    reason: str
    clamped: int
    heavy_tail: bool
    not_tested: tuple[str, ...]
    recipes: tuple[Recipe, ...] = ()

    def named(self, id: str) -> Preview:
        """The preview of one correction."""
        return next(preview for preview in self.previews if preview.id == id)
