"""A synthetic report that looks like a real one: about 5,000 tokens of a small MoE in bf16.

All of it is drawn from one seeded generator. Errors are heavier where the probability is low and
where the routing differs, as in real runs; a handful of tokens is hostile to every renderer.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import pandas as pd

from mismatch.analysis.comparison import compare
from mismatch.analysis.displaced import LEVELS, Bound
from mismatch.analysis.levels import judge, verdict
from mismatch.analysis.results import Displaced, Leg, Square
from mismatch.analysis.results import Gap as Float32Gap
from mismatch.analysis.square import judged
from mismatch.types import (
    Check,
    Comparison,
    Estimate,
    NotTested,
    Report,
    SidePair,
)
from tests.routing_fixture import rollout_of, routing_pair, with_routing

LAYERS, SEQUENCES, PROMPTS, PROMPT_TOKENS = 4, 64, 16, 24
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "\u202egnp.exe\u202c",
    "\x1b[31mred\x1b[0m",
    "\x00\x07",
    "{{ 7 * 7 }}",
    "[bold]|`pipe`|[/bold]",
    "\u0301\u0301",
    "שלום",
    "\ufffd",
)
WORDS = [" the", " Tom", " has", " 12", " apples", ".", "\n", " and", " buys", " 7", " more", " so"]


def make_tokens(seed: int = 0, scale: float = 0.6, routing: bool = True) -> pd.DataFrame:
    """The tokens table of a run: one row per action token."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(40, 120, SEQUENCES)
    sequence = np.repeat(np.arange(SEQUENCES), lengths)
    position = np.concatenate([PROMPT_TOKENS + np.arange(length) for length in lengths])
    n_tokens = len(sequence)
    rollout = -rng.gamma(0.5, 0.7, n_tokens)
    flips = rng.binomial(LAYERS, 0.035, n_tokens)
    spread = 0.004 + 0.012 * np.minimum(-rollout, 3) + 0.012 * flips
    train = np.minimum(rollout + scale * spread * rng.standard_t(4, n_tokens), -1e-7)
    token_id = rng.integers(0, len(WORDS), n_tokens)
    token = np.array(WORDS, dtype=object)[token_id]
    worst = np.argsort(-np.abs(train - rollout))[: len(HOSTILE)]
    token[worst] = HOSTILE
    return pd.DataFrame(
        {
            "sequence": sequence,
            "position": position,
            "token_id": token_id,
            "token": token,
            "rollout_logprob": rollout,
            "train_logprob": train,
            "delta": train - rollout,
            "entropy": rng.gamma(1.0, 0.4, n_tokens),
            "turn": np.ones(n_tokens, dtype=np.int64),
            "routing_flips": pd.array(flips if routing else [None] * n_tokens, dtype="Int64"),
            "routing_flipped_layers": [
                list(range(LAYERS - n, LAYERS)) if routing else None for n in flips
            ],
        }
    )


def estimate(
    value: float, width: float | None = 0.2, flags: tuple[str, ...] = (), tokens: int = 5_063
) -> Estimate:
    low, high = (None, None) if width is None else (value * (1 - width), value * (1 + width))
    return Estimate(value, low, high, tokens, SEQUENCES, PROMPTS, flags)


def metrics_of(tokens: pd.DataFrame) -> dict[str, Estimate]:
    delta = tokens["delta"].to_numpy()
    size, ratio = np.abs(delta), np.exp(delta)
    rollout, train = np.exp(tokens["rollout_logprob"]), np.exp(tokens["train_logprob"])
    values: dict[str, tuple[float, float | None]] = {
        "logprob_abs_diff_mean": (size.mean(), 0.07),
        "logprob_abs_diff_max": (size.max(), None),
        "logprob_abs_diff_p50": (np.quantile(size, 0.5), 0.1),
        "logprob_abs_diff_p99": (np.quantile(size, 0.99), 0.2),
        "kl": (-delta.mean(), 0.9),
        "k3_kl": (np.mean(ratio - 1 - delta), 0.4),
        "token_mult_prob_error": (np.exp(size).mean(), 0.002),
        "probs_diff_mean": (np.abs(train - rollout).mean(), 0.1),
        "probs_pearson": (np.corrcoef(train, rollout)[0, 1], 0.0005),
        "ratio_mean": (ratio.mean(), 0.001),
        "ratio_max": (ratio.max(), None),
        "ratio_outside_2": (np.mean(size > np.log(2)), 0.8),
        "clip_fraction": (np.mean(np.abs(ratio - 1) > 0.2), 0.3),
        "ess_token": (0.998, 0.001),
        "entropy_train": (tokens["entropy"].mean(), 0.05),
        "argmax_agree": (0.9912, 0.003),
    }
    flags = {"k3_kl": ("heavy-tail",), "ratio_mean": ("heavy-tail", "few-prompts")}
    n_tokens = len(tokens)
    return {
        name: estimate(float(value), width, flags.get(name, ()), n_tokens)
        for name, (value, width) in values.items()
    }


