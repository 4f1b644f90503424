"""The scorings of one training world: trainer, noise floor, second pass, fourth of the square,
and one long sequence (see mismatch.experiments.beyond).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from mismatch.analysis.square import precision_of
from mismatch.engines.registry import engine_info
from mismatch.errors import MismatchError
from mismatch.facts import SideFacts
from mismatch.keys import (
    ALONE,
    APART,
    FIRST,
    GRAD,
    NEW,
    NEW_REPLAYED,
    PLAIN,
    PLAIN_TRAINER,
    REFERENCE,
    REFERENCE_FIRST,
    REFERENCE_LONG,
    REGROUPED,
    REPEATED,
    REPLAYED,
    SAMPLES,
    TRAIN,
    TRAINER_FLOAT32,
    TRAINER_LONG,
    WEIGHTS,
    Key,
)
from mismatch.models.adapters import is_of_linear_layers
from mismatch.models.config import is_moe, known_model, serves_mxfp4
from mismatch.run.long_rollout import FOLDER as LONG
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
from mismatch.types import NO_MLA

Row = tuple[str, object, TrainSpec]  # name of a pass, whether it is wanted, its settings
# A check needs the trainer as it runs, and kernels may refuse float32.
OPTIONAL: dict[str, Literal["", "any"]] = {TRAIN: "", TRAINER_FLOAT32: "any"}
ROUNDS = ("autocast", "head_dtype", "router_dtype", "temperature_in", "logprobs_dtype")
# Of a pass that shows the function alone: the dtype sets its precision, nothing disturbs it.
EXACT: dict[str, Any] = {
    **dict.fromkeys(("autocast", "head_dtype", "router_dtype", "logprobs_dtype")),
    "temperature_in": "fp32",
    "dtype": "fp32",
    "master_dtype": "auto",  # the same numbers, in half the memory for bf16 weights
    "grad": False,
    "replay_routing": None,
    "replay_source": None,
    "inject": (),
}
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


def wants_square(spec: CheckSpec) -> bool:
    """Whether a check makes these passes. They are read against the noise floor's reference."""
    return spec.noise_floor and not spec.quick


def wants_long(spec: CheckSpec) -> bool:
    """Return whether a check scores a long sequence: it is read against the square's levels.

    Tokens outside a truncated distribution would have no log-probability on the engine's side.
    """
    asked = spec.context_length != 0 and wants_square(spec)
    return asked and not spec.rollout.sampling.truncates


def plain_of(train: TrainSpec, dtype: Dtype, fp8_kv: bool = False) -> TrainSpec:
    """Return a plain forward of the same weights: held and computed in one dtype, nothing fused.

    Args:
        fp8_kv: keys and values are rounded to fp8, as a cache of that dtype does.
    """
    return replace(
        own_code(train),
        **EXACT | {"dtype": dtype},
        attention="plain-fp8-kv" if fp8_kv else "plain",
        experts="eager" if is_moe(train.model, train.revision) else "auto",
        layout="padding",
    )


def applies_adapter(spec: CheckSpec) -> bool:
    """Return whether the engine may apply its adapter itself, and a plain forward can do so too.

    Which of the two the engine does is known when it has started, in its environment.
    """
    engine, own = spec.rollout.engine, spec.train.adapter
    can = engine.adapter is not None and engine.adapter_as != "merged"
    return bool(can and own and engine_info(engine.engine).no_adapter and is_of_linear_layers(own))


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


