"""verl's FSDP trainer: the engine of today's releases, and the worker of releases up to 0.7."""

from __future__ import annotations

from mismatch.presets.base import Gap, Preset, Setting, Source

VERSION = "0.9.1"
LEGACY_VERSION = "0.7.1"
PACKED_TOKENS = 16384
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"


def _engine(symbol: str, file: str = ENGINE) -> Source:
    return Source("verl", VERSION, file, symbol)


def _legacy(file: str, symbol: str) -> Source:
    return Source("verl", LEGACY_VERSION, f"verl/workers/{file}", symbol)


def _config(version: str, path: str, key: str) -> Source:
    return Source("verl", version, f"verl/trainer/config/{path}", key)


_FLASH = "flash_attention_2 unless model.override_config.attn_implementation says otherwise"
_PACKED = "use_remove_padding is on: sequences of a micro-batch are joined into one row"
_BUDGET = f"log-probabilities in micro-batches of {PACKED_TOKENS} tokens (with use_dynamic_bsz)"
_ENTROPY = (
    "entropies are made of bf16 logits by a compiled function; here they are float32, so its "
    "entropy metric can differ while logprobs agree"
)
_BATCHES = (
    "micro-batches are balanced over ranks and, without use_dynamic_bsz, counted in sequences; "
    "here they follow a token budget, so batch-size effects are of other sizes"
)
FSDP1 = "strategy fsdp (verl's default) is FSDP1; here the same dtypes run under FSDP2"

_WORKER = _legacy("fsdp_workers.py", "ActorRolloutRefWorker._build_model_optimizer")
_FORWARD = _legacy("actor/dp_actor.py", "DataParallelPPOActor._forward_micro_batch")


def _shared(version: str, attention: Source) -> tuple[Setting, ...]:
    """What the engine and the old worker have in common."""
    padding = _config(version, "model/hf_model.yaml", "use_remove_padding")
    budget = _config(version, "rollout/rollout.yaml", "log_prob_max_token_len_per_gpu")
    return (
        Setting("layout", "packing", _PACKED, padding),
        Setting("attention", "flash_attention_2", _FLASH, attention, needs="flash_attn"),
        Setting("micro_batch_tokens", PACKED_TOKENS, _BUDGET, budget, needs="flash_attn"),
    )


VERL = Preset(
    name="verl",
    title=f"verl {VERSION}, FSDP engine (strategy fsdp or fsdp2)",
    settings=(
        Setting(
            "dtype",
            "bf16",
            "FSDP param_dtype is bf16 unless fsdp_config.mixed_precision says otherwise",
            _engine("FSDPEngine._build_fsdp_module"),
        ),
        Setting(
            "master_dtype",
            "fp32",
            "weights are loaded and kept in fp32 (fsdp_config.model_dtype)",
            _engine("FSDPEngine._build_module"),
        ),
        Setting(
            "autocast",
            "bf16",
            "the forward and the log-softmax run under autocast in param_dtype",
            _engine("FSDPEngineWithLMHead.forward_step"),
        ),
        Setting(
            "temperature_in",
            "logits-rounded",
            "logits (bf16) are divided by the temperature after it was rounded to bf16 as well "
            "(0.7 becomes 0.69921875, 0.6 becomes 0.6015625), and stay bf16",
            _engine("_scale_logits_by_temperature"),
        ),
        *_shared(VERSION, _engine("HFModelConfig.__post_init__", "verl/workers/config/model.py")),
    ),
    gaps=(
        Gap(_ENTROPY, _engine("FSDPEngine.__init__ (compute_entropy_from_logits)")),
        Gap(_BATCHES, _engine("prepare_micro_batches", "verl/workers/engine/utils.py")),
        Gap(FSDP1, _config(VERSION, "actor/dp_actor.yaml", "strategy"), strategy="fsdp"),
    ),
)

VERL_LEGACY = Preset(
    name="verl-legacy",
    title=f"verl up to {LEGACY_VERSION}, fsdp_workers.py with dp_actor.py",
    settings=(
        Setting("dtype", "bf16", "FSDP param_dtype is fsdp_config.dtype (bfloat16)", _WORKER),
        Setting(
            "master_dtype",
            "fp32",
            "the actor's weights are loaded and kept in fp32 (fsdp_config.model_dtype)",
            _WORKER,
        ),
        Setting(
            "autocast",
            "bf16",
            "the forward and the log-softmax run under autocast in fsdp_config.dtype",
            _FORWARD,
        ),
        Setting(
            "temperature_in",
            "logits",
            "logits are divided by the temperature in place, in bf16",
            _FORWARD,
        ),
        *_shared(LEGACY_VERSION, _WORKER),
    ),
    gaps=(
        Gap(_ENTROPY, _legacy("actor/dp_actor.py", "DataParallelPPOActor.__init__")),
        Gap(_BATCHES, _legacy("actor/dp_actor.py", "DataParallelPPOActor.compute_log_prob")),
        Gap(FSDP1, _WORKER, strategy="fsdp"),
    ),
)
