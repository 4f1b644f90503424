"""The settings that switch a correction on, framework by framework.

Keys and meanings are read from each framework's own source, in the version that :data:`SOURCES`
names. A framework that has no such correction says so: a near miss is not offered as the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mismatch.frameworks import FRAMEWORKS as KNOWN
from mismatch.metrics.importance_weights import Level, Settings
from mismatch.types import Estimate


@dataclass(frozen=True, slots=True)
class Against:
    """A correction's weights w beside the token ratio, the weights of an exact correction."""

    GONE = frozenset({"cosine", "norm_ratio"})  # see mismatch/codec.py

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

    GONE = frozenset({"sequence"})

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
    """Over all tokens, dropped ones as 0; the two below likewise."""
    weight_std: float
    weight_max: float
    same_as: str | None
    """The correction listed before it that gives every token the same weight here."""
    token: Against | None
    """Beside the token ratio; None where neither side is the distribution that sampled."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """Every correction on one comparison, with the one that the data favour."""

    GONE = frozenset({"target"})

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


SMALLEST = "1e-9"  # stands for "no lower bound" where a positive one is required
SOURCES = {
    "verl": f"{KNOWN['verl'].read_in}, verl/trainer/config/algorithm/rollout_correction.yaml",
    "TRL": f"{KNOWN['trl'].read_in}, trl/trainer/grpo_config.py",
    "NeMo-RL": f"{KNOWN['nemo-rl'].read_in}, nemo_rl/algorithms/loss/loss_functions.py",
    "prime-rl": f"{KNOWN['prime-rl'].read_in}, its trainer configuration and trainer/rl/loss.py",
    "AReaL": "kzhao5/CIS-RL (2026), README.md and areal_patch/cis_areal.patch",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to write into one framework's configuration.

    Attributes:
        lines: the setting, as lines of its file; empty where the framework lacks the correction.
        remark: what to know about it, or why there is none.
        source: what the keys were read from.
    """

    framework: str
    lines: tuple[str, ...]
    remark: str
    source: str


Lines = Callable[[Settings], list[str]]


def recipes(id: str, settings: Settings) -> tuple[Recipe, ...]:
    """One recipe per framework for a correction of :data:`CORRECTIONS` that is ranked.

    A framework that :data:`MISSING` does not name is only read for the corrections it has here.
    """
    return tuple(
        Recipe(name, tuple(lines(settings)) if lines else (), remark, SOURCES[name])
        for name, table in FRAMEWORKS.items()
        if id in table or name in MISSING
        for lines, remark in (table[id] if id in table else (None, MISSING[name]),)
    )


def _verl(**keys: str) -> list[str]:
    return ["algorithm:", "  rollout_correction:", *(f"    {k}: {v}" for k, v in keys.items())]


def _trl(mode: str, high: float, low: float | None = None) -> list[str]:
    return [
        "GRPOConfig(",
        "    use_vllm=True,",
        "    vllm_importance_sampling_correction=True,",
        f'    vllm_importance_sampling_mode="{mode}",',
        f"    vllm_importance_sampling_clip_max={high:g},",
        *([] if low is None else [f"    vllm_importance_sampling_clip_min={low:g},"]),
        ")",
    ]


def _nemo(kind: str, high: float, low: float | None = None, sequence: bool = False) -> list[str]:
    return [
        "loss_fn:",
        "  use_importance_sampling_correction: true",
        f"  truncated_importance_sampling_type: {kind}",
        f"  truncated_importance_sampling_ratio: {high:g}",
        *([] if low is None else [f"  truncated_importance_sampling_ratio_min: {low:g}"]),
        *(
            ["  sequence_level_importance_ratios: true", "  token_level_loss: false"]
            if sequence
            else []
        ),
    ]


def _prime(kind: str, low: str, high: float) -> list[str]:
    return ["[trainer.loss]", f'type = "{kind}"', f"ratio_low = {low}", f"ratio_high = {high:g}"]


def _areal(s: Settings) -> list[str]:
    return [
        "actor:",
        "  use_decoupled_loss: true",
        "  rejection_sampling:",
        "    level: token",
        "    action: cis",
        "    metric: ratio",
        f"    cis_lambda: {s.cis_lambda:g}",
        f"    cis_kappa: {s.cis_kappa:g}",
    ]


def _band(low: str | float, high: float) -> str:
    return f'"{low if isinstance(low, str) else format(low, "g")}_{high:g}"'


