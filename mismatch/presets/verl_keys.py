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


def _shared(name: str) -> tuple[tuple[str, str], ...]:
    return ((f"engine.{name}", name), (f"train.{name}", name))


RULES: tuple[Rule, ...] = (
    Rule(f"{_MODEL}.trust_remote_code", "switch", _shared("trust_remote_code")),
    Rule(
        f"{_MODEL}.use_remove_padding",
        "switch",
        (("train.layout", "layout"),),
        convert=lambda value: "packing" if value else "padding",
    ),
    Rule(
        f"{_MODEL}.override_config.attn_implementation", "text", (("train.attention", "attention"),)
    ),
    Rule(f"{_FSDP}.model_dtype", "dtype", (("train.master_dtype", "master_dtype"),)),
    # The old worker computes and autocasts in `dtype`; the engine takes both from param_dtype.
    Rule(
        f"{_FSDP}.dtype",
        "dtype",
        (("train.dtype", "train_dtype"), ("train.autocast", "autocast")),
        only="verl-legacy",
    ),
    Rule(f"{_FSDP}.mixed_precision.param_dtype", "dtype", (("train.dtype", "train_dtype"),)),
    Rule(
        f"{_FSDP}.mixed_precision.param_dtype",
        "dtype",
        (("train.autocast", "autocast"),),
        only="verl",
        convert=lambda value: None if value == "fp32" else value,
    ),
    Rule(f"{_ROLLOUT}.dtype", "dtype", (("engine.dtype", "dtype"),)),
    Rule(f"{_ROLLOUT}.temperature", "number", (("sampling.temperature", "temperature"),)),
    Rule(f"{_ROLLOUT}.top_p", "number", (("sampling.top_p", "top_p"),)),
    Rule(
        f"{_ROLLOUT}.top_k",
        "whole number",
        (("sampling.top_k", "top_k"),),
        convert=lambda value: max(value, 0),  # verl's -1 is off
    ),
    Rule(f"{_ROLLOUT}.n", "count", (("sampling.samples_per_prompt", "samples_per_prompt"),)),
    Rule(f"{_ROLLOUT}.response_length", "count", (("sampling.max_tokens", "max_tokens"),)),
    Rule(f"{_ROLLOUT}.seed", "whole number", (("sampling.seed", "seed"),)),
    Rule(
        f"{_ROLLOUT}.tensor_model_parallel_size",
        "count",
        (("engine.tensor_parallel_size", "tensor_parallel_size"),),
    ),
    Rule(
        f"{_ROLLOUT}.gpu_memory_utilization",
        "number",
        (("engine.gpu_memory_utilization", "gpu_memory_utilization"),),
    ),
    Rule(f"{_ROLLOUT}.max_model_len", "count", (("engine.max_model_len", "max_model_len"),)),
    # What vLLM does anyway is not sent: it leaves room for what this tool needs on a CPU.
    Rule(f"{_ROLLOUT}.enforce_eager", "switch", argument="enforce_eager", skip=False),
    Rule(
        f"{_ROLLOUT}.enable_prefix_caching", "switch", argument="enable_prefix_caching", skip=True
    ),
    Rule(
        f"{_ROLLOUT}.enable_chunked_prefill", "switch", argument="enable_chunked_prefill", skip=True
    ),
    Rule(f"{_ROLLOUT}.max_num_batched_tokens", "count", argument="max_num_batched_tokens"),
    Rule(f"{_ROLLOUT}.max_num_seqs", "count", argument="max_num_seqs"),
    Rule(f"{_ROLLOUT}.logprobs_mode", "text", argument="logprobs_mode", skip="processed_logprobs"),
)

