"""Fixes of the engine: other settings, and tokens sampled anew from the same prompts and seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mismatch.experiments.fixes.base import Context, Flags
from mismatch.experiments.fixes.spec_edits import (
    ABSENT,
    Change,
    engine,
    engine_argument,
    fix,
    on_engine,
    with_argument,
    without_arguments,
)
from mismatch.specs import AS_STORED, CheckSpec

PLAIN = ("", "bfloat16", "float16", "float32", "float64")
FULL_KV = {ABSENT, "auto", "bfloat16"}
CASCADE_GONE = (0, 32)  # off by default for some releases before that
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


def _vllm(context: Context) -> str:
    name = context.spec.rollout.engine.engine
    return "" if name == "vllm" else f"a setting of vLLM, and the engine is {name}"


def _started(context: Context) -> str:
    """The engine is one that mismatch starts, with the settings that it likes."""
    remote = context.spec.rollout.engine.servers
    return "servers run with their own settings" if remote else ""


def _on_gpu(what: str) -> Callable[[Context], str]:
    def applies(context: Context) -> str:
        if _vllm(context):
            return _vllm(context)
        return "" if context.machine.gpus else f"{what} only on a GPU, and there is none"

    return applies


def _raw_logprobs(context: Context) -> str:
    sampling = context.spec.rollout.sampling
    if engine_argument(context.spec, "logprobs_mode") != "raw_logprobs":
        return _vllm(context) or "the engine gives processed logprobs wherever they differ from raw"
    if sampling.temperature in (0.0, 1.0) and not sampling.truncates:
        return "raw and processed logprobs are the same at temperature 1 without truncation"
    return ""


def _truncates(context: Context) -> str:
    cuts = context.spec.rollout.sampling.truncates
    return "" if cuts else "nothing is cut: top-p is 1 and top-k is off"


def _no_truncation(spec: CheckSpec, value: str) -> CheckSpec:
    sampling = replace(spec.rollout.sampling, top_p=1.0, top_k=0)
    return replace(spec, rollout=replace(spec.rollout, sampling=sampling))


def _implicit(context: Context) -> str:
    given = [engine_argument(context.spec, name) for name in GENERATION]
    if all(value is ABSENT for value in given) or given == ["vllm", ABSENT]:
        return _vllm(context) or "sampling settings are sent explicitly already"
    return ""


GENERATION = ("generation_config", "override_generation_config")


def _head_in_fp32(spec: CheckSpec, value: str) -> CheckSpec:
    overrides = engine_argument(spec, "hf_overrides")
    given = dict(overrides) if isinstance(overrides, dict) else {}
    return with_argument("hf_overrides", given | {"head_dtype": "float32"})(spec, value)


def _head(context: Context) -> str:
    if context.spec.rollout.engine.dtype == "fp32":
        return "the engine computes in float32 already"
    return _vllm(context)


def _serves_mxfp4(context: Context) -> bool:
    """Whether vLLM's own MXFP4 kernels run, which compute in bf16."""
    engine = context.spec.rollout.engine
    stored = engine.weights == AS_STORED and context.model.stored_dtype == "mxfp4"
    return engine.engine == "vllm" and (stored or engine.weights == "mxfp4")


def _other_dtype(context: Context) -> str:
    if _serves_mxfp4(context):
        return "vLLM's MXFP4 experts compute in bf16 alone; with --rollout-weights bf16 it can run"
    return _started(context)


def _batch_invariant(context: Context) -> str:
    if _serves_mxfp4(context):
        return "vLLM's MXFP4 kernels for this are not batch invariant"
    reason = _on_gpu("vLLM has batch-invariant kernels")(context)
    capability = context.machine.capability
    if reason or capability is None or capability >= (8, 0):
        return reason
    return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"


def _environment(name: str, value: str) -> Change:
    def apply(spec: CheckSpec, _: str) -> CheckSpec:
        kept = tuple(pair for pair in spec.rollout.engine.env if pair[0] != name)
        return on_engine(spec, env=(*kept, (name, value)))

    return apply


