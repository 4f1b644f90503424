"""TRL's GRPO trainer on accelerate's FSDP2, as ``accelerate_configs/fsdp2.yaml`` starts it."""

from __future__ import annotations

from mismatch.presets.base import Gap, Preset, Setting, Source

VERSION = "1.16.0"
ACCELERATE_VERSION = "1.15.0"
GRPO = "trl/trainer/grpo_trainer.py"


def _trl(file: str, symbol: str) -> Source:
    return Source("trl", VERSION, file, symbol)


def _accelerate(file: str, symbol: str) -> Source:
    return Source("accelerate", ACCELERATE_VERSION, file, symbol)


_POLICY = _accelerate(
    "accelerate/utils/dataclasses.py", "FullyShardedDataParallelPlugin.set_mixed_precision"
)
_LOGPS = _trl(GRPO, "GRPOTrainer._get_per_token_logps_and_entropies")

TRL = Preset(
    name="trl",
    title=f"TRL {VERSION} GRPO trainer, accelerate {ACCELERATE_VERSION} FSDP2, bf16",
    settings=(
        Setting(
            "dtype",
            "bf16",
            "FSDP param_dtype follows mixed_precision: bf16 (GRPOConfig.bf16 is on by default)",
            _POLICY,
        ),
        Setting(
            "master_dtype",
            "fp32",
            "weights are loaded in fp32, and trainable ones are kept so under mixed precision",
            _accelerate("accelerate/utils/fsdp_utils.py", "fsdp2_prepare_model"),
        ),
        Setting(
            "autocast",
            "bf16",
            "the model, its head included, runs under accelerator.autocast()",
            _LOGPS,
        ),
        Setting(
            "temperature_in",
            "fp32",
            "bf16 logits are raised to float32 and then divided by the temperature",
            _trl("trl/kernels/chunked_logprob.py", "ChunkedLogProbFunction.forward"),
        ),
        Setting(
            "logprobs_dtype",
            "bf16",
            "FSDP2's output_dtype is bf16 and the fused head computes logprobs inside the root "
            "module, so logprobs and entropies are rounded to bf16 when it returns",
            _POLICY,
        ),
        Setting(
            "attention",
            "transformers",
            "the kernel that transformers takes when none is named (sdpa; eager for gpt-oss)",
            _trl("trl/trainer/utils.py", "create_model_from_path"),
        ),
        Setting("layout", "padding", "one sequence per row, without padding removal", _LOGPS),
    ),
    gaps=(
        Gap(
            "prompts are padded on the left and no positions are given, so positions count the "
            "padding; here padding is on the right, as nothing else depends on it in exact "
            "arithmetic",
            _trl(GRPO, "GRPOTrainer._generate_and_score_completions"),
        ),
        Gap(
            "the softmax is summed up over pieces of 32,768 tokens of the vocabulary; here over "
            "all of it at once (differences of about 1e-6)",
            _trl("trl/trainer/utils.py", "add_fused_lm_head"),
        ),
        Gap(
            "soft-capping and logit scaling (Gemma 2, Granite, Cohere) are done in float32; here "
            "in the logits' own dtype, as the model's forward does",
            _trl("trl/kernels/chunked_logprob.py", "_torch_transform"),
        ),
        Gap(
            "micro-batches are counted in sequences (per_device_train_batch_size); here in tokens",
            _LOGPS,
        ),
        Gap(
            "DeepSpeed, DDP and FSDP1 do not round logprobs to bf16; this is FSDP2's path alone",
            _POLICY,
        ),
    ),
)
