"""Small pure changes of a check's spec, of which fixes are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mismatch.errors import MismatchError
from mismatch.run.machine import local_gpus
from mismatch.specs import AS_STORED, ROUNDED_FORMS, CheckSpec

Change = Callable[[CheckSpec, str], CheckSpec]
ABSENT = object()
VLLM_INVARIANT = (("VLLM_BATCH_INVARIANT", "1"), ("VLLM_USE_FLASHINFER_SAMPLER", "0"))
# Arguments with which an engine's numbers depend least on batches, docs/how-to/exact.md.
EXACT: dict[str, dict[str, Any]] = {
    "transformers": {"attention": "eager"},
    "vllm": {"enable_prefix_caching": False, "enforce_eager": True},
    "sglang": {"enable_deterministic_inference": True, "disable_radix_cache": True},
}
FEW = 24  # prompts that `regenerate` samples again


def on_trainer(spec: CheckSpec, **fields: Any) -> CheckSpec:
    """Set fields of the trainer."""
    return replace(spec, train=replace(spec.train, **fields))


def on_engine(spec: CheckSpec, **fields: Any) -> CheckSpec:
    """Set fields of the engine."""
    changed = replace(spec.rollout.engine, **fields)
    return replace(spec, rollout=replace(spec.rollout, engine=changed))


def engine_argument(spec: CheckSpec, name: str) -> Any:
    """Return a further engine argument that the user gave; ABSENT without one."""
    given = {key.lstrip("-").replace("-", "_"): value for key, value in spec.rollout.engine.args}
    return given.get(name, ABSENT)


def with_argument(spec: CheckSpec, name: str, value: Any) -> CheckSpec:
    """Give the engine a further argument, in place of the user's own."""
    if engine_argument(spec, name) == value:
        return spec
    kept = without_arguments(spec, name)
    return on_engine(kept, args=(*kept.rollout.engine.args, (name, value)))


def without_arguments(spec: CheckSpec, *names: str) -> CheckSpec:
    """Take further engine arguments away: the engine's default, or ours, comes back."""
    given = spec.rollout.engine.args
    kept = tuple(pair for pair in given if pair[0].lstrip("-").replace("-", "_") not in names)
    return spec if kept == given else on_engine(spec, args=kept)


def _replay(spec: CheckSpec, value: str) -> CheckSpec:
    if value not in ("ids", "ids+weights"):
        raise MismatchError(
            f"router-replay={value}: no such mode", "router-replay=ids or router-replay=ids+weights"
        )
    return on_trainer(spec, replay_routing=value)


def _micro_batch(spec: CheckSpec, value: str) -> CheckSpec:
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise MismatchError(
            f"micro-batch={value} is no number of tokens", "give one: micro-batch=1024"
        )
    return on_trainer(spec, micro_batch_tokens=int(value))


def _no_truncation(spec: CheckSpec, value: str) -> CheckSpec:
    rollout = spec.rollout
    return replace(spec, rollout=replace(rollout, sampling=rollout.sampling.uncut()))


def _head_in_fp32(spec: CheckSpec, value: str) -> CheckSpec:
    overrides = engine_argument(spec, "hf_overrides")
    given = dict(overrides) if isinstance(overrides, dict) else {}
    return with_argument(spec, "hf_overrides", given | {"head_dtype": "float32"})


def _full_weights(spec: CheckSpec, value: str) -> CheckSpec:
    """Serve the trainer's own form of the experts, which is never quantised."""
    spec = without_arguments(spec, "quantization")
    rounded = spec.rollout.engine.weights in (*ROUNDED_FORMS, "mxfp4-rounded")
    return on_engine(spec, weights=AS_STORED if rounded else "bf16")


def _sampled_again(spec: CheckSpec, value: str) -> CheckSpec:
    rollout = spec.rollout
    prompts = replace(rollout.prompts, num_prompts=min(FEW, rollout.prompts.num_prompts))
    sampling = replace(rollout.sampling, seed=rollout.sampling.seed + 1)
    return replace(spec, rollout=replace(rollout, prompts=prompts, sampling=sampling))


def _exact(spec: CheckSpec, value: str) -> CheckSpec:
    """Set what a stack can set for equal bits: one dtype, one sequence at a time, no caches."""
    engine = spec.rollout.engine
    for name, setting in EXACT.get(engine.engine, {}).items():
        spec = with_argument(spec, name, setting)
    if engine.engine == "vllm" and local_gpus():  # on a CPU they crash
        kept = [pair for pair in engine.env if pair[0] not in dict(VLLM_INVARIANT)]
        spec = on_engine(spec, env=(*kept, *VLLM_INVARIANT))
    spec = without_arguments(spec, "kv_cache_dtype", "calculate_kv_scales", "quantization")
    plain = dict.fromkeys(("autocast", "head_dtype", "router_dtype", "logprobs_dtype"))
    attention = "eager" if engine.engine == "transformers" else spec.train.attention
    alone = {"micro_batch_tokens": 1, "layout": "padding", "sequence_parallel": 1}
    fields = {"dtype": engine.dtype, "temperature_in": "fp32", "attention": attention}
    return on_trainer(spec, **plain, **alone, **fields)


CHANGES: dict[str, Change] = {
    "replay": _replay,
    "micro_batch": _micro_batch,
    "no_truncation": _no_truncation,
    "head_in_fp32": _head_in_fp32,
    "full_weights": _full_weights,
    "sampled_again": _sampled_again,
    "exact": _exact,
}
