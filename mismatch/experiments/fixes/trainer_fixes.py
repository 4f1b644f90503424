"""Fixes of the trainer: other settings of the forward pass, on the same tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import VALUE, Context, Fix, Flags
from mismatch.experiments.fixes.spec_edits import fix, train
from mismatch.specs import CheckSpec

NO_EXPERTS = "the model is dense: it has no experts"
NOT_PACKED = "sequences are not packed"
UNKNOWN = "not known without the model's config.json: hf download MODEL config.json"


def _as_reference(context: Context) -> str:
    return "the trainer runs plain attention" if context.spec.train.attention == "plain" else ""


def _with_sinks(context: Context) -> str:
    if not context.model.described:
        return UNKNOWN
    return "" if context.model.sinks else "the model has no attention sinks"


def _with_experts(context: Context) -> str:
    if not context.model.described:
        return UNKNOWN
    return "" if context.model.experts else NO_EXPERTS


def _in_fp32(context: Context) -> bool:
    return context.spec.train.dtype == "fp32" and not context.spec.train.autocast


def _low_head(context: Context) -> str:
    return "the trainer computes in float32 already" if _in_fp32(context) else ""


def _low_router(context: Context) -> str:
    return _with_experts(context) or _low_head(context)


def _replayable(context: Context) -> str:
    if reason := _with_experts(context):
        return reason
    if not context.spec.rollout.engine.routing:
        return "the engine's experts are not captured (--no-routing)"
    return ""


def _tempered(context: Context) -> str:
    if context.spec.rollout.sampling.temperature in (0.0, 1.0):
        return "the temperature is 1 (or sampling is greedy): there is nothing to divide by"
    return ""


def _replay(spec: CheckSpec, value: str) -> CheckSpec:
    if value not in ("ids", "ids+weights"):
        raise MismatchError(
            f"router-replay={value}: no such mode", "router-replay=ids or router-replay=ids+weights"
        )
    return train(replay_routing=value)(spec, value)


def _micro_batch(spec: CheckSpec, value: str) -> CheckSpec:
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise MismatchError(
            f"micro-batch={value} is no number of tokens", "give one: micro-batch=1024"
        )
    return train(micro_batch_tokens=int(value))(spec, value)


def _experts(spec: CheckSpec, value: str) -> CheckSpec:
    return replace(spec, train=replace(spec.train, experts=value))


train_fix = partial(fix, "train")
TRAIN_FIXES = (
    train_fix(
        "attention-sinks",
        Flags(set=(("--attention", "auto"),)),
        train(attention="auto"),
        _with_sinks,
    ),
    train_fix(
        "router-replay",
        Flags(set=(("--replay-routing", VALUE),)),
        _replay,
        _replayable,
        values=("ids", "ids+weights"),
    ),
    train_fix(
        "fp32-router",
        Flags(set=(("--router-dtype", "fp32"),)),
        train(router_dtype="fp32"),
        _low_router,
    ),
    train_fix(
        "fp32-lm-head", Flags(set=(("--head-dtype", "fp32"),)), train(head_dtype="fp32"), _low_head
    ),
    train_fix("fp16", Flags(set=(("--train-dtype", "fp16"),)), train(dtype="fp16", autocast=None)),
    train_fix(
        "fp32",
        Flags(set=(("--train-dtype", "fp32"),)),
        train(dtype="fp32", master_dtype="auto", autocast=None),
    ),
    train_fix(
        "no-autocast",
        Flags(unset=("--autocast",)),
        train(autocast=None),
        lambda context: "" if context.spec.train.autocast else "no autocast is in force",
    ),
    train_fix(
        "experts-implementation",
        Flags(set=(("--experts-implementation", VALUE),)),
        _experts,
        _with_experts,
        values=("eager", "grouped_mm", "batched_mm"),
    ),
    train_fix(
        "expert-memory",
        Flags(set=(("--experts-implementation", "bounded"),)),
        train(experts="bounded"),
        _with_experts,
    ),
    train_fix(
        "no-packing",
        Flags(set=(("--layout", "padding"),)),
        train(layout="padding"),
        lambda context: "" if context.spec.train.layout == "packing" else NOT_PACKED,
    ),
    train_fix(
        "micro-batch", Flags(set=(("--micro-batch-tokens", VALUE),)), _micro_batch, values=("1024",)
    ),
    train_fix(
        "temperature",
        Flags(set=(("--temperature-in", "fp32"),)),
        train(temperature_in="fp32", logprobs_dtype=None),
        _tempered,
    ),
)

FEW = 24  # prompts that are sampled anew


def _sampled_anew(spec: CheckSpec, value: str) -> CheckSpec:
    rollout = spec.rollout
    prompts = replace(rollout.prompts, num_prompts=min(FEW, rollout.prompts.num_prompts))
    sampling = replace(rollout.sampling, seed=rollout.sampling.seed + 1)
    return replace(spec, rollout=replace(rollout, prompts=prompts, sampling=sampling))


def _started_here(context: Context) -> str:
    remote = context.spec.rollout.engine.servers
    return "servers run as they were started" if remote else ""


# Experiments of --explain: they show a cause and mend nothing, so that no list of fixes has them.
PROBES = (
    Fix(
        id="no-sinks",
        side="train",
        summary="the trainer ignores the model's sinks, as an engine's kernel might",
        effect="the mismatch goes where the engine ignores them",
        cost="none",
        flags=Flags(set=(("--attention", "no-sinks"),)),
        apply=train(attention="no-sinks"),
        applies=_with_sinks,
    ),
    Fix(
        id="plain-attention",
        side="train",
        summary="the trainer's attention is computed as its definition says",
        effect="the mismatch goes where the trainer's kernel computes something else",
        cost="time and memory",
        flags=Flags(set=(("--attention", "plain"),)),
        apply=train(attention="plain", layout="padding"),
        applies=_as_reference,
    ),
    Fix(
        id="regenerate",
        side="engine",
        summary="a few prompts are sampled anew by a fresh engine, with another seed",
        effect="the mismatch goes where it came from the state of the process that sampled",
        cost="the engine's start",
        apply=_sampled_anew,
        applies=_started_here,
    ),
)
