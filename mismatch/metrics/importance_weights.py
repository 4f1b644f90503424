"""Importance weights that frameworks put on the policy gradient, and GRPO advantages. Pure numpy.

rho_t = exp(delta_t) is the ratio of a token, exp(sum of delta) that of its sequence. A correction
turns them into a weight per token; 0 drops the token. It changes no delta and fixes no mismatch.
Definitions: docs/explain/corrections.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.registry import floats
from mismatch.metrics.token import CLAMP
from mismatch.types import Bools, Floats, Ints

Level = Literal["token", "sequence"]
Band = tuple[float, float]
ADVANTAGE_EPSILON = 1e-6  # verl's; TRL has 1e-4
KL_EPSILON = 1e-8  # verl's and SkyRL's


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds of every correction; the defaults are those of the frameworks.

    >>> Settings(cap=5.0).cap
    5.0

    Attributes:
        cap: C of truncated importance sampling: larger weights are cut to it.
        mask_cap: C of masked importance sampling: larger weights become 0.
        band: ratios that IcePop keeps.
        geometric: geometric mean ratios of the sequences that are kept.
        veto: a sequence with any token ratio below is dropped.
        sequence_cap: TRL's ``sequence_mask``: sequences of larger ratio are dropped.
        cis_lambda: lambda of CIS: the log-odds may rise by log(1 + lambda).
        cis_kappa: kappa of CIS: 1 - p is taken as at least this.
        ipo: largest difference of probabilities, either way, of a token that IPO keeps.
        dppo_tv: the same of DPPO, in the direction of the advantage alone.
        dppo_kl: largest binary KL, in nats, of a token that DPPO keeps.
        gspo: GSPO's clip range of the geometric mean ratio.
        m2po: largest mean of squared log-ratios that M2PO leaves.

    Raises:
        MismatchError: bounds that are not finite and positive, or that drop a ratio of 1.
    """

    cap: float = 2.0
    mask_cap: float = 2.0
    band: Band = (0.5, 5.0)
    geometric: Band = (0.999, 1.001)
    veto: float = 1e-4
    sequence_cap: float = 3.0
    cis_lambda: float = 2.3
    cis_kappa: float = 5e-3
    ipo: float = 0.3
    dppo_tv: float = 0.2
    dppo_kl: float = 0.05
    gspo: Band = (0.9997, 1.0004)
    m2po: float = 0.04

    def __post_init__(self) -> None:
        bands = {
            "cap": (0.0, self.cap),
            "mask cap": (0.0, self.mask_cap),
            "sequence mask cap": (0.0, self.sequence_cap),
            "veto": (self.veto, 1.0),
            "IcePop band": self.band,
            "geometric band": self.geometric,
            "CIS cap": (0.0, 1.0 + self.cis_lambda),
            "CIS kappa": (self.cis_kappa, 1.0),
            "GSPO band": self.gspo,
        }
        for name, (low, high) in bands.items():
            if not 0.0 <= low <= 1.0 <= high < np.inf or low == high:
                raise MismatchError(
                    f"corrections: the {name} of {low:g} to {high:g} does not lie around 1",
                    "bounds are ratios: 1 is a token that both sides agree on, and must be kept",
                )
        for name in ("ipo", "dppo_tv", "dppo_kl", "m2po"):
            if not 0.0 < getattr(self, name) < np.inf:
                raise MismatchError(
                    f"corrections: the bound {name} is {getattr(self, name):g}",
                    "it is a distance: finite, and over 0",
                )


@dataclass(frozen=True, slots=True)
class Ratios:
    """Importance ratios of a rollout; log-ratios are clamped to ±20, as verl does.

    Attributes:
        code: [A] position of each token's sequence among those present, 0 … N - 1.
        token: [A] exp(delta).
        sequence: [N] exp(sum of delta).
        geometric: [N] exp(mean delta).
        least: [N] smallest token ratio.
        train: [A] the trainer's probability of each token.
        engine: [A] the engine's.
        advantage: [A] of each token's sequence; None where it is not known.
        clamped: number of tokens and sequences whose log-ratio was clamped.
    """

    code: Ints
    token: Floats
    sequence: Floats
    geometric: Floats
    least: Floats
    train: Floats
    engine: Floats
    advantage: Floats | None
    clamped: int

    @classmethod
    def of(
        cls, delta: Floats, sequence: Ints, train: Floats, advantage: Floats | None = None
    ) -> Ratios:
        """Build from delta [A], each token's sequence [A] and the trainer's log-probability [A].

        Args:
            advantage: [A] of each token's sequence; None where it is not known.

        Raises:
            EmptyComparison: no token.
        """
        if len(delta) == 0:
            raise EmptyComparison("corrections: no action tokens to weigh")
        _, code, count = np.unique(sequence, return_inverse=True, return_counts=True)
        total = floats(np.bincount(code, weights=delta))
        least = np.full(len(count), np.inf)
        np.minimum.at(least, code, delta)
        return cls(
            code=code.astype(np.int64),
            token=_exp(delta),
            sequence=_exp(total),
            geometric=_exp(total / count),
            least=_exp(least),
            train=floats(np.exp(np.minimum(train, 0.0))),
            engine=floats(np.exp(np.minimum(train - delta, 0.0))),
            advantage=advantage,
            clamped=int((np.abs(delta) > CLAMP).sum() + (np.abs(total) > CLAMP).sum()),
        )


