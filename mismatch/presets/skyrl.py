"""SkyRL's FSDP policy worker."""

from __future__ import annotations

from mismatch.presets.base import Gap, Preset, Setting, Source

VERSION = "0.3.0"
WRAPPER = "skyrl/backends/skyrl_train/workers/model_wrapper.py"


def _skyrl(file: str, symbol: str) -> Source:
    return Source("skyrl", VERSION, file, symbol)


_STRATEGY = "skyrl/backends/skyrl_train/distributed/fsdp_strategy.py"

SKYRL = Preset(
    name="skyrl",
    title=f"SkyRL {VERSION}, FSDP policy worker",
    settings=(
        Setting(
            "dtype",
            "bf16",
            "FSDP2 param_dtype is bf16 unless fsdp_config.mixed_precision says otherwise",
            _skyrl(_STRATEGY, "FSDPStrategy._fsdp_init_model"),
        ),
        Setting(
            "master_dtype",
            "fp32",
            "the policy is loaded and kept in fp32 (bf16 only with inference_only_init)",
            _skyrl(WRAPPER, "HFModelWrapper.__init__"),
        ),
        Setting(
            "autocast",
            "bf16",
            "every forward runs under bf16 autocast, the log-softmax included",
            _skyrl("skyrl/backends/skyrl_train/workers/worker.py", "PolicyWorkerBase"),
        ),
        Setting(
            "temperature_in",
            "logits",
            "logits are divided by the temperature in place, in bf16",
            _skyrl(WRAPPER, "HFModelWrapper.forward"),
        ),
        Setting(
            "layout",
            "packing",
            "remove_microbatch_padding is on: sequences of a micro-batch are joined into one row",
            _skyrl("skyrl/train/config/config.py", "TrainerConfig.remove_microbatch_padding"),
        ),
        Setting(
            "attention",
            "flash_attention_2",
            "flash_attn is on: flash_attention_2",
            _skyrl("skyrl/train/config/config.py", "TrainerConfig.flash_attn"),
            needs="flash_attn",
        ),
    ),
    gaps=(
        Gap(
            "gpt-oss runs under an attention function of its own (flex attention with sinks); "
            "here under a kernel of transformers or ours",
            _skyrl(WRAPPER, "HFModelWrapper.__init__ (custom_flex)"),
        ),
        Gap(
            "micro-batches are counted in sequences (micro_forward_batch_size_per_gpu, 1 by "
            "default); here in tokens",
            _skyrl("skyrl/train/config/config.py", "micro_forward_batch_size_per_gpu"),
        ),
    ),
)
