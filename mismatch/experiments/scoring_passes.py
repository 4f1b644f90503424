"""The scorings of one training world: trainer, noise floor, second pass, fourth of the square."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mismatch.analysis.square import precision_of
from mismatch.errors import MismatchError
from mismatch.experiments.jobs import Job
from mismatch.facts import SideFacts
from mismatch.keys import (
    ALONE,
    GRAD,
    NEW,
    NEW_REPLAYED,
    PLAIN,
    PLAIN_TRAINER,
    REFERENCE,
    REGROUPED,
    REPEATED,
    REPLAYED,
    TRAIN,
    TRAINER_FLOAT32,
    WEIGHTS,
    Key,
)
from mismatch.models.config import is_moe, known_model, serves_mxfp4
from mismatch.run.machine import local_gpus
from mismatch.specs import (
    DTYPES,
    OWN_SCORER,
    CheckSpec,
    Dtype,
    EngineSpec,
    Pass,
    RolloutSpec,
    TrainSpec,
    load_key,
    weights_key,
)

REDUCING = ("kv_cache_dtype", "calculate_kv_scales", "quantization")  # engine arguments
# Scoring gains little from CUDA graphs and compiled kernels: on an H200 graphs alone took 43 of
# this engine's 101 s.
NO_GRAPHS = {"vllm": ("enforce_eager", True), "sglang": ("disable_cuda_graph", True)}
GRAPHS = {"enforce_eager", "compilation_config", "disable_cuda_graph"}  # what sets them
# The kernels for CUDA that take float32; the engines choose others without a look at the dtype.
TAKES_FLOAT32 = {"sglang": (("attention_backend", "triton"),)}
EXPERTS_TAKE_FLOAT32 = {
    "vllm": (("moe_backend", "triton"),),
    "sglang": (("moe_runner_backend", "triton"),),
}
OFFLOAD = "cpu_offload_gb"  # vLLM's name
NO_MLA = ("VLLM_MLA_DISABLE", "1")  # vLLM's kernels for MLA on CUDA take no float32


def wants_square(spec: CheckSpec) -> bool:
    """Whether a check makes these passes. They are read against the noise floor's reference."""
    return spec.noise_floor and not spec.quick


def plain_of(train: TrainSpec, dtype: Dtype, fp8_kv: bool = False) -> TrainSpec:
    """Return a plain forward of the same weights: held and computed in one dtype, nothing fused.

    Args:
        fp8_kv: keys and values are rounded to fp8, as a cache of that dtype does.
    """
    return replace(
        own_code(train),
        dtype=dtype,
        master_dtype="auto",  # the same numbers, in half the memory for bf16 weights
        autocast=None,
        head_dtype=None,
        router_dtype=None,
        temperature_in="fp32",
        logprobs_dtype=None,
        attention="plain-fp8-kv" if fp8_kv else "plain",
        experts="eager" if is_moe(train.model, train.revision) else "auto",
        layout="padding",
        grad=False,
        replay_routing=None,
        replay_source=None,
        inject=(),
    )


def plain_passes(spec: CheckSpec) -> list[Pass]:
    """One a reduced precision in use, ``plain:<precision>``; none where no yardstick is defined.

    A trainer that declares more than its precision has a separate plain forward: what it declares
    is no fault, and only what is left can be an excess.
    """
    if not wants_square(spec):
        return []
    facts = _facts(spec.train)
    names = {precision_of(each) for each in (_engine_facts(spec.rollout.engine), facts)}
    passes = []
    for name in sorted(name for name in names if name):
        dtype, _, cache = name.partition("-")
        short = next(name for name in DTYPES if name == dtype)
        if name == "fp32":
            continue
        plain = replace(plain_of(spec.train, short, fp8_kv=bool(cache)), routing=False)
        passes.append(Pass(Key.of(PLAIN, precision=name), plain))
    if declares_more(spec) and precision_of(facts) not in (None, "fp32"):
        train = spec.train
        own = replace(
            plain_of(train, train.dtype),
            master_dtype=train.master_dtype,
            autocast=train.autocast,
            head_dtype=train.head_dtype,
            router_dtype=train.router_dtype,
            temperature_in=train.temperature_in,
            logprobs_dtype=train.logprobs_dtype,
            routing=False,
        )
        passes.append(Pass(PLAIN_TRAINER, own))
    return passes


