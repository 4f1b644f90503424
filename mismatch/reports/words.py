"""Every reported number in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch.types import SidePair


@dataclass(frozen=True, slots=True)
class Words:
    """How one metric is introduced to a stranger.

    Attributes:
        label: at most 24 characters, for tables.
        meaning: one sentence.
        share: whether the value is a share, written in percent.
    """

    label: str
    meaning: str
    share: bool = False


METRICS: dict[str, Words] = {
    "logprob_abs_diff_mean": Words(
        "mean |delta|, nats", "average distance of the two log-probabilities of a token"
    ),
    "logprob_abs_diff_max": Words(
        "largest |delta|, nats", "the token that the two sides disagree about most"
    ),
    "logprob_abs_diff_p50": Words("median |delta|, nats", "half of the tokens differ by less"),
    "logprob_abs_diff_p90": Words("|delta|, 90 % quantile", "one token in ten differs by more"),
    "logprob_abs_diff_p99": Words("|delta|, 99 % quantile", "one token in 100 differs by more"),
    "logprob_abs_diff_p999": Words(
        "|delta|, 99.9 % quantile", "one token in 1,000 differs by more"
    ),
    "kl": Words(
        "k1 KL, nats per token", "mean of -delta: estimates KL(rollout‖train); signed and noisy"
    ),
    "k2_kl": Words("k2 KL, nats per token", "mean of delta²/2: a biased but calm estimate"),
    "k3_kl": Words(
        "k3 KL, nats per token",
        "KL(rollout‖train): how much the trainer's policy differs from the one that sampled",
    ),
    "reverse_k3_kl": Words(
        "reverse k3, nats", "the same with the sides exchanged; on sampled tokens no unbiased KL"
    ),
    "js_divergence": Words(
        "JS divergence, nats", "Jensen-Shannon form on the sampled token only; no unbiased JSD"
    ),
    "token_mult_prob_error": Words(
        "probability factor",
        "mean of exp(|delta|): by which factor a token's probability is off",
    ),
    "probs_diff_mean": Words("probability gap, mean", "average |p(train) - p(rollout)|"),
    "probs_diff_max": Words("probability gap, largest", "largest |p(train) - p(rollout)|"),
    "probs_diff_std": Words(
        "probability gap, spread", "standard deviation of |p(train) - p(rollout)|"
    ),
    "probs_pearson": Words(
        "probability correlation",
        "Pearson correlation of the two sides' token probabilities; 1 is perfect",
    ),
    "ratio_mean": Words("importance ratio, mean", "mean of exp(delta); 1 where nothing is wrong"),
    "ratio_std": Words(
        "importance ratio, spread", "standard deviation of exp(delta), before any truncation"
    ),
    "ratio_min": Words("importance ratio, least", "smallest exp(delta)"),
    "ratio_max": Words("importance ratio, most", "largest exp(delta)"),
    "ratio_outside_1.02": Words("tokens off by over 2 %", "ratio outside 1.02×", share=True),
    "ratio_outside_1.2": Words("tokens off by over 20 %", "ratio outside 1.2×", share=True),
    "ratio_outside_2": Words(
        "tokens off by over 2×",
        "share of tokens whose probability differs by more than a factor of 2",
        share=True,
    ),
    "clip_fraction": Words(
        "PPO clips at step 0",
        "share of ratios outside the clip range although nothing was trained yet",
        share=True,
    ),
    "chi2_token": Words("χ² per token", "mean ratio² - 1, delta clamped ±20"),
    "chi2_seq": Words("χ² per sequence", "the same on whole sequences, clamped"),
    "ess_token": Words(
        "effective sample size",
        "share of the tokens that is left after importance weighting, weights capped at 2",
        share=True,
    ),
    "ess_seq": Words("effective size, seqs.", "the same on whole sequences", share=True),
    "entropy_train": Words("entropy, nats per token", "how undecided the trainer's policy is"),
    "kl_over_entropy": Words("k3 KL / entropy", "mismatch relative to the entropy"),
    "argmax_agree": Words(
        "same most likely token",
        "share of tokens where both sides prefer the same token",
        share=True,
    ),
    "training_ppl": Words("perplexity, train", "exp of minus the mean log-probability"),
    "rollout_ppl": Words("perplexity, rollout", "exp of minus the mean log-probability"),
    "ppl_ratio": Words("perplexity ratio", "train over rollout"),
    "seq_mult_prob_error_max": Words(
        "factor, worst sequence", "largest mean exp(|delta|) of a sequence"
    ),
    "chi2_token_clamped": Words("χ² per token, clamped", "tokens whose delta was clamped to ±20"),
    "chi2_seq_clamped": Words(
        "χ² per sequence, clamped", "sequences whose sum of delta was clamped to ±20"
    ),
    "ess_token_truncated": Words("weights capped, tokens", "tokens whose weight was cut to 2"),
    "ess_seq_truncated": Words("weights capped, seqs.", "sequences whose weight was cut to 2"),
    "log_ppl_diff": Words(
        "log-perplexity gap", "mean over sequences of mean(rollout) - mean(train)"
    ),
    "log_ppl_abs_diff": Words("log-perplexity gap, size", "the same without its sign"),
    "log_ppl_diff_max": Words("log-perplexity gap, most", "largest of a sequence"),
    "log_ppl_diff_min": Words("log-perplexity gap, min", "smallest of a sequence"),
    "seq_logratio_std": Words(
        "sequence log-ratio, std", "spread of the sum of delta over a sequence"
    ),
    "seq_logratio_abs_max": Words(
        "sequence log-ratio, most", "largest |sum of delta| of a sequence"
    ),
    "seq_logratio_mean": Words(
        "sequence log-ratio, mean", "mean over sequences of the sum of delta"
    ),
    "seq_logratio_p05": Words("sequence log-ratio, 5 %", "one sequence in 20 sums to less"),
    "seq_logratio_p50": Words("sequence log-ratio, 50 %", "half of the sequences sum to less"),
    "seq_logratio_p95": Words("sequence log-ratio, 95 %", "one sequence in 20 sums to more"),
    "seq_ratio_geo": Words(
        "geometric ratio, mean", "mean over sequences of exp(mean delta): the ratio per token"
    ),
    "seq_ratio_geo_std": Words("geometric ratio, spread", "its spread over sequences"),
    "seq_ratio_geo_min": Words("geometric ratio, least", "smallest exp(mean delta) of a sequence"),
    "seq_ratio_geo_max": Words("geometric ratio, most", "largest exp(mean delta) of a sequence"),
    "seq_mult_prob_error_mean": Words(
        "factor, mean sequence", "mean over sequences of mean exp(|delta|)"
    ),
    "seq_mult_prob_error_min": Words(
        "factor, best sequence", "smallest mean exp(|delta|) of a sequence"
    ),
}


def _exact(suffix: str, of: str) -> dict[str, Words]:
    tail = ", top-k" if suffix else ""
    words = {
        f"exact_kl{suffix}": Words(
            f"exact KL, mean{tail}", f"KL(rollout‖train) summed over {of}, nats per token"
        ),
        f"exact_reverse_kl{suffix}": Words(
            f"reverse KL{tail}", f"KL(train‖rollout) over {of}: a real one, unlike reverse k3"
        ),
        f"exact_js{suffix}": Words(
            f"exact JSD{tail}", f"Jensen-Shannon divergence over {of}, nats"
        ),
        f"exact_tv{suffix}": Words(
            f"total variation{tail}", "share of the probability that the sides place elsewhere"
        ),
        f"exact_kl{suffix}_max": Words(f"exact KL, most{tail}", "of one position"),
    }
    for label in ("50", "90", "95", "99", "99.9"):
        words[f"exact_kl{suffix}_p{label.replace('.', '')}"] = Words(
            f"exact KL, {label} %{tail}", f"{label} % of the positions have no more"
        )
    return words


METRICS |= {
    **_exact("", "the whole vocabulary"),
    **_exact("_topk", "the likeliest ids and all others as one: a lower bound"),
    "exact_argmax_agree": Words(
        "same likeliest, there", "share of these positions where both sides prefer it", share=True
    ),
    "kl_at_exact": Words("k1 there", "what k1 says of the same positions"),
    "k3_kl_at_exact": Words("k3 there", "what k3 says of the same positions"),
    "exact_law_gap": Words(
        "k1 - exact, of chance", "above 1: the tokens were not drawn from that law"
    ),
}

ROUTING: dict[str, Words] = {
    "routing_disagree_layer": Words(
        "other experts, per layer",
        "share of (token, layer) pairs where the two sides chose another set of experts",
        share=True,
    ),
    "routing_disagree_any": Words(
        "tokens with such a layer", "share of tokens with at least one", share=True
    ),
    "routing_layers_per_token": Words("such layers per token", "mean number of differing layers"),
    "routing_overlap": Words("experts in common", "mean share of the chosen experts", share=True),
    "routing_top1_disagree": Words(
        "other first expert", "share of (token, layer) with another heaviest expert", share=True
    ),
    "routing_order_only": Words("same set, other order", "harmless", share=True),
    "routing_weight_l1": Words(
        "routing weights, L1", "distance of the two sides' weights over all experts; at most 2"
    ),
    "routing_margin": Words(
        "router margin, mean", "gap between the last chosen and the first rejected expert"
    ),
    "routing_margin_flipped": Words(
        "router margin, flipped", "small: near-ties, decided by rounding"
    ),
    "routing_near_tie": Words(
        "near-ties", "choices whose margin lies within the router's own noise", share=True
    ),
    "routing_near_tie_flipped": Words(
        "near-ties among these",
        "share of the differing choices that were near-ties",
        share=True,
    ),
    "routing_delta2_share": Words(
        "of delta², such tokens", "share of all delta² on tokens with such a layer", share=True
    ),
    "routing_k3_share": Words(
        "of k3, such tokens", "share of the k3 score on tokens with such a layer", share=True
    ),
    "routing_harm_factor": Words(
        "|delta|, such tokens", "their mean |delta| over that of the other tokens"
    ),
    "routing_harm_r2": Words(
        "variance explained", "share of the variance of |delta| between the two groups", share=True
    ),
    "routing_prompt_disagree_layer": Words(
        "prompt: other experts",
        "the first number, over prompt and tool output: apart from the headline",
        share=True,
    ),
    "routing_prompt_disagree_any": Words(
        "prompt: tokens with such", "share of those tokens with at least one layer", share=True
    ),
    "experts_load_tv": Words(
        "expert load, distance",
        "total variation between the two sides' load per expert",
        share=True,
    ),
    "experts_load_peak_rollout": Words(
        "busiest expert, rollout", "its load over the even load of its layer"
    ),
    "experts_load_peak_train": Words("busiest expert, train", "the same on the train side"),
}

MARKS = {"healthy": "✓", "warn": "!", "critical": "✕"}


def words_for(name: str, *, sampled_by_left: bool = True) -> Words:
    """The words of a metric; one that this page does not know keeps its own name.

    Where neither side sampled the tokens, the KL estimators estimate no KL and are called scores.
    """
    words = METRICS.get(name) or ROUTING.get(name) or Words(name, "")
    if sampled_by_left or "KL" not in words.label or name.startswith("exact_"):
        return words
    return Words(
        words.label.replace("KL", "divergence score"),
        "the KL formula on tokens that neither side sampled: a score, no estimate of a KL",
    )


def noise_words(pair: SidePair) -> Words:
    """What a pair of the noise floor compares, from the scorings' names."""
    left, right = pair.left, pair.right
    kinds = {_kind(left), _kind(right)}
    if kinds == {"decode", "prefill"}:
        return Words("engine: prefill / decode", "the engine reads back the tokens it sampled")
    if "reference" in kinds and kinds & {"decode", "prefill"}:
        return Words("engine vs float32", "what the engine's precision and kernels cost")
    if "reference" in kinds:
        return Words("trainer vs float32", "what the trainer's precision and kernels cost")
    for kind, words in _TRAINER.items():
        if kind in kinds:
            return words
    return Words(f"{left} vs {right}", "two passes that should agree")


def _kind(scoring: str) -> str:
    name, _, variant = scoring.partition(":")
    return "reference" if name == "reference" else variant


_TRAINER = {
    "regrouped": Words("trainer: regrouped", "the same tokens in other micro-batches"),
    "grad": Words("trainer: gradients on", "the training forward against the scoring forward"),
    "repeat": Words("trainer: repeated", "the same pass once more"),
    "repeated": Words("trainer: repeated", "the same pass once more"),
}
