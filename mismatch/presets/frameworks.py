"""What the trainers of verl, TRL and SkyRL run, each setting with its place in their source.

verl: the FSDP engine of today's releases, and the worker of releases up to 0.7. TRL: its GRPO
trainer on accelerate's FSDP2, as ``accelerate_configs/fsdp2.yaml`` starts it. SkyRL: its FSDP
policy worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from mismatch.specs import TrainSpec

# Fields of TrainSpec whose command-line parameter has another name.
PARAMETERS = {"dtype": "train_dtype", "experts": "experts_implementation"}
KERNEL_PACKAGES = ("flash_attn",)
_DEFAULT = TrainSpec()


@dataclass(frozen=True, slots=True)
class Source:
    """Where something was read.

    >>> str(Source("trl", "1.16.0", "trl/trainer/utils.py", "add_fused_lm_head"))
    'trl 1.16.0 trl/trainer/utils.py: add_fused_lm_head'
    """

    package: str
    version: str
    file: str
    symbol: str

    def __str__(self) -> str:
        return f"{self.package} {self.version} {self.file}: {self.symbol}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that the framework does and our trainer can do as well.

    Attributes:
        field: of :class:`TrainSpec`.
        what: what the framework does, in its own terms.
        needs: Python package without which it cannot run here; "": none.
    """

    field: str
    value: Any
    what: str
    source: Source
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """One thing that the framework does and our trainer does not.

    Attributes:
        what: the difference and what it can change, one sentence without a full stop.
        strategy: of FSDP that it belongs to ("fsdp", which is FSDP1); "": to all.
    """

    what: str
    source: Source
    strategy: str = ""


@dataclass(frozen=True, slots=True)
class Applied:
    """A trainer with a preset on.

    Attributes:
        settings: those that took effect, or that the trainer had already.
        kept: choices of the user that differ from the preset, one sentence each.
        not_reproduced: one sentence each.
    """

    train: TrainSpec
    settings: tuple[Setting, ...]
    kept: tuple[str, ...]
    not_reproduced: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Preset:
    """What one framework's trainer runs.

    Attributes:
        title: framework, version and worker, for reports.
    """

    name: str
    title: str
    settings: tuple[Setting, ...]
    gaps: tuple[Gap, ...]

    def apply(
        self, train: TrainSpec, explicit: Collection[str] = (), packages: Iterable[str] = ()
    ) -> TrainSpec:
        """The trainer with this preset's settings; arguments as for :meth:`resolve`."""
        return self.resolve(train, explicit, packages).train

    def resolve(
        self,
        train: TrainSpec,
        explicit: Collection[str] = (),
        packages: Iterable[str] = (),
        settled: Collection[str] = (),
    ) -> Applied:
        """Like :meth:`apply`, with what took effect, what was kept and what is missing.

        Args:
            explicit: command-line parameters (``train_dtype``, ``attention`` …) that the user has
                given; a field that is not at its default counts as given too.
            packages: installed kernel packages, as of :func:`installed_kernels`.
            settled: fields that the framework's own config decides; they are not mentioned.
        """
        have, used, kept, missing = set(packages), [], [], []
        for item in self.settings:
            current = getattr(train, item.field)
            if current == item.value:
                used.append(item)
            elif item.field in settled:
                continue
            elif is_users(train, item.field, explicit):
                kept.append(f"{item.field} is {current}, by request; {self.name}: {item.what}")
            elif item.needs and item.needs not in have:
                missing.append(
                    f"{self.name}: {item.what}; {item.needs} is not installed here, so "
                    f"{item.field} stays {current}"
                )
            else:
                train = replace(train, **{item.field: item.value})
                used.append(item)
        gaps = [f"{self.name}: {gap.what}" for gap in self.gaps]
        return Applied(train, tuple(used), tuple(kept), (*missing, *gaps))


def is_users(train: TrainSpec, field: str, explicit: Collection[str]) -> bool:
    """Whether a field holds the user's own choice."""
    given = PARAMETERS.get(field, field) in explicit
    changed: bool = getattr(train, field) != getattr(_DEFAULT, field)
    return given or changed


def installed_kernels() -> frozenset[str]:
    """Kernel packages that presets ask for and that are installed; imports none of them."""
    from importlib.util import find_spec

    return frozenset(name for name in KERNEL_PACKAGES if find_spec(name) is not None)


VERL_VERSION = "0.9.1"
LEGACY_VERSION = "0.7.1"
PACKED_TOKENS = 16384
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"


def _engine(symbol: str, file: str = ENGINE) -> Source:
    return Source("verl", VERL_VERSION, file, symbol)


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
    title=f"verl {VERL_VERSION}, FSDP engine (strategy fsdp or fsdp2)",
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
        *_shared(
            VERL_VERSION, _engine("HFModelConfig.__post_init__", "verl/workers/config/model.py")
        ),
    ),
    gaps=(
        Gap(_ENTROPY, _engine("FSDPEngine.__init__ (compute_entropy_from_logits)")),
        Gap(_BATCHES, _engine("prepare_micro_batches", "verl/workers/engine/utils.py")),
        Gap(FSDP1, _config(VERL_VERSION, "actor/dp_actor.yaml", "strategy"), strategy="fsdp"),
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


TRL_VERSION = "1.16.0"
ACCELERATE_VERSION = "1.15.0"
GRPO = "trl/trainer/grpo_trainer.py"


def _trl(file: str, symbol: str) -> Source:
    return Source("trl", TRL_VERSION, file, symbol)


def _accelerate(file: str, symbol: str) -> Source:
    return Source("accelerate", ACCELERATE_VERSION, file, symbol)


_POLICY = _accelerate(
    "accelerate/utils/dataclasses.py", "FullyShardedDataParallelPlugin.set_mixed_precision"
)
_LOGPS = _trl(GRPO, "GRPOTrainer._get_per_token_logps_and_entropies")

TRL = Preset(
    name="trl",
    title=f"TRL {TRL_VERSION} GRPO trainer, accelerate {ACCELERATE_VERSION} FSDP2, bf16",
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


SKYRL_VERSION = "0.3.0"
WRAPPER = "skyrl/backends/skyrl_train/workers/model_wrapper.py"


def _skyrl(file: str, symbol: str) -> Source:
    return Source("skyrl", SKYRL_VERSION, file, symbol)


_STRATEGY = "skyrl/backends/skyrl_train/distributed/fsdp_strategy.py"

SKYRL = Preset(
    name="skyrl",
    title=f"SkyRL {SKYRL_VERSION}, FSDP policy worker",
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
