"""What a preview of corrections gives: one row a correction, and the one that the data favour."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch.frameworks import Recipe
from mismatch.metrics.importance_weights import Level, Settings
from mismatch.types import Estimate


@dataclass(frozen=True, slots=True)
class Against:
    """A correction's weights w next to the token ratio, the weights of an exact correction."""

    bias: Estimate
    """Mean of w - ratio over the tokens: what is left of the bias of the mean weight."""
    distance: Estimate
    """Mean of |w - ratio|, tokens weighted by |A| where advantages are known: the most by which the
    weighted mean of a signal between -1 and 1 can be off."""
    error: float
    """sqrt(distance² + mean w² / sequences of a batch): that and the sampling noise."""
    rank: int | None
    """By ``error``; 1 is best. None for the override, which is not ranked."""
    tied: bool
    """As good as rank 1: its error is within 1 % of that, or the paired interval contains 0."""


@dataclass(frozen=True, slots=True)
class Preview:
    """One correction on these rollouts."""

    id: str
    label: str
    level: Level
    setting: str
    kept_tokens: float
    """Share of the tokens whose weight is not 0."""
    kept_sequences: float
    """Share of the sequences with a token left."""
    ess: Estimate | None
    """Effective share of tokens (of sequences, where those share a weight); None: none is kept."""
    weight_mean: float
    """Over all tokens, a dropped token as 0; the two below likewise."""
    weight_std: float
    weight_max: float
    same_as: str | None
    """The correction listed before it that gives every token the same weight here."""
    token: Against | None
    """Against the token ratio; None where neither side is the distribution that sampled."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """Every correction on one comparison, with the one that the data favour."""

    rollout: str
    train: str
    batch: int
    """Sequences of a batch, for the sampling noise 1 / sqrt(batch)."""
    settings: Settings
    previews: tuple[Preview, ...]
    favoured: str | None
    """Its id; "none" where the mismatch stays within the noise or nothing helps; None where no
    ranking has a meaning, or one prompt leaves it undecided."""
    best: str | None
    """The best real correction, for those who want one anyway; None without a ranking."""
    reason: str
    """Why, in one sentence."""
    clamped: int
    """Tokens and sequences whose log-ratio was clamped to ±20."""
    heavy_tail: bool
    """Few tokens carry the ratios."""
    not_tested: tuple[str, ...]
    """What could not be said, and why."""
    recipes: tuple[Recipe, ...] = ()
    """How each framework switches ``best`` on; empty without a ranking."""

    def named(self, id: str) -> Preview:
        """Return the preview of one correction."""
        return next(preview for preview in self.previews if preview.id == id)
