"""Every reported number, one function each on plain arrays; docs/metrics.md describes them all.

    from mismatch.metrics import k3_kl

    k3_kl(train - rollout)  # help(k3_kl) says what it takes, how it is made and what others call it

A dot in a metric's name is an underscore here: ``ratio_outside_1_02``. ``METRICS`` holds the
declarations by name, in the order of reports.
"""

from __future__ import annotations

# Metrics are declared in the order in which reports list them.
# ruff: noqa: F403, F405
# isort: off
from mismatch.metrics.token import *
from mismatch.metrics.exact import *
from mismatch.metrics.sequence import *
from mismatch.metrics.routing import *
# isort: on

from mismatch.metrics.describe import docstring
from mismatch.metrics.registry import METRICS, Metric

__all__ = [
    "METRICS",
    "Metric",
    "argmax_agree",
    "chi2_seq",
    "chi2_seq_clamped",
    "chi2_token",
    "chi2_token_clamped",
    "clip_fraction",
    "entropy_train",
    "ess_seq",
    "ess_seq_truncated",
    "ess_token",
    "ess_token_truncated",
    "exact_argmax_agree",
    "exact_js",
    "exact_js_topk",
    "exact_kl",
    "exact_kl_max",
    "exact_kl_p50",
    "exact_kl_p90",
    "exact_kl_p95",
    "exact_kl_p99",
    "exact_kl_p999",
    "exact_kl_topk",
    "exact_kl_topk_max",
    "exact_kl_topk_p50",
    "exact_kl_topk_p90",
    "exact_kl_topk_p95",
    "exact_kl_topk_p99",
    "exact_kl_topk_p999",
    "exact_law_gap",
    "exact_reverse_kl",
    "exact_reverse_kl_topk",
    "exact_tv",
    "exact_tv_topk",
    "experts_load_peak_rollout",
    "experts_load_peak_train",
    "experts_load_tv",
    "js_divergence",
    "k2_kl",
    "k3_kl",
    "k3_kl_at_exact",
    "kl",
    "kl_at_exact",
    "kl_over_entropy",
    "log_ppl_abs_diff",
    "log_ppl_diff",
    "log_ppl_diff_max",
    "log_ppl_diff_min",
    "logprob_abs_diff_max",
    "logprob_abs_diff_mean",
    "logprob_abs_diff_p50",
    "logprob_abs_diff_p90",
    "logprob_abs_diff_p99",
    "logprob_abs_diff_p999",
    "ppl_ratio",
    "probs_diff_max",
    "probs_diff_mean",
    "probs_diff_std",
    "probs_pearson",
    "ratio_max",
    "ratio_mean",
    "ratio_min",
    "ratio_outside_1_02",
    "ratio_outside_1_2",
    "ratio_outside_2",
    "ratio_std",
    "reverse_k3_kl",
    "rollout_ppl",
    "routing_delta2_share",
    "routing_disagree_any",
    "routing_disagree_layer",
    "routing_harm_factor",
    "routing_harm_r2",
    "routing_k3_share",
    "routing_layers_per_token",
    "routing_margin",
    "routing_margin_flipped",
    "routing_near_tie",
    "routing_near_tie_flipped",
    "routing_order_only",
    "routing_overlap",
    "routing_prompt_disagree_any",
    "routing_prompt_disagree_layer",
    "routing_top1_disagree",
    "routing_weight_l1",
    "seq_logratio_abs_max",
    "seq_logratio_mean",
    "seq_logratio_p05",
    "seq_logratio_p50",
    "seq_logratio_p95",
    "seq_logratio_std",
    "seq_mult_prob_error_max",
    "seq_mult_prob_error_mean",
    "seq_mult_prob_error_min",
    "seq_ratio_geo",
    "seq_ratio_geo_max",
    "seq_ratio_geo_min",
    "seq_ratio_geo_std",
    "token_mult_prob_error",
    "training_ppl",
]

for _name, _metric in METRICS.items():
    globals()[_name.replace(".", "_")].__doc__ = docstring(_metric)