def _exp(log_ratio: Floats) -> Floats:
    return floats(np.exp(np.clip(log_ratio, -CLAMP, CLAMP)))


Rule = Callable[[Ratios, Settings], Floats]


@dataclass(frozen=True, slots=True)
class Correction:
    """One estimator-side correction.

    Attributes:
        level: "sequence" where all tokens of a sequence share one weight.
        weights: ratios, settings -> [A] weights; 0 where the token is dropped.
        setting: settings -> its bounds in words.
        ranked: False for what is shown but never recommended.
    """

    id: str
    label: str
    level: Level
    weights: Rule
    setting: Callable[[Settings], str]
    ranked: bool = True


def _inside(values: Floats, band: Band) -> Floats:
    return floats((values >= band[0]) & (values <= band[1]))


def _masked_sequence(r: Ratios, cap: float) -> Floats:
    return np.where(r.sequence <= cap, r.sequence, 0.0)[r.code]


def _calibrated(r: Ratios, s: Settings) -> Floats:
    """CIS: log-odds may rise by log(1 + lambda), a cap that is tighter for confident tokens.

    min(k, 1 + lambda max(1 - p, kappa)) with k = p / q: Yu et al., arXiv 2609.32444, algorithm 1.
    """
    return np.minimum(r.token, 1.0 + s.cis_lambda * np.maximum(1.0 - r.train, s.cis_kappa))


def _geometric(r: Ratios, s: Settings) -> Floats:
    return _inside(r.geometric, s.geometric)[r.code]


def _within(r: Ratios, beyond: tuple[Bools, Bools]) -> Bools:
    """Return the tokens that the update does not push further out, [A].

    Args:
        beyond: [A] tokens over the upper bound, which a positive advantage pushes on, and [A] those
            under the lower bound. Without advantages both are dropped.
    """
    above, below = beyond
    if r.advantage is None:
        return ~(above | below)
    return ~((above & (r.advantage > 0.0)) | (below & (r.advantage < 0.0)))


def _ipo(r: Ratios, s: Settings) -> Floats:
    """IPO: ``ipo`` in prime-rl, src/prime_rl/trainer/rl/loss.py."""
    return r.token * (np.abs(r.train - r.engine) <= s.ipo)


def _dppo_tv(r: Ratios, s: Settings) -> Floats:
    """DPPO with the total variation of a token against all others: arXiv 2602.04879, eq. 13."""
    moved = r.train - r.engine
    return r.token * _within(r, (moved > s.dppo_tv, moved < -s.dppo_tv))


def _dppo_kl(r: Ratios, s: Settings) -> Floats:
    """DPPO with the KL of a token against all others: arXiv 2602.04879, eq. 14.

    q log(q / p) + (1 - q) log((1 - q) / (1 - p)), 1e-8 added to the last two as verl does.
    """
    p, q = r.train, r.engine
    others = np.log((1.0 - q + KL_EPSILON) / (1.0 - p + KL_EPSILON))
    far = (1.0 - q) * others - q * np.log(r.token) > s.dppo_kl
    return r.token * _within(r, (far & (p > q), far & (p < q)))


def _gspo(r: Ratios, s: Settings) -> Floats:
    """GSPO: the geometric mean ratio, and no gradient where PPO's clip takes it.

    Zheng et al., arXiv 2507.18071, eq. 5 to 7.
    """
    low, high = s.gspo
    ratio = r.geometric[r.code]
    return ratio * _within(r, (ratio > high, ratio < low))


def _m2po(r: Ratios, s: Settings) -> Floats:
    """M2PO: the largest squared log-ratios are dropped until the mean of the rest is small enough.

    Zheng et al., arXiv 2510.01161; over all tokens here, over a mini-batch in AReaL.
    """
    squared = np.log(r.token) ** 2
    order = np.argsort(squared, kind="stable")
    means = np.cumsum(squared[order]) / np.arange(1, len(order) + 1)  # of the k smallest: rising
    kept = np.zeros(len(order))
    kept[order[: np.searchsorted(means, s.m2po, side="right")]] = 1.0
    return r.token * kept