def routed(tokens: pd.DataFrame) -> Comparison:
    """The tokens compared, with invented experts that differ in the layers that they name."""
    rollout = rollout_of(tokens, SEQUENCES // PROMPTS)
    named = tokens["routing_flipped_layers"]
    differs = np.array([[layer in (names or ()) for layer in range(LAYERS)] for names in named])
    sides = with_routing(rollout, tokens, *routing_pair(rollout, differs, weights=True))
    return compare(rollout, *sides[:2], sampled_by_left=True, noise=sides[2])


def noise_pair(left: str, right: str, mean: float, largest: float) -> SidePair:
    metrics = {
        "logprob_abs_diff_mean": estimate(mean, 0.1),
        "logprob_abs_diff_max": estimate(largest, None),
        "k3_kl": estimate(mean**2, 0.4),
    }
    return SidePair(left, right, left.endswith("decode"), metrics)


COLUMN = "bf16 MoE"
CHECKS = (
    Check("same-token-ids", "passed", "5,142 token ids equal on both sides"),
    Check("alignment", "passed", "best lag 0 (correlation 0.9998)"),
    Check("importance-ratio", "passed", "0.9999 agrees with 1"),
    Check("temperature", "passed", "both sides at temperature 1"),
    Check("weights-as-loaded", "passed", "61 parameters equal"),
    Check("truncation", "not_tested", "nothing was truncated: top_p 1, top_k off"),
    Check(
        "special-tokens",
        "warning",
        "3 of 64 responses end without EOS at the length limit",
        "raise --max-tokens above 128",
    ),
)
SOUND = (*CHECKS[:-1], Check("special-tokens", "passed", "61 sequences stopped"))
FAILED = Check(
    "attention-sinks",
    "failed",
    "the trainer's kernel 'no-sinks' ignores the model's 16 learned sinks",
    "mismatch check --attention auto",
)
ENGINE = {
    "mode": "decode",
    "engine": "vllm",
    "version": "0.32.0",
    "dtype": "bf16",
    "kv_cache_dtype": "auto",
    "quantization": None,
    "logprobs_mode": "raw_logprobs",
    "logprobs_temperature": 1.0,
    "logprobs_truncated": False,
    "attention": "CPU_ATTN",
    "moe": True,
    "moe_backend": "cpu_fused_moe",
    "enforce_eager": True,
    "tensor_parallel_size": 1,
    "device": "cpu",
    "versions": {"vllm": "0.32.0", "torch": "2.13.0+cpu"},
}
TRAINER = {
    "mode": "train",
    "backend": "fsdp2",
    "dtype": "bf16",
    "master_dtype": "fp32",
    "autocast": None,
    "head_dtype": None,
    "attention": "sink-sdpa",
    "attention_requested": "auto",
    "honours_sinks": True,
    "experts": "grouped_mm",
    "layout": "padding",
    "micro_batch_tokens": 4096,
    "grad": False,
    "world_size": 2,
    "device": "cpu",
    "moe": True,
    "logprobs_temperature": 1.0,
    "versions": {"torch": "2.13.0", "transformers": "5.19.0", "python": "3.11.7"},
    "resident_fraction": [0.503, 0.503],
}


def square_of(excess: float = 1.01, gap: float = 2.1e-7) -> Square:
    """A square whose engine rounds ``excess`` times as much as a plain forward."""

    def near(value: float) -> Estimate:
        return Estimate(value, 0.97 * value, 1.03 * value, 3072, SEQUENCES, PROMPTS)

    def leg(side: Literal["engine", "trainer"], name: str, exact: str, over: float) -> Leg:
        rms, size = near(0.0102 * over), near(0.0052 * over)
        return Leg(side, name, exact, "plain:bf16", rms, size, near(over), near(0.99 * over))

    legs = (
        leg("engine", "vllm:decode", "vllm:fp32", excess),
        leg("trainer", "fsdp", "reference:fp32", 1.003),
    )
    sizes = near(gap), near(gap**2), near(60 * gap)
    off = excess > LEVELS["cpu"].excess
    moved = (
        Displaced("engine", "vllm:decode", "rare", 1.5, 0.31, PROMPTS if off else 3, 2, PROMPTS,
                  6.1e-5 if off else 0.5, "beyond" if off else "within"),
        Displaced("trainer", "fsdp", "rare", 1.5, 0.31, 2, 2, PROMPTS, 0.75, "within"),
    )  # fmt: skip
    apart = Float32Gap("engine", "vllm:fp32", "reference:fp32", *sizes, 9e-8)
    return Square(
        device="cpu",
        calibrated=True,
        legs=legs,
        gaps=(apart,),
        correlation=near(0.51),
        findings=(
            *(judged(leg, Bound(1.2, 1.2)) for leg in legs),
            judged(apart, Bound(1e-5, 1e-5)),
        ),
        not_judged=(NotTested("excess of fsdp:grad", "the run holds no such scoring"),),
        seconds={"plain:bf16": 8.9, "reference:fp32": 6.9, "vllm:fp32": 12.5},
        displaced=moved,
    )


def of_features(tokens: pd.DataFrame) -> dict[str, Any]:
    """Results of those features whose folders are there: they can be deleted."""
    results: dict[str, Any] = {}
    if find_spec("mismatch.features.corrections"):
        from tests.corrections_fixture import corrections_of

        prompts = np.arange(SEQUENCES) // (SEQUENCES // PROMPTS)
        results["corrections"] = corrections_of(tokens, prompts)
    if find_spec("mismatch.features.gradients"):
        from tests.gradients_fixture import make_check

        results["gradients"] = make_check()
    return results


def make_report(tokens: pd.DataFrame | None = None, checks: tuple[Check, ...] = SOUND) -> Report:
    """A healthy bf16 run of the small MoE."""
    tokens = make_tokens() if tokens is None else tokens
    metrics = metrics_of(tokens)
    measured = routed(tokens)
    headline = replace(measured, metrics=metrics)
    mean = metrics["logprob_abs_diff_mean"].value
    return Report(
        model="tiny-gpt-oss",
        verdict=verdict(judge(headline, COLUMN), checks, COLUMN),
        fingerprints={
            "vllm:decode": ENGINE,
            "vllm:prefill": ENGINE | {"mode": "prefill"},
            "fsdp": TRAINER,
            "reference:fp32": TRAINER | {"mode": "reference", "dtype": "fp32"},
        },
        comparisons=(headline,),
        noise_floor=(
            noise_pair("vllm:decode", "vllm:prefill", 0.0, 0.0),
            noise_pair("fsdp", "fsdp:regrouped", 3e-4, 0.04),
            noise_pair("fsdp", "fsdp:grad", 0.0, 0.0),
            noise_pair("reference:fp32", "fsdp", 0.62 * mean, 0.21),
        ),
        checks=checks,
        not_tested=(
            NotTested("prefill rescoring at temperature ≠ 1", "this run sampled at temperature 1"),
        ),
        run={
            "command": "mismatch check --model tiny-gpt-oss",
            "created": "2026-11-20T18:40:00+00:00",
            "seconds": {"rollout": 31.2, "train": 44.9, "compare": 1.2},
            "versions": {"mismatch": "0.1.0", "torch": "2.13.0", "transformers": "5.19.0"},
            "spec": {"seed": 0},
        },
    ).with_analyses(square=square_of(), **of_features(tokens))


def make_inconclusive_report() -> tuple[Report, pd.DataFrame]:
    """Louder tokens: the interval of ``probs_diff_mean`` spans its healthy bound."""
    tokens = make_tokens(scale=1.32)
    return make_report(tokens), tokens


def make_failing_report() -> tuple[Report, pd.DataFrame]:
    """A run with a failed check, an unfit and an inconclusive metric; and its tokens."""
    tokens = make_tokens(seed=1, scale=20.0)
    report = make_report(tokens, (*CHECKS, FAILED))
    trainer = TRAINER | {"attention": "no-sinks", "honours_sinks": False}
    report = replace(report, fingerprints=report.fingerprints | {"fsdp": trainer})
    return report.with_analyses(square=square_of(1.9, 6.8e-3)), tokens


def make_empty_report() -> tuple[Report, pd.DataFrame]:
    """A run whose two sides scored other tokens: a failed check, and nothing to compare."""
    failed = Check("same-token-ids", "failed", "the sides scored other tokens", "score token ids")
    tokens = make_tokens()
    tokens[["rollout_logprob", "train_logprob", "delta", "entropy"]] = np.nan
    report = replace(
        make_report(), comparisons=(), noise_floor=(), analyses={}, checks=(failed,), not_tested=(),
        verdict=verdict((), (failed,), COLUMN),
    )  # fmt: skip
    return report, tokens
