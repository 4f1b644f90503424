"""Keys of verl's config: those that this tool follows, and those that it cannot.

Names and meanings as of verl 0.9.1 (``verl/trainer/config``, ``verl/workers/config``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MODEL, _ACTOR, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
_FSDP = f"{_ACTOR}.fsdp_config"


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Rule:
    """A key that is followed.

    Attributes:
        kind: type of its value.
        targets: (place in the spec, command-line parameter) pairs.
        argument: instead of targets, the engine argument that it becomes (vLLM).
        skip: a value that asks for nothing.
        only: name of the preset that it is for; "": all.
    """

    key: str
    kind: str
    targets: tuple[tuple[str, str], ...] = ()
    argument: str = ""
    skip: Any = None
    only: str = ""
    convert: Callable[[Any], Any] = _same


@dataclass(frozen=True, slots=True)
class KeyGap:
    """A key that matters and cannot be followed, where ``active`` says so of its value."""

    key: str
    active: Callable[[Any], bool]
    what: str
    only: str = ""


def _is_on(value: Any) -> bool:
    return bool(value) and str(value).lower() not in ("false", "none", "disabled")


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _other_than(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in values


def _to(key: str, kind: str, *places: str, **options: Any) -> Rule:
    """A rule for places in the spec; each parameter has the name of its place unless ``:NAME``."""
    pairs = (target.partition(":") for target in places)
    targets = tuple((target, name or target.partition(".")[2]) for target, _, name in pairs)
    return Rule(key, kind, targets, **options)


_DTYPE, _AUTOCAST = "train.dtype:train_dtype", "train.autocast"
_COUNTS = ("max_num_batched_tokens", "max_num_seqs")

RULES: tuple[Rule, ...] = (
    _to(
        f"{_MODEL}.trust_remote_code",
        "switch",
        "engine.trust_remote_code",
        "train.trust_remote_code",
    ),
    _to(
        f"{_MODEL}.use_remove_padding",
        "switch",
        "train.layout",
        convert=lambda value: "packing" if value else "padding",
    ),
    _to(f"{_MODEL}.override_config.attn_implementation", "text", "train.attention"),
    _to(f"{_FSDP}.model_dtype", "dtype", "train.master_dtype"),
    *(  # the actor's own key is the older one; above 1 it wins, as in verl
        _to(f"{section}.ulysses_sequence_parallel_size", "count", "train.sequence_parallel", skip=1)
        for section in (_FSDP, _ACTOR)
    ),
    # The old worker computes and autocasts in `dtype`; the engine takes both from param_dtype.
    _to(f"{_FSDP}.dtype", "dtype", _DTYPE, _AUTOCAST, only="verl-legacy"),
    _to(f"{_FSDP}.mixed_precision.param_dtype", "dtype", _DTYPE),
    _to(
        f"{_FSDP}.mixed_precision.param_dtype",
        "dtype",
        _AUTOCAST,
        only="verl",
        convert=lambda value: None if value == "fp32" else value,
    ),
    _to(f"{_ROLLOUT}.dtype", "dtype", "engine.dtype"),
    _to(f"{_ROLLOUT}.temperature", "number", "sampling.temperature"),
    _to(f"{_ROLLOUT}.top_p", "number", "sampling.top_p"),
    # verl's -1 is off
    _to(f"{_ROLLOUT}.top_k", "whole number", "sampling.top_k", convert=lambda value: max(value, 0)),
    _to(f"{_ROLLOUT}.n", "count", "sampling.samples_per_prompt"),
    _to(f"{_ROLLOUT}.response_length", "count", "sampling.max_tokens"),
    _to(f"{_ROLLOUT}.seed", "whole number", "sampling.seed"),
    _to(f"{_ROLLOUT}.tensor_model_parallel_size", "count", "engine.tensor_parallel_size"),
    _to(f"{_ROLLOUT}.gpu_memory_utilization", "number", "engine.gpu_memory_utilization"),
    _to(f"{_ROLLOUT}.max_model_len", "count", "engine.max_model_len"),
    # What vLLM does anyway is not sent: it leaves room for what this tool needs on a CPU.
    Rule(f"{_ROLLOUT}.enforce_eager", "switch", argument="enforce_eager", skip=False),
    *(
        Rule(f"{_ROLLOUT}.{name}", "switch", argument=name, skip=True)
        for name in ("enable_prefix_caching", "enable_chunked_prefill")
    ),
    *(Rule(f"{_ROLLOUT}.{name}", "count", argument=name) for name in _COUNTS),
    Rule(f"{_ROLLOUT}.logprobs_mode", "text", argument="logprobs_mode", skip="processed_logprobs"),
)

# Engine arguments that have a flag of their own here; in engine_kwargs they win, as in verl.
OWN_ARGUMENTS: dict[str, Rule] = {
    "dtype": _to("dtype", "dtype", "engine.dtype"),
    "seed": _to("seed", "whole number", "sampling.seed"),
    "max_model_len": _to("max_model_len", "count", "engine.max_model_len"),
    "tensor_parallel_size": _to("tensor_parallel_size", "count", "engine.tensor_parallel_size"),
    "gpu_memory_utilization": _to(
        "gpu_memory_utilization", "number", "engine.gpu_memory_utilization"
    ),
}
VERL_TENSOR_PARALLEL = 2  # where rollout.tensor_model_parallel_size is not given

_SWITCHED_ON = {
    f"{_FSDP}.qat.enable": "quantisation-aware training is not reproduced",
    f"{_FSDP}.pad_to_length": "packed rows are not padded to a bucket here",
    f"{_FSDP}.entropy_from_logits_with_chunking": "entropies are always float32 and in chunks "
    "here; logprobs do not depend on it",
    f"{_ACTOR}.use_prefix_grouper": "shared prefixes are not grouped here",
    f"{_MODEL}.use_fused_kernels": "its fused head divides and rounds at other places than the "
    "plain one that runs here",
    f"{_MODEL}.use_liger": "Liger kernels are not used here",
    f"{_MODEL}.lora_adapter_path": "the adapter is not loaded",
    f"{_MODEL}.tiled_mlp.enabled": "the MLP is not computed in tiles here",
    f"{_MODEL}.override_config.model_config": "config.json is taken as it is",
    f"{_MODEL}.hf_config_path": "the model's own config.json is used",
    f"{_MODEL}.tokenizer_path": "the model's own tokenizer is used",
    f"{_MODEL}.custom_chat_template": "the model's own chat template is used",
    f"{_MODEL}.external_lib": "no other code is imported",
    f"{_MODEL}.mtp.enable": "multi-token prediction is not used",
    f"{_ROLLOUT}.quantization": "verl quantises with patches of its own",
    f"{_ROLLOUT}.multi_turn.enable": "one turn per sequence",
    f"{_ROLLOUT}.enable_rollout_routing_replay": "the engine's experts are not replayed in this "
    "run's trainer",
    f"{_ROLLOUT}.ignore_eos": "sequences end at the end-of-sequence token here",
    "data.apply_chat_template_kwargs": "the chat template gets no extra arguments",
    "data.custom_cls.path": "the data set class is not imported",
    "data.filter_overlong_prompts": "long prompts are not left out",
}
_SEVERAL = {
    f"{_ROLLOUT}.expert_parallel_size": "experts are not spread over GPUs",
    f"{_ROLLOUT}.data_parallel_size": "one engine runs, not several",
    f"{_ROLLOUT}.pipeline_model_parallel_size": "no pipeline of GPUs",
}
GAPS: tuple[KeyGap, ...] = (
    KeyGap(
        f"{_ACTOR}.strategy",
        _other_than("fsdp", "fsdp2"),
        "that trainer is not FSDP; the numbers are of FSDP2 with transformers instead",
    ),
    KeyGap(
        f"{_FSDP}.dtype",
        _other_than("bfloat16", "bf16"),
        "verl 0.9.1's FSDP engine does not read it (mixed_precision.param_dtype decides), so "
        "neither does this run",
        only="verl",
    ),
    KeyGap(f"{_MODEL}.lora_rank", lambda value: isinstance(value, int) and value > 0, "no LoRA"),
    KeyGap(
        f"{_ROLLOUT}.do_sample",
        lambda value: value is False,
        "tokens are sampled here: greedy ones follow no law to compare",
    ),
    *(KeyGap(key, _is_on, what) for key, what in _SWITCHED_ON.items()),
    *(KeyGap(key, _above_one, what) for key, what in _SEVERAL.items()),
)