def float32_engine(
    spec: RolloutSpec, split: int = 0, offload: int = 0, layers: int = 0
) -> RolloutSpec | None:
    """Return the same engine in float32, to score the tokens that it sampled.

    Args:
        split: its tensor parallel size; 0: as it samples.
        offload: GiB of each GPU's weights that vLLM keeps in the host's memory.
        layers: its first layers alone; 0: as it samples.

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
        layers=layers or engine.layers,
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


def training_passes(spec: CheckSpec) -> list[Pass]:
    """Return what one training world scores: the trainer first, then what it is compared with.

    A row is a name, whether this check makes the pass, and its settings; passes of the same weights
    follow each other, and those over the long sequence come last. A framework's code
    (``spec.train.scorer``) makes no second pass of PPO and no other weights; the reference and the
    plain forwards are computed by mismatch's own code.
    """
    train, engine, floor = spec.train, spec.rollout.engine, spec.noise_floor
    ours, inject = train.scorer == OWN_SCORER, spec.inject
    precision = precision_of(_facts(train))
    regrouped = replace(train, micro_batch_tokens=max(256, train.micro_batch_tokens // 4))
    second = replace(regrouped, inject=inject, inject_seed=spec.seed) if inject else regrouped
    twice = bool(spec.two_passes or (inject and spec.two_passes is not False))
    replays = ours and twice and train.routing and train.replay_routing is None
    replays = replays and bool(is_moe(train.model, train.revision))
    exact = wants_square(spec) and precision != "fp32"
    other = replace(train, weights=spec.weights_effect or train.weights)
    if spec.weights_effect == "bf16":  # of the engine's checkpoint
        other = replace(other, model=engine.model, revision=engine.revision)
    rows: list[Row] = [
        (TRAIN, True, train),
        (REGROUPED, floor or (ours and spec.two_passes and not inject), regrouped),
        (REPEATED, floor, train),
        (ALONE, floor and not ours, train),  # whether sequences of one batch see each other
        (GRAD, floor and ours and not train.grad, replace(train, grad=True, routing=False)),
        (NEW, ours and inject, second),
        (NEW_REPLAYED, replays, replace(second, replay_routing="ids", replay_source=TRAIN)),
        (REPLAYED, replays and spec.two_passes and engine.routing,
            replace(train, replay_routing="ids")),
        (TRAINER_FLOAT32, exact, in_float32(train)),
        (WEIGHTS, ours and spec.weights_effect, other),  # behind the trainer's own weights
    ]  # fmt: skip
    if floor:
        reference = reference_of(train)
        same = replace(reference, micro_batch_tokens=train.micro_batch_tokens) == train
        rows.append((REFERENCE, not (ours and same), reference))
    if wants_square(spec):
        used = {precision_of(_engine_facts(engine)), precision}
        for name in sorted(name for name in used if name and name != "fp32"):
            dtype = next(dtype for dtype in DTYPES if dtype == name.partition("-")[0])
            plain = plain_of(train, dtype, fp8_kv=name.endswith("-fp8kv"))
            plain = replace(plain, routing=False)
            rows.append((Key.of(PLAIN, precision=name), True, plain))
            apart = replace(plain, adapter_as="own")  # of an engine that does not merge
            rows.append((Key.of(PLAIN, APART, name), applies_adapter(spec), apart))
        declares = precision not in (None, "fp32") and declares_more(spec)
        rows.append((PLAIN_TRAINER, declares, replace(as_declared(train), routing=False)))
    long: list[Row] = []
    if wants_long(spec):
        unrouted = replace(train, routing=False, replay_routing=None, replay_source=None)
        as_it_runs = replace(unrouted, grad=False)
        long = [
            (REFERENCE_LONG, True, replace(reference_of(train), routing=False)),
            (TRAINER_LONG, ours, in_float32(train) if exact else as_it_runs),
            (TRAIN.over_long(), ours and exact, as_it_runs),
        ]
        plains = [row for row in rows if Key(row[0]).side == PLAIN]
        long += [(Key(name).over_long(), yes, made) for name, yes, made in plains]
    return [
        *(Pass(name, made, "", OPTIONAL.get(name, "memory")) for name, yes, made in rows if yes),
        *(Pass(name, made, LONG, "any") for name, yes, made in long if yes),
    ]


def first_passes(spec: CheckSpec, layers: int) -> list[Pass]:
    """Return what an engine of the first layers in float32 is judged by; 0 layers: nothing."""
    train, dtype = replace(spec.train, layers=layers), spec.rollout.engine.dtype
    rows: dict[str, Dtype] = {REFERENCE_FIRST: "fp32", Key.of(PLAIN, FIRST, dtype): dtype}
    made = {name: replace(plain_of(train, each), routing=False) for name, each in rows.items()}
    return [Pass(name, each, "", "any") for name, each in made.items() if layers]


def with_few(passes: list[Pass], few: bool) -> list[Pass]:
    """Return passes of which the trainer's own in float32 scores, with ``few``, first samples."""
    return [
        replace(each, folder=SAMPLES)
        if few and each.name == TRAINER_FLOAT32 and each.spec.scorer == OWN_SCORER
        else each
        for each in passes
    ]


def in_float32(train: TrainSpec) -> TrainSpec:
    """Return the same trainer without what sets a precision; kernels, layout and adapters stay."""
    return replace(train, **EXACT, routing=False)


def reference_of(train: TrainSpec) -> TrainSpec:
    """Return the plain forward of the same weights in float32."""
    return plain_of(train, "fp32")


def as_declared(train: TrainSpec) -> TrainSpec:
    """Return a plain forward that rounds where the trainer declares that it rounds.

    What a trainer declares is no fault: only what is left can be an excess.
    """
    declared = {name: getattr(train, name) for name in ("master_dtype", *ROUNDS)}
    return replace(plain_of(train, train.dtype), **declared)


def by_load(passes: Sequence[Pass]) -> list[Pass]:
    """Return passes of the same weights in a row, then those of the same kernels, else as they
    come; of these, passes that may fail last.
    """
    weights: dict[Any, int] = {}
    kernels: dict[Any, int] = {}
    for number, pass_ in enumerate(passes):
        weights.setdefault(weights_key(pass_.spec), number)
        kernels.setdefault(load_key(pass_.spec), number)

    def load_order(pass_: Pass) -> tuple[int, int, bool]:
        spec = pass_.spec
        return weights[weights_key(spec)], kernels[load_key(spec)], pass_.optional == "any"

    return sorted(passes, key=load_order)