def _inverse(low: float, high: float) -> str:
    """verl's k1 bounds hold for rollout / train, the inverse of our ratio."""
    return f'"{1.0 / high:.6g}_{1.0 / low:.6g}"'


def _rejection(s: Settings) -> dict[str, str]:
    return {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": _inverse(*s.geometric)}


VERL_NEEDS = "actor_rollout_ref.rollout.calculate_log_probs stays true (the default)"
VERL_INVERSE = (
    "rollout_rs_threshold bounds rollout / train, the inverse of the ratio here; " + VERL_NEEDS
)
GSPO = (
    "sequence_level_importance_ratios also turns the PPO ratio into one per sequence (as in GSPO)"
)
PRIME_REPLACES = "the loss type replaces the default one (ipo), its probability mask included"
MISSING = {
    "verl": "not in this version",
    "TRL": "not in this version (off_policy_mask_threshold drops only sequences of negative "
    "advantage)",
    "NeMo-RL": "not in this version",
    "prime-rl": "not in this version: its losses weigh single tokens",
}

FRAMEWORKS: dict[str, dict[str, tuple[Lines, str]]] = {
    "verl": {
        "tis-token": (
            lambda s: _verl(rollout_is="token", rollout_is_threshold=f"{s.cap:g}"),
            VERL_NEEDS,
        ),
        "tis-sequence": (
            lambda s: _verl(rollout_is="sequence", rollout_is_threshold=f"{s.cap:g}"),
            VERL_NEEDS,
        ),
        "icepop": (
            lambda s: _verl(rollout_is="token", rollout_is_threshold=_band(*s.band)),
            VERL_NEEDS,
        ),
        "mis-token": (
            lambda s: _verl(rollout_is="token", rollout_is_threshold=_band(SMALLEST, s.mask_cap)),
            VERL_NEEDS,
        ),
        "mis-sequence": (
            lambda s: _verl(
                rollout_is="sequence", rollout_is_threshold=_band(SMALLEST, s.mask_cap)
            ),
            VERL_NEEDS,
        ),
        "trl-sequence-mask": (
            lambda s: _verl(
                rollout_is="sequence", rollout_is_threshold=_band(SMALLEST, s.sequence_cap)
            ),
            VERL_NEEDS,
        ),
        "geometric": (lambda s: _verl(rollout_is="null", **_rejection(s)), VERL_INVERSE),
        "geometric-token": (
            # verl cuts weights in any case: a cap that nothing reaches leaves them as they are
            lambda s: _verl(rollout_is="token", rollout_is_threshold="1e9", **_rejection(s)),
            VERL_INVERSE,
        ),
    },
    "TRL": {
        "tis-token": (lambda s: _trl("token_truncate", s.cap), ""),
        "tis-sequence": (lambda s: _trl("sequence_truncate", s.cap), ""),
        "icepop": (lambda s: _trl("token_mask", s.band[1], s.band[0]), ""),
        "mis-token": (lambda s: _trl("token_mask", s.mask_cap), ""),
        "mis-sequence": (lambda s: _trl("sequence_mask", s.mask_cap), ""),
        "trl-sequence-mask": (
            lambda s: _trl("sequence_mask", s.sequence_cap),
            "TRL's default mode, with a cap of 3",
        ),
    },
    "NeMo-RL": {
        "tis-token": (lambda s: _nemo("tis", s.cap), ""),
        "tis-sequence": (lambda s: _nemo("tis", s.cap, sequence=True), GSPO),
        "icepop": (lambda s: _nemo("icepop", s.band[1], s.band[0]), ""),
        "mis-token": (lambda s: _nemo("icepop", s.mask_cap, 0.0), ""),
        "mis-sequence": (lambda s: _nemo("icepop", s.mask_cap, 0.0, sequence=True), GSPO),
        "trl-sequence-mask": (
            lambda s: _nemo("icepop", s.sequence_cap, 0.0, sequence=True),
            GSPO,
        ),
        "geometric-token": (lambda s: _nemo("seq-mask-tis", s.geometric[1], s.geometric[0]), ""),
    },
    "prime-rl": {
        "tis-token": (lambda s: _prime("cispo", "0.0", s.cap), PRIME_REPLACES),
        "icepop": (lambda s: _prime("icepop", f"{s.band[0]:g}", s.band[1]), PRIME_REPLACES),
        "mis-token": (lambda s: _prime("icepop", SMALLEST, s.mask_cap), PRIME_REPLACES),
    },
    "AReaL": {"cis": (_areal, "with the patch that the authors of CIS give for AReaL")},
}
