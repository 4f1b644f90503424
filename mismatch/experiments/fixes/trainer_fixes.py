"""Fixes of the trainer: other settings of the forward pass, on the same tokens."""

from __future__ import annotations

from dataclasses import replace

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import VALUE, Context, Fix, Flags
from mismatch.experiments.fixes.spec_edits import train
from mismatch.specs import CheckSpec

NO_EXPERTS = "the model is dense: it has no experts"
UNKNOWN = "not known without the model's config.json: hf download MODEL config.json"


def _as_reference(context: Context) -> str:
    return "the trainer runs plain attention" if context.spec.train.attention == "plain" else ""


def _with_sinks(context: Context) -> str:
    if not context.model.known:
        return UNKNOWN
    return "" if context.model.sinks else "the model has no attention sinks"


def _with_experts(context: Context) -> str:
    if not context.model.known:
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


TRAIN_FIXES = (
    Fix(
        id="attention-sinks",
        side="train",
        summary="the trainer's attention honours the model's learned sinks",
        effect="mends every token where a kernel without sinks ran; else nothing changes",
        cost="the sink kernel's own speed",
        flags=Flags(set=(("--attention", "auto"),)),
        apply=train(attention="auto"),
        applies=_with_sinks,
    ),
    Fix(
        id="router-replay",
        side="train",
        summary="the trainer runs the experts that the engine chose",
        effect="removes disagreement of the routers, not what made them disagree",
        cost="expert ids travel with the rollouts: layers x experts per token x 1 or 2 bytes",
        flags=Flags(set=(("--replay-routing", VALUE),)),
        values=("ids", "ids+weights"),
        apply=_replay,
        applies=_replayable,
    ),
    Fix(
        id="fp32-router",
        side="train",
        summary="the trainer's routers multiply, score and choose in float32",
        effect="fewer near-ties fall the other way",
        cost="one small matmul per layer in float32",
        flags=Flags(set=(("--router-dtype", "fp32"),)),
        apply=train(router_dtype="fp32"),
        applies=_low_router,
    ),
    Fix(
        id="fp32-lm-head",
        side="train",
        summary="the trainer's LM head multiplies in float32",
        effect="removes the rounding of the logits to 8 bits",
        cost="the head's matmul in float32: slower and with larger logits",
        flags=Flags(set=(("--head-dtype", "fp32"),)),
        apply=train(head_dtype="fp32"),
        applies=_low_head,
    ),
    Fix(
        id="fp16",
        side="train",
        summary="the trainer computes in fp16",
        effect="8 times finer rounding than bf16; best with an engine in fp16 too",
        cost="training needs loss scaling; large activations overflow",
        flags=Flags(set=(("--train-dtype", "fp16"),)),
        apply=train(dtype="fp16", autocast=None),
    ),
    Fix(
        id="fp32",
        side="train",
        summary="the trainer computes in float32",
        effect="removes the trainer's rounding; the engine's stays",
        cost="twice the memory of activations, several times the time on a GPU",
        flags=Flags(set=(("--train-dtype", "fp32"),)),
        apply=train(dtype="fp32", master_dtype="auto", autocast=None),
    ),
    Fix(
        id="no-autocast",
        side="train",
        summary="the trainer runs without torch.autocast, in the dtype of the computation",
        effect="operations that autocast keeps in float32, or casts down, follow the model",
        cost="none",
        flags=Flags(unset=("--autocast",)),
        apply=train(autocast=None),
        applies=lambda context: "" if context.spec.train.autocast else "no autocast is in force",
    ),
    Fix(
        id="experts-implementation",
        side="train",
        summary="the trainer's experts run in another implementation",
        effect="another order of the sums in the experts",
        cost="speed and memory differ",
        flags=Flags(set=(("--experts-implementation", VALUE),)),
        values=("eager", "grouped_mm", "batched_mm"),
        apply=_experts,
        applies=_with_experts,
    ),
    Fix(
        id="expert-memory",
        side="train",
        summary="the trainer's experts run with bounded memory, one after the other",
        effect="less memory at the peak; rounding of the experts' sums changes a little",
        cost="slower where many experts are active",
        flags=Flags(set=(("--experts-implementation", "bounded"),)),
        apply=train(experts="bounded"),
        applies=_with_experts,
    ),
    Fix(
        id="no-packing",
        side="train",
        summary="one sequence per row, where nothing can leak from one to the next",
        effect="mends a leak between packed sequences; else only other padding",
        cost="padding is computed too",
        flags=Flags(set=(("--layout", "padding"),)),
        apply=train(layout="padding"),
        applies=lambda context: (
            "" if context.spec.train.layout == "packing" else "sequences are not packed"
        ),
    ),
    Fix(
        id="micro-batch",
        side="train",
        summary="other micro-batches in the trainer",
        effect="shows what the grouping of sequences does; mends nothing by itself",
        cost="small ones are slower",
        flags=Flags(set=(("--micro-batch-tokens", VALUE),)),
        values=("1024",),
        apply=_micro_batch,
    ),
    Fix(
        id="temperature",
        side="train",
        summary="the trainer divides float32 logits by the exact temperature",
        effect="removes the rounding of logits, or of the temperature, before the softmax",
        cost="none",
        flags=Flags(set=(("--temperature-in", "fp32"),)),
        apply=train(temperature_in="fp32", logprobs_dtype=None),
        applies=_tempered,
    ),
)

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
)