def declares_more(spec: CheckSpec) -> bool:
    """Return whether the trainer declares how it rounds beyond its dtype."""
    train, plain = spec.train, TrainSpec()
    names = ["logprobs_dtype", "autocast", "head_dtype"]
    names += ["temperature_in"] * int(spec.rollout.sampling.temperature not in (0.0, 1.0))
    names += ["router_dtype"] * bool(is_moe(train.model, train.revision))
    return any(getattr(train, name) != getattr(plain, name) for name in names)


def _facts(train: TrainSpec) -> SideFacts:
    return {"dtype": train.dtype, "autocast": train.autocast}


def _engine_facts(engine: EngineSpec) -> SideFacts:
    given = {name.lstrip("-").replace("-", "_"): value for name, value in engine.args}
    return {
        "dtype": engine.dtype,
        "kv_cache_dtype": given.get("kv_cache_dtype"),
        "quantization": given.get("quantization"),
    }


def float32_engine(spec: RolloutSpec, split: int = 0, offload: int = 0) -> RolloutSpec | None:
    """Return the same engine in float32, to score the tokens that it sampled.

    Args:
        split: its tensor parallel size; 0: as it samples.
        offload: GiB of each GPU's weights that vLLM keeps in the host's memory.

    Returns:
        None where the engine computes in float32 anyway.

    Raises:
        MismatchError: servers, which run as they were started.
    """
    engine = spec.engine
    if precision_of(_engine_facts(engine)) == "fp32":
        return None
    if engine.servers:
        fault = "servers run at the precision that they were started in"
        raise MismatchError(fault, "check a local engine of the same version")
    names = [name.lstrip("-").replace("-", "_") for name, _ in engine.args]
    kept = [pair for name, pair in zip(names, engine.args, strict=True) if name not in REDUCING]
    if engine.engine in NO_GRAPHS and GRAPHS.isdisjoint(names):
        kept.append(NO_GRAPHS[engine.engine])
    kept += [(OFFLOAD, offload)] if offload else []
    packed, env = serves_mxfp4(engine), engine.env
    if local_gpus():
        shape = known_model(engine.model, engine.revision)
        needed = [*TAKES_FLOAT32.get(engine.engine, ())]
        if shape is not None and shape.experts:
            needed += EXPERTS_TAKE_FLOAT32.get(engine.engine, ())
        kept += [pair for pair in needed if pair[0] not in names]
        if engine.engine == "vllm" and shape is not None and shape.latent:
            env = (*env, NO_MLA) if NO_MLA[0] not in dict(env) else env
    exact = replace(
        engine,
        dtype="fp32",
        tensor_parallel_size=split or engine.tensor_parallel_size,
        args=tuple(kept),
        env=env,
        routing=False,
        prefill=True,
        adapter_as="merged" if engine.adapter_as == "merged" else None,  # own if it can in fp32
        weights="bf16" if packed else engine.weights,  # dequantised: engines refuse MXFP4 with it
    )
    return replace(spec, engine=exact, exact_kl=0)


def own_code(train: TrainSpec) -> TrainSpec:
    """Return the spec with mismatch's own FSDP2 world in place of an adapter, in this interpreter.

    The interpreter of an adapter's framework is for the framework alone: the passes that everything
    is measured from do not depend on its versions.
    """
    if train.scorer == OWN_SCORER:
        return train
    return replace(
        train,
        scorer=OWN_SCORER,
        python=None,
        scorer_config=None,
        scorer_overrides=(),
        accelerate_config=None,
    )


def adapter_passes(spec: CheckSpec) -> list[Pass]:
    """Return what a trainer adapter scores, the headline first, then our own float32 and plain.

    ``fsdp:alone`` shows whether sequences of one batch see each other.
    """
    train = spec.train
    passes = [Pass(TRAIN, train)]
    if not spec.noise_floor:
        return passes
    passes += [Pass(REGROUPED, regrouped(train)), Pass(REPEATED, train), Pass(ALONE, train)]
    passes += trainer_in_float32(spec)
    return [*passes, Pass(REFERENCE, reference_of(train)), *plain_passes(spec)]


