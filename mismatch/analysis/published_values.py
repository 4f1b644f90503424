"""Measured elsewhere: what others saw, so that a reader can ask "is this normal?".

Only values that were read in the named source. A reference is no level: models, lengths and
frameworks differ, and so does the reduction behind some of the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reference:
    """One published measurement.

    >>> REFERENCES[0].value
    0.0177

    Attributes:
        metric: our name of it; where we report no such number, a name that says what it is.
        column: of the levels table whose class of stack it belongs to; empty: not known.
        normal: whether it describes a stack that works as meant, rather than a fault.
    """

    model: str
    stack: str
    metric: str
    value: float
    column: str
    source: str
    note: str = ""
    normal: bool = True


def _of(
    model: str, stack: str, column: str, source: str, *cells: tuple[str, float, str, bool]
) -> list[Reference]:
    return [Reference(model, stack, m, v, column, source, note, ok) for m, v, note, ok in cells]


MEAN = "logprob_abs_diff_mean"
REFERENCES: tuple[Reference, ...] = (
    *_of(
        "gpt-oss-20b",
        "SGLang / FSDP",
        "bf16 MoE",
        "radixark/miles#1500",
        (MEAN, 0.0177, "FlashAttention-3 with sinks", True),
        (MEAN, 0.080, "eager attention in the trainer; the cause is disputed", False),
        (MEAN, 0.139, "lmsys bf16 checkpoint, eager attention in the trainer", False),
    ),
    *_of(
        "Qwen3-4B",
        "vLLM / Megatron",
        "bf16 dense",
        "vllm-project/vime#64",
        (MEAN, 0.0111, "mean over 300 steps", True),
    ),
    *_of(
        "Qwen3-4B",
        "SGLang / Megatron",
        "bf16 dense",
        "vllm-project/vime#64",
        (MEAN, 0.2007, "slime; NaN at step 96", False),
    ),
    *_of(
        "Qwen3-30B-A3B",
        "vLLM / prime-rl",
        "bf16 MoE",
        "PrimeIntellect-ai/prime-rl#2808",
        ("k3_kl", 1.5e-3, "router replay off, steps 0 and 1", True),
        ("k3_kl", 5e-4, "router replay on, step 0", True),
        ("k3_kl", 2e-4, "router replay on, step 1", True),
    ),
    *_of(
        "Qwen3.5-35B-A3B",
        "native kernels",
        "bf16 MoE",
        "vLLM blog, 2026-08-21",
        (MEAN, 0.01648, "native", True),
    ),
    *_of(
        "Qwen3.5-35B-A3B",
        "IsoExec, bitwise-aligned kernels",
        "bf16 MoE",
        "vLLM blog, 2026-08-21",
        (MEAN, 6.7e-7, "25 % more time", True),
    ),
    *_of(
        "Qwen2.5-0.5B",
        "Fast-LLM",
        "fp32",
        "ServiceNow/Fast-LLM#525",
        ("logprob_diff_rms", 0.0022, "fp32", True),
    ),
    *_of(
        "Qwen2.5-0.5B",
        "Fast-LLM",
        "bf16 dense",
        "ServiceNow/Fast-LLM#525",
        ("logprob_diff_rms", 0.0306, "bf16 with fp32 heads", True),
        ("logprob_diff_rms", 0.0407, "bf16 head in the trainer", True),
    ),
    *_of(
        "DeepSeek-V4",
        "verl with VeOmni",
        "",
        "verl-project/verl#7242",
        ("probs_diff_mean", 0.0148, "", True),
        ("probs_diff_max", 0.611, "", True),
        ("probs_pearson", 0.9925, "", True),
        ("k3_kl", 5.2e-3, "", True),
    ),
    *_of(
        "GLM-5.2, 5 layers",
        "SGLang / Megatron",
        "bf16 MoE",
        "radixark/miles#1678",
        (MEAN, 0.0105, "bf16 rollout", True),
        ("k3_kl", 1.2e-4, "bf16 rollout", True),
    ),
    *_of(
        "GLM-5.2, 5 layers",
        "SGLang / Megatron",
        "quantised",
        "radixark/miles#1678",
        (MEAN, 0.271, "fp8 rollout; whether it would train is not known", False),
        ("k3_kl", 0.060, "fp8 rollout; whether it would train is not known", False),
    ),
    *_of(
        "Qwen3-1.7B",
        "vLLM / HF, H200",
        "bf16 dense",
        "AknA13/train-infer-mismatch",
        (MEAN, 0.0139, "batch-invariant mode did not reduce it", True),
        ("logprob_diff_rms", 0.0449, "", True),
        ("k3_kl", 1e-3, "", True),
    ),
    *_of(
        "Qwen3-8B",
        "vLLM / HF",
        "bf16 dense",
        "AknA13/train-infer-mismatch",
        (MEAN, 0.0117, "", True),
        ("k3_kl", 7.8e-4, "", True),
    ),
    *(
        row
        for column, small, large in (
            ("fp16", 0.00175, 0.00148),
            ("fp32", 0.00073, 0.00056),
            ("quantised", 0.0529, 0.0386),
        )
        for model, value in (("Qwen3-1.7B", small), ("Qwen3-8B", large))
        for row in _of(
            model,
            "vLLM / HF",
            column,
            "AknA13/train-infer-mismatch",
            (MEAN, value, "fp8 KV cache" if column == "quantised" else "both sides", True),
        )
    ),
    *_of(
        "Qwen3-1.7B",
        "vLLM 0.30 / HF, RTX 5090",
        "quantised",
        "a pre-registered null result on speculative decoding",
        ("k3_kl", 2.4e-2, "fp8 KV cache", True),
    ),
    *_of(
        "Qwen3.5-0.8B",
        "vLLM / HF",
        "bf16 dense",
        "TRL, FP16 plan of 2026-09-28",
        (MEAN, 0.0138, "", True),
        (MEAN, 0.0095, "fp32 head on both sides", True),
    ),
    *_of(
        "Qwen3.5-0.8B",
        "vLLM / HF",
        "fp16",
        "TRL, FP16 plan of 2026-09-28",
        (MEAN, 0.0019, "both sides", True),
    ),
    *_of(
        "LFM2.5-1.2B",
        "vLLM / TRL with LoRA",
        "bf16 dense",
        "TRL, FP16 plan of 2026-09-28",
        (MEAN, 0.022, "agentic; the highest of .016 to .022", True),
    ),
    *_of(
        "Qwen3-8B",
        "vLLM / slime on ROCm",
        "bf16 dense",
        "vime, 2026-07-10",
        (MEAN, 0.012, "MI355X", True),
    ),
    *_of(
        "Qwen3-30B-A3B",
        "vLLM / Megatron",
        "bf16 MoE",
        "vime blog, 2026-06-09",
        (MEAN, 0.019, "router replay off", True),
        (MEAN, 0.013, "router replay on", True),
    ),
    *_of(
        "GLM-4.5-Air",
        "vLLM / Megatron",
        "bf16 MoE",
        "vime blog, 2026-06-09",
        (MEAN, 0.028, "", True),
    ),
    *_of(
        "Qwen3.5-4B",
        "prime-rl",
        "bf16 dense",
        "PrimeIntellect-ai/prime-rl#2671",
        ("k3_kl", 0.03, "at step 0, reported as too large", False),
    ),
    *_of(
        "not named",
        "TRL, top_p 0.8 + top_k 1024 on one side only",
        "",
        "huggingface/trl#7269",
        ("ratio_mean", 0.896, "51.8 % of the ratios outside [.9, 1.1]; 4.3 % once repaired", False),
    ),
    *_of(
        "MoE, not named",
        "miles",
        "",
        "radixark/miles#2722",
        (MEAN, 0.369, "natural routing", False),
        (MEAN, 0.139, "expert ids replayed: equal ids, unequal weights", False),
    ),
)


def references_for(metric: str, column: str) -> tuple[Reference, ...]:
    """Measured elsewhere on a sound stack of the same class."""
    return tuple(
        reference
        for reference in REFERENCES
        if reference.normal and (reference.metric, reference.column) == (metric, column)
    )
