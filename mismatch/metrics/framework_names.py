"""What other frameworks call the same numbers, and where theirs differ, as data.

Every alias says which version of which file was read, or that it is second-hand. If a framework's
number is another one (its reduction, its truncation, its sign), ``value`` computes theirs, so that
a dashboard and a report can be compared digit by digit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mismatch.metrics import framework_formulas as by
from mismatch.metrics.framework_formulas import Convention
from mismatch.metrics.frameworks import FRAMEWORKS

Reduction = Literal["token", "sequence", "sequence, by tokens", "sequence product"]
Sign = Literal["same", "opposite"]


@dataclass(frozen=True, slots=True)
class Alias:
    """One metric's name in one framework.

    >>> of("kl", "areal")[0].sign
    'opposite'

    Attributes:
        name: as the framework logs it.
        reduction: what a unit of its mean is; "sequence product": a sequence's ratio is the product
            of its tokens'; "sequence, by tokens": such a product, averaged over tokens.
        sign: "opposite" where it is minus ours.
        clipping: what it clamps, truncates or masks before it averages; "" where nothing.
        note: what else a reader must know, for instance the setting that switches it on.
        source: version or commit, and path, that was read.
        value: the number by the framework's convention; None where that is ours.
    """

    framework: str
    name: str
    reduction: Reduction
    sign: Sign
    clipping: str
    note: str
    source: str
    value: Convention | None = None

    @property
    def label(self) -> str:
        """Framework and name.

        >>> of("k2_kl"), of("k3_kl", "verl")[0].label
        ((), 'verl rollout_corr/k3_kl')
        """
        return f"{FRAMEWORKS[self.framework].title} {self.name}"

    def remark(self, reduction: str) -> str:
        """How it differs from ours, whose reduction is given; "" where it does not.

        >>> of("logprob_abs_diff_mean", "slime")[0].remark("token")
        'mean of per-sequence means; per token with calculate_per_token_loss'
        """
        parts = ["opposite sign"] if self.sign == "opposite" else []
        if self.reduction != reduction:
            parts.append(_REDUCTIONS[self.reduction])
        return "; ".join([*parts, *(part for part in (self.clipping, self.note) if part)])


_REDUCTIONS: dict[str, str] = {
    "token": "mean over tokens",
    "sequence": "mean of per-sequence means",
    "sequence, by tokens": "a sequence's product of ratios, averaged over tokens",
    "sequence product": "over sequences, each the product of its tokens' ratios",
}
_VERL = "verl 0.9.1, verl/trainer/ppo/rollout_corr_helper.py"
_VERL_DEBUG = "verl 0.9.1, verl/utils/debug/metrics.py"
_TRL = "TRL 1.16.0, trl/trainer/grpo_trainer.py"
_NEMO = "NVIDIA-NeMo/RL@006907a, nemo_rl/algorithms/loss/loss_functions.py"
_NEMO_SEQ = "NVIDIA-NeMo/RL@002cdc2, nemo_rl/algorithms/grpo.py"
_PRIME = "PrimeIntellect-ai/prime-rl@008468c, src/prime_rl/trainer/rl/loss.py"
_SLIME = "THUDM/slime@00c2d6d, slime/backends/megatron_utils/loss.py"
_MILES = "radixark/miles@1718d16, miles/backends/training_utils/loss/hub/losses.py"
_MILES_MIS = "radixark/miles@5bf12dd, examples/train_infer_mismatch_helper/mis.py"
_OPENRLHF = "richardodliu/OpenRLHF@4d2b9d2 (a fork), openrlhf/models/loss.py"
_SKYRL = "NovaSky-AI/SkyRL@00cb530, skyrl/train/trainer.py"
_AREAL = "areal-project/AReaL@2fd54e7, areal/utils/functional/functional.py"

_PRIME_TRAIN = "PrimeIntellect-ai/prime-rl@004274e, src/prime_rl/trainer/rl/train.py"

_PER_TOKEN = "per token with calculate_per_token_loss"
_CUT = "token weights cut at rollout_is_threshold (2)"
_IS_ON = "only with rollout_is=token"
_MASKED = "0 where it is above 3"
_TRL_MODE = "mode sequence_mask, the default"
_KL_TYPE = "its estimator follows reference_policy_kl_type: this is its k3"
_RANKS = "averaged over ranks, each rank counting once"

_KLD = "ggml-org/llama.cpp@050fc7f, tools/perplexity/perplexity.cpp"
_BETWEEN = "interpolates between neighbours"


def _kld(name: str, **more: object) -> Alias:
    return _alias("llama.cpp", name, "token", _KLD, **more)


def _verl(name: str, **more: object) -> Alias:
    return _alias("verl", f"rollout_corr/{name}", "token", _VERL, **more)


def _verl_seq(name: str) -> Alias:
    return _alias("verl", f"rollout_corr/{name}", "sequence", _VERL)


def _verl_debug(name: str, **more: object) -> Alias:
    return _alias("verl", f"training/{name}", "token", _VERL_DEBUG, **more)


def _nemo(name: str, **more: object) -> Alias:
    return _alias("nemo-rl", name, "token", _NEMO, **more)


def _nemo_seq(name: str) -> Alias:
    return _alias("nemo-rl", name, "sequence", _NEMO_SEQ)


def _trl(name: str, reduction: Reduction = "token", **more: object) -> Alias:
    return _alias("trl", f"sampling/{name}", reduction, _TRL, **more)


def _slime(name: str, value: Convention, note: str = _PER_TOKEN) -> Alias:
    return _alias("slime", name, "sequence", _SLIME, note=note, value=value)


def _miles(name: str, source: str = _MILES, **more: object) -> Alias:
    return _alias("miles", name, "sequence", source, **({"note": _PER_TOKEN} | more))


def _alias(framework: str, name: str, reduction: Reduction, source: str, **more: object) -> Alias:
    plain = Alias(framework, name, reduction, "same", "", "", source)
    return replace(plain, **more)  # type: ignore[arg-type]


def _trl_ratio(name: str, value: Convention) -> Alias:
    return _trl(
        f"importance_sampling_ratio/{name}",
        "sequence product",
        clipping=_MASKED,
        note=_TRL_MODE,
        value=value,
    )


ALIASES: dict[str, tuple[Alias, ...]] = {
    "kl": (
        _verl("kl"),
        _alias(
            "openrlhf",
            "vllm_kl",
            "token",
            _OPENRLHF,
            note="only with enable_vllm_is_correction and policy_loss_type=ppo",
        ),
        _miles("mis_kl", _MILES_MIS, value=by.mis_kl),
        _alias(
            "areal",
            "behave_approx_kl",
            "token",
            _AREAL,
            sign="opposite",
            note="only with rejection_sampling, over the tokens that it keeps",
            value=by.opposite_kl,
        ),
    ),
    "k3_kl": (
        _verl("k3_kl"),
        _nemo("gen_kl_error", note=_KL_TYPE),
        _alias("prime-rl", "mismatch_kl/all/mean", "token", _PRIME_TRAIN),
        _alias(
            "prime-rl",
            "mismatch_kl/mean",
            "sequence",
            _PRIME,
            note="an older version's",
            value=by.sample_k3,
        ),
        _miles(
            "train_rollout_kl",
            clipping="delta clamped to ±20, the term to ±10",
            value=by.miles_k3,
        ),
        _miles("mis_k3_kl", _MILES_MIS, value=by.sample_k3),
    ),
    "reverse_k3_kl": (_nemo("policy_kl_error", note=_KL_TYPE),),
    "js_divergence": (_nemo("js_divergence_error"),),
    "logprob_abs_diff_mean": (
        _slime("train_rollout_logprob_abs_diff", by.sample_abs),
        _miles("train_rollout_logprob_abs_diff", value=by.sample_abs),
        _trl("sampling_logp_difference/mean", note=_RANKS),
        _alias("skyrl", "policy/rollout_train_logprobs_abs_diff_mean", "token", _SKYRL),
    ),
    "logprob_abs_diff_max": (_trl("sampling_logp_difference/max"),),
    "token_mult_prob_error": (_nemo("token_mult_prob_error"),),
    "probs_diff_mean": (_verl_debug("rollout_probs_diff_mean"),),
    "probs_diff_max": (_verl_debug("rollout_probs_diff_max"),),
    "probs_diff_std": (
        _verl_debug("rollout_probs_diff_std", note="divides by A - 1", value=by.probs_diff_std),
    ),
    "probs_pearson": (_verl_debug("rollout_actor_probs_pearson_corr"),),
    "ratio_mean": (
        _verl("rollout_is_mean", clipping=_CUT, note=_IS_ON, value=by.verl_is_mean),
        _nemo(
            "sampling_importance_ratio",
            note="after its truncation, where truncated_importance_sampling_type is set",
        ),
        _trl_ratio("mean", by.trl_ratio_mean),
        _slime("tis", by.sample_ratio, f"before its truncation; {_PER_TOKEN}"),
    ),
    "ratio_std": (_verl("rollout_is_std", clipping=_CUT, note=_IS_ON, value=by.verl_is_std),),
    "ratio_min": (
        _verl("rollout_is_min", clipping=_CUT, note=_IS_ON, value=by.verl_is_min),
        _trl_ratio("min", by.trl_ratio_min),
    ),
    "ratio_max": (
        _verl("rollout_is_max", clipping=_CUT, note=_IS_ON, value=by.verl_is_max),
        _trl_ratio("max", by.trl_ratio_max),
    ),
    "ratio_outside_2": (
        _verl(
            "rollout_is_ratio_fraction_high",
            note=f"above 2 only, below 1/2 is fraction_low; {_IS_ON}",
            value=by.verl_fraction_high,
        ),
        _alias("r3", "F(2)", "token", "arXiv 2510.11370, second-hand"),
    ),
    "chi2_token": (
        _verl("chi2_token"),
        _miles("mis_chi2_token", _MILES_MIS, value=by.sample_chi2),
    ),
    "ess_token": (_verl("rollout_is_eff_sample_size", note=f"{_CUT}, as ours; {_IS_ON}"),),
    "kl_over_entropy": (_alias("prime-rl", "kl_ent_ratio/mean", "token", _PRIME_TRAIN),),
    "argmax_agree": (
        _alias(
            "llama.cpp", "Same top p", "token", "ggml-org/llama.cpp, perplexity tool, second-hand"
        ),
    ),
    "exact_kl": (_kld("Mean KLD", note="with a standard error that takes tokens as independent"),),
    "exact_kl_p50": (_kld("Median KLD"),),
    "exact_kl_p90": (_kld("90.0% KLD", note=_BETWEEN),),
    "exact_kl_p95": (_kld("95.0% KLD", note=_BETWEEN),),
    "exact_kl_p99": (_kld("99.0% KLD", note=_BETWEEN),),
    "exact_kl_p999": (_kld("99.9% KLD", note=_BETWEEN),),
    "exact_kl_max": (_kld("Maximum KLD"),),
    "exact_argmax_agree": (_kld("Same top p"),),
    "training_ppl": (_verl_seq("training_ppl"), _miles("mis_training_ppl", _MILES_MIS, note="")),
    "rollout_ppl": (_verl_seq("rollout_ppl"), _miles("mis_rollout_ppl", _MILES_MIS, note="")),
    "log_ppl_diff": (_verl_seq("log_ppl_diff"), _miles("mis_log_ppl_diff", _MILES_MIS, note="")),
    "log_ppl_abs_diff": (
        _verl_seq("log_ppl_abs_diff"),
        _miles("mis_log_ppl_abs_diff", _MILES_MIS, note=""),
    ),
    "log_ppl_diff_max": (_verl_seq("log_ppl_diff_max"),),
    "log_ppl_diff_min": (_verl_seq("log_ppl_diff_min"),),
    "ppl_ratio": (_verl_seq("ppl_ratio"), _miles("mis_ppl_ratio", _MILES_MIS, note="")),
    "chi2_seq": (_verl_seq("chi2_seq"), _miles("mis_chi2_seq", _MILES_MIS, note="")),
    "ess_seq": (
        replace(
            _verl(
                "rollout_is_eff_sample_size",
                note="sequence weights cut at 2, as ours; only with rollout_is=sequence",
                value=by.verl_ess_sequence,
            ),
            reduction="sequence, by tokens",
        ),
    ),
    "seq_mult_prob_error_max": (_nemo_seq("max_seq_mult_prob_error"),),
    "seq_mult_prob_error_mean": (_nemo_seq("mean_seq_mult_prob_error"),),
    "seq_mult_prob_error_min": (_nemo_seq("min_seq_mult_prob_error"),),
}


def of(metric: str, framework: str | None = None) -> tuple[Alias, ...]:
    """The aliases of a metric, all of them or one framework's; () where there is none."""
    aliases = ALIASES.get(metric, ())
    return tuple(alias for alias in aliases if framework in (None, alias.framework))


def metric_called(name: str) -> str | None:
    """Our metric of a framework's name; None where none is known, or several are meant.

    The framework may stand before the name, and what precedes a "/" may be left out.

    >>> metric_called("gen_kl_error"), metric_called("verl rollout_corr/k3_kl"), metric_called("x")
    ('k3_kl', 'k3_kl', None)
    >>> metric_called("rollout_is_mean"), metric_called("mean")
    ('ratio_mean', None)
    """
    wanted = name.lower()
    by_end: list[str] = []
    for metric, aliases in ALIASES.items():
        for alias in aliases:
            if wanted in (alias.name.lower(), alias.label.lower()):
                return metric
            if _ends(alias, wanted):
                by_end.append(metric)
    # verl's effective sample size is two of ours under one name: the first, as with the full name.
    labels = {alias.name for metric in by_end for alias in of(metric) if _ends(alias, wanted)}
    return by_end[0] if len(labels) == 1 else None


def _ends(alias: Alias, wanted: str) -> bool:
    return alias.name.lower().endswith(f"/{wanted}")