NONE, OVERRIDE = "none", "override"
# In the order of interference: where weights are equal on a run, the first is named.
CORRECTIONS: tuple[Correction, ...] = (
    Correction(NONE, "no correction", "token", lambda r, s: np.ones_like(r.token), lambda s: ""),
    Correction(
        "tis-token",
        "TIS, token",
        "token",
        lambda r, s: np.minimum(r.token, s.cap),
        lambda s: f"weight min(ratio, {s.cap:g})",
    ),
    Correction(
        "icepop",
        "IcePop",
        "token",
        lambda r, s: r.token * _inside(r.token, s.band),
        lambda s: f"tokens with ratio in {s.band[0]:g} … {s.band[1]:g}, weight ratio",
    ),
    Correction(
        "mis-token",
        "MIS, token",
        "token",
        lambda r, s: np.where(r.token <= s.mask_cap, r.token, 0.0),
        lambda s: f"tokens with ratio up to {s.mask_cap:g}, weight ratio",
    ),
    Correction(
        "ipo",
        "IPO",
        "token",
        _ipo,
        lambda s: f"tokens with |p - q| up to {s.ipo:g}, weight ratio",
    ),
    Correction(
        "dppo-tv",
        "DPPO, TV",
        "token",
        _dppo_tv,
        lambda s: f"tokens not pushed on from |p - q| over {s.dppo_tv:g}, weight ratio",
    ),
    Correction(
        "dppo-kl",
        "DPPO, KL",
        "token",
        _dppo_kl,
        lambda s: f"tokens not pushed on from a binary KL over {s.dppo_kl:g}, weight ratio",
    ),
    Correction(
        "m2po",
        "M2PO",
        "token",
        _m2po,
        lambda s: f"tokens of the least squared log-ratio, to a mean of {s.m2po:g}, weight ratio",
    ),
    Correction(
        "tis-sequence",
        "TIS, sequence",
        "sequence",
        lambda r, s: np.minimum(r.sequence, s.cap)[r.code],
        lambda s: f"weight min(sequence ratio, {s.cap:g})",
    ),
    Correction(
        "mis-sequence",
        "MIS, sequence",
        "sequence",
        lambda r, s: _masked_sequence(r, s.mask_cap),
        lambda s: f"sequences with ratio up to {s.mask_cap:g}, weight sequence ratio",
    ),
    Correction(
        "trl-sequence-mask",
        "TRL sequence_mask",
        "sequence",
        lambda r, s: _masked_sequence(r, s.sequence_cap),
        lambda s: f"sequences with ratio up to {s.sequence_cap:g}, weight sequence ratio",
    ),
    Correction(
        "gspo",
        "GSPO",
        "sequence",
        _gspo,
        lambda s: (
            f"sequences not pushed out of a geometric mean ratio of {s.gspo[0]:g} … "
            f"{s.gspo[1]:g}, weight that ratio"
        ),
    ),
    Correction(
        "geometric",
        "geometric rejection",
        "sequence",
        _geometric,
        lambda s: (
            f"sequences of geometric mean ratio {s.geometric[0]:g} … {s.geometric[1]:g}, weight 1"
        ),
    ),
    Correction(
        "geometric-token",
        "geometric + ratio",
        "token",
        lambda r, s: r.token * _geometric(r, s),
        lambda s: (
            f"sequences of geometric mean ratio {s.geometric[0]:g} … {s.geometric[1]:g}, "
            "weight token ratio"
        ),
    ),
    Correction(
        "veto",
        "veto",
        "sequence",
        lambda r, s: floats(r.least >= s.veto)[r.code],
        lambda s: f"sequences without a token ratio under {s.veto:g}, weight 1",
    ),
    Correction(
        "cis",
        "CIS",
        "token",
        _calibrated,
        lambda s: f"weight min(ratio, 1 + {s.cis_lambda:g} max(1 - p, {s.cis_kappa:g}))",
    ),
    Correction(
        OVERRIDE,
        "on-policy override",
        "token",
        lambda r, s: np.ones_like(r.token),
        lambda s: "PPO ratio set to 1",
        ranked=False,
    ),
)
BY_ID = {correction.id: correction for correction in CORRECTIONS}


def group_advantages(rewards: Floats, prompt: Ints) -> Floats:
    """GRPO's advantage of every sequence: (r - mean) / (std + 1e-6) within its prompt, [N].

    The standard deviation divides by n - 1, as verl's and TRL's does. 0 where there is nothing to
    compare with: equal rewards, one sample, or no reward (NaN).

    Args:
        rewards: [N], NaN where a sequence has none.
        prompt: [N] prompt of each sequence.
    """
    rated = np.isfinite(rewards)
    advantages = np.zeros(len(rewards))
    if not rated.any():
        return advantages
    groups, code, count = np.unique(prompt[rated], return_inverse=True, return_counts=True)
    values = rewards[rated].astype(np.float64)
    away = values - (np.bincount(code, weights=values) / count)[code]
    spread = np.sqrt(np.bincount(code, weights=away**2) / np.maximum(count - 1, 1))
    highest, lowest = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
    np.maximum.at(highest, code, values)
    np.minimum.at(lowest, code, values)
    differs = highest > lowest  # rounding of a mean must not make an advantage
    advantages[rated] = np.where(differs[code], away / (spread[code] + ADVANTAGE_EPSILON), 0.0)
    return advantages
