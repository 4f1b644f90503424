"""Why a fix cannot be tried in a check, known before weights load; "" where it can.

guide-*.toml and probes.toml name these functions.
"""

from __future__ import annotations

from mismatch.experiments.fixes.base import Context
from mismatch.experiments.fixes.spec_edits import ABSENT, engine_argument
from mismatch.specs import AS_STORED

NO_EXPERTS = "the model is dense: it has no experts"
NOT_PACKED = "sequences are not packed"
UNKNOWN = "not known without the model's config.json: hf download MODEL config.json"
PLAIN = ("", "bfloat16", "float16", "float32", "float64")
FULL_KV = {ABSENT, "auto", "bfloat16"}
CASCADE_GONE = (0, 32)  # vLLM's release without it; off by default for some releases before that


def always(context: Context) -> str:
    return ""


# ---------------------------------------------------------------- trainer


def not_plain(context: Context) -> str:
    return "the trainer runs plain attention" if context.spec.train.attention == "plain" else ""


def has_sinks(context: Context) -> str:
    if not context.model.described:
        return UNKNOWN
    return "" if context.model.sinks else "the model has no attention sinks"


def has_experts(context: Context) -> str:
    if not context.model.described:
        return UNKNOWN
    return "" if context.model.experts else NO_EXPERTS


def low_head(context: Context) -> str:
    train = context.spec.train
    in_fp32 = train.dtype == "fp32" and not train.autocast
    return "the trainer computes in float32 already" if in_fp32 else ""


def low_router(context: Context) -> str:
    return has_experts(context) or low_head(context)


def replayable(context: Context) -> str:
    if reason := has_experts(context):
        return reason
    captured = context.spec.rollout.engine.routing
    return "" if captured else "the engine's experts are not captured (--no-routing)"


def autocasts(context: Context) -> str:
    return "" if context.spec.train.autocast else "no autocast is in force"


def packed(context: Context) -> str:
    return "" if context.spec.train.layout == "packing" else NOT_PACKED


def tempered(context: Context) -> str:
    if context.spec.rollout.sampling.temperature in (0.0, 1.0):
        return "the temperature is 1 (or sampling is greedy): there is nothing to divide by"
    return ""


# ---------------------------------------------------------------- engine


def of_vllm(context: Context) -> str:
    name = context.spec.rollout.engine.engine
    return "" if name == "vllm" else f"a setting of vLLM, and the engine is {name}"


def on_gpu(context: Context, what: str) -> str:
    if reason := of_vllm(context):
        return reason
    return "" if context.machine.gpus else f"{what} only on a GPU, and there is none"


def started_here(context: Context) -> str:
    remote = context.spec.rollout.engine.servers
    return "servers run as they were started" if remote else ""


def raw_logprobs(context: Context) -> str:
    sampling = context.spec.rollout.sampling
    if engine_argument(context.spec, "logprobs_mode") != "raw_logprobs":
        return of_vllm(context) or (
            "the engine gives processed logprobs wherever they differ from raw"
        )
    if sampling.temperature in (0.0, 1.0) and not sampling.truncates:
        return "raw and processed logprobs are the same at temperature 1 without truncation"
    return ""


def truncates(context: Context) -> str:
    cuts = context.spec.rollout.sampling.truncates
    return "" if cuts else "nothing is cut: top-p is 1 and top-k is off"


def implicit_generation(context: Context) -> str:
    names = ("generation_config", "override_generation_config")
    given = [engine_argument(context.spec, name) for name in names]
    if all(value is ABSENT for value in given) or given == ["vllm", ABSENT]:
        return of_vllm(context) or "sampling settings are sent explicitly already"
    return ""


def low_engine_head(context: Context) -> str:
    if context.spec.rollout.engine.dtype == "fp32":
        return "the engine computes in float32 already"
    return of_vllm(context)


def _serves_mxfp4(context: Context) -> bool:
    """Return whether vLLM's own MXFP4 kernels run, which compute in bf16."""
    engine = context.spec.rollout.engine
    stored = engine.weights == AS_STORED and context.model.stored_dtype == "mxfp4"
    return engine.engine == "vllm" and (stored or engine.weights == "mxfp4")


def any_dtype(context: Context) -> str:
    if _serves_mxfp4(context):
        return "vLLM's MXFP4 experts compute in bf16 alone; with --rollout-weights bf16 it can run"
    remote = context.spec.rollout.engine.servers
    return "servers run with their own settings" if remote else ""


def batch_invariant(context: Context) -> str:
    if _serves_mxfp4(context):
        return "vLLM's MXFP4 kernels for this are not batch invariant"
    reason = on_gpu(context, "vLLM has batch-invariant kernels")
    capability = context.machine.capability
    if reason or capability is None or capability >= (8, 0):
        return reason
    return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"


def prefix_cache(context: Context) -> str:
    if context.machine.cpu_build and context.model.experts and context.spec.rollout.engine.routing:
        return of_vllm(context) or (
            "prefix caching is off already, for the capture of routes on a CPU"
        )
    return of_vllm(context)


def cascade(context: Context) -> str:
    version = context.machine.vllm
    if not of_vllm(context) and version is not None and version >= CASCADE_GONE:
        return f"vLLM {version[0]}.{version[1]} has no cascade attention any more"
    return on_gpu(context, "cascade attention exists")


def compiles(context: Context) -> str:
    return on_gpu(context, "vLLM compiles and captures graphs")


def small_kv(context: Context) -> str:
    if engine_argument(context.spec, "kv_cache_dtype") in FULL_KV:
        return of_vllm(context) or "the KV cache is not quantised"
    return ""


def quantised_weights(context: Context) -> str:
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
