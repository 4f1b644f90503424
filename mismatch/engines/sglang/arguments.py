"""Arguments and environment for SGLang: what is sent, and what a user may add."""

from __future__ import annotations

import os
from typing import Any

from mismatch.engines.base import (
    argument_name,
    checked_arguments,
    context_needed,
    refuse_own,
)
from mismatch.engines.model_info import ModelInfo
from mismatch.engines.sglang import cpu as sglang_cpu
from mismatch.errors import MismatchError
from mismatch.specs import TORCH_NAMES, EngineSpec
from mismatch.types import Sampling

# Options of mismatch that set these engine arguments: one place to say a thing.
OWN_OPTIONS = {
    "model_path": "--model",
    "tokenizer_path": "--model",
    "revision": "--revision",
    "dtype": "--dtype",
    "tp_size": "--tensor-parallel-size",
    "context_length": "--max-model-len",
    "mem_fraction_static": "--gpu-memory-utilization",
    "random_seed": "--seed",
    "trust_remote_code": "--trust-remote-code",
    "enable_return_routed_experts": "--routing or --no-routing",
}
# They would take the engine out of this process's hands.
KEPT = dict.fromkeys(
    (
        *("custom_sigquit_handler", "skip_tokenizer_init", "nnodes", "node_rank", "use_ray"),
        *("is_embedding", "tokenizer_worker_num", "dp_size"),
    ),
    "SGLang's own setting of this",
)
RAW = "SGLANG_RETURN_ORIGINAL_LOGPROB"  # SGLang's switch: output logprobs at T = 1
# SGLang keeps room behind a prompt, and takes one token less than the context in all.
SPARE_TOKENS = 8


def require_arguments(spec: EngineSpec) -> None:
    """Before the engine's process starts: no argument that mismatch sets itself."""
    refuse_own(spec, OWN_OPTIONS, KEPT)


def set_environment() -> None:
    """What SGLang reads when it is imported; worker process only."""
    sglang_cpu.prepare()


def raw_logprobs() -> bool:
    """Whether SGLang was told to report output logprobs at T = 1."""
    return os.environ.get(RAW, "").lower() in ("1", "true")


def engine_arguments(
    spec: EngineSpec, sampling: Sampling, info: ModelInfo, longest: int
) -> dict[str, Any]:
    """Keyword arguments of SGLang's engine; the user's own (``spec.args``) come last and win."""
    context = spec.max_model_len or context_needed(longest + SPARE_TOKENS, info.context)
    if context < longest + SPARE_TOKENS:
        raise MismatchError(
            f"sequences of up to {longest} tokens, and the context is {context}: SGLang keeps "
            f"{SPARE_TOKENS} tokens of it free",
            f"lower --max-tokens by {longest + SPARE_TOKENS - context}, or raise --max-model-len",
        )
    arguments: dict[str, Any] = {
        "model_path": spec.model,
        "revision": spec.revision,
        "dtype": TORCH_NAMES[spec.dtype],
        "tp_size": spec.tensor_parallel_size,
        "context_length": context,
        "random_seed": sampling.seed,
        "trust_remote_code": spec.trust_remote_code,
        "enable_return_routed_experts": captures_routes(spec, info),
        "log_level": "warning",
    }
    if sglang_cpu.on_cpu():
        arguments |= sglang_cpu.ARGUMENTS
        arguments["max_total_tokens"] = max(arguments["max_total_tokens"], 4 * context)
    if spec.gpu_memory_utilization is not None:
        arguments["mem_fraction_static"] = spec.gpu_memory_utilization
    return arguments | user_arguments(spec)


def captures_routes(spec: EngineSpec, info: ModelInfo) -> bool:
    """Whether routed experts are asked for and exist."""
    return spec.routing and info.moe


def deterministic(spec: EngineSpec) -> bool:
    """Whether seeds decide tokens: SGLang ignores them unless told to be deterministic."""
    given = {argument_name(raw): value for raw, value in spec.args}
    named = ("enable_deterministic_inference", "rl_on_policy_target")
    return any(bool(given.get(name)) for name in named)


def user_arguments(spec: EngineSpec) -> dict[str, Any]:
    """``--engine-arg`` pairs, checked against SGLang's own list.

    Raises:
        MismatchError: unknown name, or a name that mismatch has an option for.
    """
    if not spec.args:
        return {}
    from sglang.srt.server_args import ServerArgs

    known = set(ServerArgs.__struct_fields__)
    help_command = "python -m sglang.launch_server --help"
    return checked_arguments(spec, "SGLang", known, OWN_OPTIONS, KEPT, help_command)