def _no_prefix_cache(context: Context) -> str:
    if context.machine.cpu_build and context.model.experts and context.spec.rollout.engine.routing:
        return _vllm(context) or "prefix caching is off already, for the capture of routes on a CPU"
    return _vllm(context)


def _no_cascade(context: Context) -> str:
    version = context.machine.vllm
    if not _vllm(context) and version is not None and version >= CASCADE_GONE:
        return f"vLLM {version[0]}.{version[1]} has no cascade attention any more"
    return _on_gpu("cascade attention exists")(context)


def _small_kv(context: Context) -> str:
    if engine_argument(context.spec, "kv_cache_dtype") in FULL_KV:
        return _vllm(context) or "the KV cache is not quantised"
    return ""


def _quantised_weights(context: Context) -> str:
    form = context.spec.rollout.engine.weights
    quantised = engine_argument(context.spec, "quantization")
    if form in ("mxfp4", "mxfp4-rounded") or quantised not in (ABSENT, None):
        return ""
    stored = context.model.stored_dtype
    if form == AS_STORED and stored == "mxfp4":
        return ""
    if form == AS_STORED and stored not in PLAIN:
        return f"the checkpoint is stored in {stored}, and only MXFP4 can be served in bf16"
    return "the engine's weights are not quantised"


def _full_weights(spec: CheckSpec, value: str) -> CheckSpec:
    """The trainer's own form of the experts, which is never quantised."""
    spec = without_arguments("quantization")(spec, value)
    rounded = spec.rollout.engine.weights == "mxfp4-rounded"
    return on_engine(spec, weights=AS_STORED if rounded else "bf16")


engine_fix = partial(fix, "engine")
ENGINE_FIXES = (
    engine_fix(
        "processed-logprobs",
        Flags(unset=("--engine-arg logprobs_mode",)),
        without_arguments("logprobs_mode"),
        _raw_logprobs,
    ),
    engine_fix(
        "sampling-mask", Flags(set=(("--top-p", "1"), ("--top-k", "0"))), _no_truncation, _truncates
    ),
    engine_fix(
        "explicit-generation-config",
        Flags(set=(("--engine-arg", "generation_config=vllm"),)),
        without_arguments(*GENERATION),
        _implicit,
    ),
    engine_fix(
        "engine-fp32-lm-head",
        Flags(set=(("--engine-arg", 'hf_overrides={"head_dtype": "float32"}'),)),
        _head_in_fp32,
        _head,
    ),
    engine_fix(
        "engine-fp16", Flags(set=(("--dtype", "fp16"),)), engine(dtype="fp16"), _other_dtype
    ),
    engine_fix(
        "engine-fp32", Flags(set=(("--dtype", "fp32"),)), engine(dtype="fp32"), _other_dtype
    ),
    engine_fix(
        "batch-invariant",
        Flags(env=((BATCH_INVARIANT, "1"),)),
        _environment(BATCH_INVARIANT, "1"),
        _batch_invariant,
    ),
    engine_fix(
        "no-prefix-cache",
        Flags(set=(("--engine-arg", "enable_prefix_caching=false"),)),
        with_argument("enable_prefix_caching", False),
        _no_prefix_cache,
    ),
    engine_fix(
        "no-cascade-attention",
        Flags(set=(("--engine-arg", "disable_cascade_attn=true"),)),
        with_argument("disable_cascade_attn", True),
        _no_cascade,
    ),
    engine_fix(
        "bf16-kv-cache",
        Flags(set=(("--engine-arg", "kv_cache_dtype=auto"),)),
        without_arguments("kv_cache_dtype", "calculate_kv_scales"),
        _small_kv,
    ),
    engine_fix(
        "rollout-bf16-weights",
        Flags(set=(("--rollout-weights", "bf16"),), unset=("--engine-arg quantization",)),
        _full_weights,
        _quantised_weights,
    ),
    engine_fix(
        "enforce-eager",
        Flags(set=(("--engine-arg", "enforce_eager=true"),)),
        with_argument("enforce_eager", True),
        _on_gpu("vLLM compiles and captures graphs"),
    ),
)