# Engine arguments that have a flag of their own here; in engine_kwargs they win, as in verl.
OWN_ARGUMENTS: dict[str, Rule] = {
    rule.key: rule
    for rule in (
        Rule("dtype", "dtype", (("engine.dtype", "dtype"),)),
        Rule("seed", "whole number", (("sampling.seed", "seed"),)),
        Rule("max_model_len", "count", (("engine.max_model_len", "max_model_len"),)),
        Rule(
            "tensor_parallel_size",
            "count",
            (("engine.tensor_parallel_size", "tensor_parallel_size"),),
        ),
        Rule(
            "gpu_memory_utilization",
            "number",
            (("engine.gpu_memory_utilization", "gpu_memory_utilization"),),
        ),
    )
}
VERL_TENSOR_PARALLEL = 2  # where rollout.tensor_model_parallel_size is not given

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
    KeyGap(f"{_FSDP}.qat.enable", _is_on, "quantisation-aware training is not reproduced"),
    KeyGap(
        f"{_FSDP}.ulysses_sequence_parallel_size",
        _above_one,
        "sequences are not split over ranks here",
    ),
    KeyGap(
        f"{_ACTOR}.ulysses_sequence_parallel_size",
        _above_one,
        "sequences are not split over ranks here",
    ),
    KeyGap(f"{_FSDP}.pad_to_length", _is_on, "packed rows are not padded to a bucket here"),
    KeyGap(
        f"{_FSDP}.entropy_from_logits_with_chunking",
        _is_on,
        "entropies are always float32 and in chunks here; logprobs do not depend on it",
    ),
    KeyGap(f"{_ACTOR}.use_prefix_grouper", _is_on, "shared prefixes are not grouped here"),
    KeyGap(
        f"{_MODEL}.use_fused_kernels",
        _is_on,
        "its fused head divides and rounds at other places than the plain one that runs here",
    ),
    KeyGap(f"{_MODEL}.use_liger", _is_on, "Liger kernels are not used here"),
    KeyGap(f"{_MODEL}.lora_rank", lambda value: isinstance(value, int) and value > 0, "no LoRA"),
    KeyGap(f"{_MODEL}.lora_adapter_path", _is_on, "the adapter is not loaded"),
    KeyGap(f"{_MODEL}.tiled_mlp.enabled", _is_on, "the MLP is not computed in tiles here"),
    KeyGap(f"{_MODEL}.override_config.model_config", _is_on, "config.json is taken as it is"),
    KeyGap(f"{_MODEL}.hf_config_path", _is_on, "the model's own config.json is used"),
    KeyGap(f"{_MODEL}.tokenizer_path", _is_on, "the model's own tokenizer is used"),
    KeyGap(f"{_MODEL}.custom_chat_template", _is_on, "the model's own chat template is used"),
    KeyGap(f"{_MODEL}.external_lib", _is_on, "no other code is imported"),
    KeyGap(f"{_MODEL}.mtp.enable", _is_on, "multi-token prediction is not used"),
    KeyGap(f"{_ROLLOUT}.quantization", _is_on, "verl quantises with patches of its own"),
    KeyGap(f"{_ROLLOUT}.expert_parallel_size", _above_one, "experts are not spread over GPUs"),
    KeyGap(f"{_ROLLOUT}.data_parallel_size", _above_one, "one engine runs, not several"),
    KeyGap(f"{_ROLLOUT}.pipeline_model_parallel_size", _above_one, "no pipeline of GPUs"),
    KeyGap(f"{_ROLLOUT}.multi_turn.enable", _is_on, "one turn per sequence"),
    KeyGap(
        f"{_ROLLOUT}.enable_rollout_routing_replay",
        _is_on,
        "the engine's experts are not replayed in this run's trainer",
    ),
    KeyGap(f"{_ROLLOUT}.ignore_eos", _is_on, "sequences end at the end-of-sequence token here"),
    KeyGap(
        f"{_ROLLOUT}.do_sample",
        lambda value: value is False,
        "tokens are sampled here; greedy is --temperature 0",
    ),
    KeyGap("data.apply_chat_template_kwargs", _is_on, "the chat template gets no extra arguments"),
    KeyGap("data.custom_cls.path", _is_on, "the data set class is not imported"),
    KeyGap("data.filter_overlong_prompts", _is_on, "long prompts are not left out"),
)
