"""Why a fix cannot be tried in a check, known before weights load.

The ``needs`` of a fix in guide-*.toml and probes.toml name rows of :data:`NEEDS`: what has to hold,
and what is said where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mismatch.experiments.fixes.context import Context
from mismatch.experiments.fixes.spec_edits import ABSENT, engine_argument
from mismatch.specs import AS_STORED, QUANTISED_FORMS

PLAIN = ("", "bfloat16", "float16", "float32", "float64")
CASCADE_GONE = (0, 32)  # vLLM's release without it; off by default for some releases before that


def reason_against(needs: Iterable[str], context: Context) -> str:
    """Return what is said of the first need that is not met; "" where all are."""
    for need in needs:
        holds, reason = NEEDS[need]
        if not holds(context):
            return reason.format(spec=context.spec, model=context.model, machine=context.machine)
    return ""


def _tempered(context: Context) -> bool:
    return context.spec.rollout.sampling.temperature not in (0.0, 1.0)


def _cuts(context: Context) -> bool:
    return not context.spec.rollout.sampling.plain


def _mxfp4_kernels(context: Context) -> bool:
    """Return whether vLLM's own MXFP4 kernels run, which compute in bf16."""
    engine = context.spec.rollout.engine
    stored = engine.weights == AS_STORED and context.model.stored_dtype == "mxfp4"
    return engine.engine == "vllm" and (stored or engine.weights == "mxfp4")


def _implicit_generation(context: Context) -> bool:
    names = ("generation_config", "override_generation_config")
    given = [engine_argument(context.spec, name) for name in names]
    return given not in ([ABSENT, ABSENT], ["vllm", ABSENT])


def _made_quantised(context: Context) -> bool:
    """Return whether the flags of the check quantise the engine's weights."""
    form = context.spec.rollout.engine.weights
    by_argument = engine_argument(context.spec, "quantization") not in (ABSENT, None)
    return form in QUANTISED_FORMS or by_argument


def _quantised(context: Context) -> bool:
    as_stored = context.spec.rollout.engine.weights == AS_STORED
    return _made_quantised(context) or (as_stored and context.model.stored_dtype not in PLAIN)


NEEDS: dict[str, tuple[Callable[[Context], object], str]] = {
    "config": (
        lambda c: c.model.described,
        "not known without the model's config.json: hf download MODEL config.json",
    ),
    "sinks": (lambda c: c.model.sinks, "the model has no attention sinks"),
    "experts": (lambda c: c.model.experts, "the model is dense: it has no experts"),
    "other-attention": (
        lambda c: c.spec.train.attention != "plain",
        "the trainer runs plain attention",
    ),
    "reduced-trainer": (
        lambda c: c.spec.train.dtype != "fp32" or c.spec.train.autocast,
        "the trainer computes in float32 already",
    ),
    "captured-experts": (
        lambda c: c.spec.rollout.engine.routing,
        "the engine's experts are not captured (--no-routing)",
    ),
    "autocast": (lambda c: c.spec.train.autocast, "no autocast is in force"),
    "packing": (lambda c: c.spec.train.layout == "packing", "sequences are not packed"),
    "temperature": (
        _tempered,
        "the temperature is 1 (or sampling is greedy): there is nothing to divide by",
    ),
    "vllm": (
        lambda c: c.spec.rollout.engine.engine == "vllm",
        "a setting of vLLM, and the engine is {spec.rollout.engine.engine}",
    ),
    "gpu": (lambda c: c.machine.gpus, "it works only on a GPU, and there is none"),
    "own-engine": (
        lambda c: not c.spec.rollout.engine.servers,
        "servers run with the settings that they were started with",
    ),
    "raw-logprobs": (
        lambda c: engine_argument(c.spec, "logprobs_mode") == "raw_logprobs",
        "the engine gives processed logprobs wherever they differ from raw",
    ),
    "raw-that-differ": (
        lambda c: _tempered(c) or _cuts(c),
        "raw and processed logprobs are the same at temperature 1 without truncation",
    ),
    "truncation": (_cuts, "nothing is cut or penalised: top-p, top-k, min-p, penalty are off"),
    "implicit-generation": (_implicit_generation, "sampling settings are sent explicitly already"),
    "reduced-engine": (
        lambda c: c.spec.rollout.engine.dtype != "fp32",
        "the engine computes in float32 already",
    ),
    "any-dtype": (
        lambda c: not _mxfp4_kernels(c),
        "vLLM's MXFP4 experts compute in bf16 alone; with --weights engine=bf16 it can run",
    ),
    "invariant-kernels": (
        lambda c: not _mxfp4_kernels(c),
        "vLLM's MXFP4 kernels for this are not batch invariant",
    ),
    "capability-8": (
        lambda c: (c.machine.capability or (8, 0)) >= (8, 0),
        "it needs compute capability 8.0, this GPU has "
        "{machine.capability[0]}.{machine.capability[1]}",
    ),
    "prefix-cache": (
        lambda c: not (c.machine.cpu_build and c.model.experts and c.spec.rollout.engine.routing),
        "prefix caching is off already, for the capture of routes on a CPU",
    ),
    "cascade": (
        lambda c: (c.machine.vllm or (0, 0)) < CASCADE_GONE,
        "vLLM {machine.vllm[0]}.{machine.vllm[1]} has no cascade attention any more",
    ),
    "small-kv": (
        lambda c: engine_argument(c.spec, "kv_cache_dtype") not in (ABSENT, "auto", "bfloat16"),
        "the KV cache is not quantised",
    ),
    "quantised": (_quantised, "the engine's weights are not quantised"),
    "servable": (
        lambda c: _made_quantised(c) or c.model.stored_dtype == "mxfp4",
        "the checkpoint is stored in {model.stored_dtype}, and only MXFP4 can be served in bf16",
    ),
}