def trainer_in_float32(spec: CheckSpec) -> list[Pass]:
    """Return the pass of the trainer's own implementation in float32; none where it runs so anyway.

    Kernels, layout, packing and adapters stay; only what sets a precision changes.
    """
    train = spec.train
    if not wants_square(spec) or precision_of(_facts(train)) == "fp32":
        return []
    exact = replace(
        train,
        dtype="fp32",
        master_dtype="auto",
        autocast=None,
        head_dtype=None,
        router_dtype=None,
        temperature_in="fp32",
        logprobs_dtype=None,
        grad=False,
        routing=False,
        replay_routing=None,
        replay_source=None,
        inject=(),
    )
    return [Pass(TRAINER_FLOAT32, exact)]


def training_passes(spec: CheckSpec) -> list[Pass]:
    """Return what one training world has to score: the trainer, and what its noise floor needs."""
    train = spec.train
    if train.scorer != OWN_SCORER:
        return adapter_passes(spec)
    passes = [Pass(TRAIN, train)]
    effect = []  # after all passes with the trainer's own weights: one load more, not two
    if spec.weights_effect is not None:
        held: dict[str, Any] = {"weights": spec.weights_effect}
        if spec.weights_effect == "bf16":  # of the engine's checkpoint
            engine = spec.rollout.engine
            held |= {"model": engine.model, "revision": engine.revision}
        effect.append(Pass(WEIGHTS, replace(train, **held)))
    if not spec.noise_floor:
        return passes + second_passes(spec) + effect
    passes.append(Pass(REGROUPED, regrouped(train)))
    passes.append(Pass(REPEATED, train))
    if not train.grad:
        passes.append(Pass(GRAD, replace(train, grad=True, routing=False)))
    passes += second_passes(spec) + trainer_in_float32(spec) + effect
    reference = reference_of(train)
    if replace(reference, micro_batch_tokens=train.micro_batch_tokens) != train:
        passes.append(Pass(REFERENCE, reference))
    return passes + plain_passes(spec)


def second_passes(spec: CheckSpec) -> list[Pass]:
    """Return what PPO's second forward pass takes beyond the passes of the noise floor.

    The trainer regrouped is a second pass; noise is injected into a copy of it. Router replay of
    the first pass in the second, and of the engine in the trainer, are made where asked for.
    """
    train, new = spec.train, regrouped(spec.train)
    passes = []
    if spec.inject:
        new = replace(new, inject=spec.inject, inject_seed=spec.seed)
        passes.append(Pass(NEW, new))
    elif spec.two_passes and not spec.noise_floor:
        passes.append(Pass(REGROUPED, new))
    wanted = spec.two_passes or (spec.inject and spec.two_passes is not False)
    if not wanted or not train.routing or train.replay_routing is not None:
        return passes
    if is_moe(train.model, train.revision):
        passes.append(Pass(NEW_REPLAYED, replace(new, replay_routing="ids", replay_source=TRAIN)))
        if spec.two_passes and spec.rollout.engine.routing:
            passes.append(Pass(REPLAYED, replace(train, replay_routing="ids")))
    return passes


def regrouped(train: TrainSpec) -> TrainSpec:
    """Return the same trainer with other micro-batches."""
    return replace(train, micro_batch_tokens=max(256, train.micro_batch_tokens // 4))


def reference_of(train: TrainSpec) -> TrainSpec:
    """Return the plain forward of the same weights in float32."""
    return plain_of(train, "fp32")


def by_load(jobs: list[Job]) -> list[Job]:
    """Return passes of the same weights in a row, then those of the same kernels, else as they
    come; of these, optional passes last.
    """
    weights: dict[Any, int] = {}
    kernels: dict[Any, int] = {}
    for number, job in enumerate(jobs):
        weights.setdefault(weights_key(job.pass_.spec), number)
        kernels.setdefault(load_key(job.pass_.spec), number)

    def load_order(job: Job) -> tuple[int, int, bool]:
        spec = job.pass_.spec
        return weights[weights_key(spec)], kernels[load_key(spec)], job.optional

    return sorted(jobs, key=load_order)
