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
        (MEAN, 0.011, "flat over 30 steps", True),
    ),
    *_of(
        "Qwen3-4B",
        "SGLang / Megatron",
        "bf16 dense",
        "vllm-project/vime#64",
        (MEAN, 0.011, "at step 0", True),
        (MEAN, 0.036, "after 30 steps of drift", False),
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
        "GLM-5.2 (toy size)",
        "miles",
        "bf16 MoE",
        "miles, run_glm5_2 script",
        (MEAN, 0.010, "bf16 rollout", True),
    ),
    *_of(
        "GLM-5.2 (toy size)",
        "miles",
        "quantised",
        "miles, run_glm5_2 script",
        (MEAN, 0.27, "fp8 rollout", True),
    ),
    *_of(
        "Qwen3-1.7B",
        "vLLM / HF, H200",
        "bf16 dense",
        "AknA13/train-infer-mismatch",
        (MEAN, 0.014, "batch-invariant mode did not reduce it, fp16 cut it about 8×", True),
        ("k3_kl", 1e-3, "about", True),
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


def references_for(metric: str, column: str, *, normal: bool = True) -> tuple[Reference, ...]:
    """What was measured elsewhere for a metric on the same class of stack."""
    return tuple(
        reference
        for reference in REFERENCES
        if (reference.metric, reference.column, reference.normal) == (metric, column, normal)
    )
