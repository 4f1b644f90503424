"""The scorings of one training world: trainer, noise floor, second pass, fourth of the square."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mismatch.analysis.square import precision_of
from mismatch.errors import MismatchError
from mismatch.models.config import is_moe
from mismatch.models.derived import is_mxfp4
from mismatch.run.store import (
    NEW,
    NEW_REPLAYED,
    PLAIN,
    REFERENCE,
    REGROUPED,
    REPLAYED,
    TRAIN,
    WEIGHTS,
)
from mismatch.specs import (
    AS_STORED,
    DTYPES,
    CheckSpec,
    Dtype,
    EngineSpec,
    Pass,
    RolloutSpec,
    TrainSpec,
    from_dict,
    load_key,
    to_dict,
    weights_key,
)

REDUCING = ("kv_cache_dtype", "calculate_kv_scales", "quantization")  # engine arguments


def wants_square(spec: CheckSpec) -> bool:
    """Whether a check makes these passes. They are read against the noise floor's reference."""
    return spec.noise_floor and not spec.quick


def plain_of(train: TrainSpec, dtype: Dtype, fp8_kv: bool = False) -> TrainSpec:
    """A plain forward of the same weights: held and computed in one dtype, nothing fused.

    Args:
        fp8_kv: keys and values are rounded to fp8, as a cache of that dtype does.
    """
    return replace(
        train,
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
    """One a reduced precision in use, ``plain:<precision>``; none where no yardstick is defined."""
    if not wants_square(spec):
        return []
    names = {
        precision_of(facts) for facts in (_engine_facts(spec.rollout.engine), _facts(spec.train))
    }
    passes = []
    for name in sorted(name for name in names if name):
        dtype, _, cache = name.partition("-")
        short = next(known for known in DTYPES if known == dtype)
        if name == "fp32":
            continue
        plain = replace(plain_of(spec.train, short, fp8_kv=bool(cache)), routing=False)
        passes.append(Pass(f"{PLAIN}:{name}", plain))
    return passes


def _facts(train: TrainSpec) -> dict[str, object]:
    return {"dtype": train.dtype, "autocast": train.autocast}


def _engine_facts(engine: EngineSpec) -> dict[str, object]:
    given = {name.lstrip("-").replace("-", "_"): value for name, value in engine.args}
    return {"dtype": engine.dtype, **{name: given.get(name) for name in REDUCING}}


def float32_engine(spec: RolloutSpec) -> RolloutSpec | None:
    """The same engine in float32, to score the tokens that it sampled.

    Returns:
        None where the engine computes in float32 anyway.

    Raises:
        MismatchError: servers, which run as they were started.
    """
    engine = spec.engine
    if precision_of(_engine_facts(engine)) == "fp32":
        return None
    if engine.servers:
        raise MismatchError(
            "servers run at the precision that they were started in",
            "check a local engine of the same version",
        )
    kept = tuple(
        pair for pair in engine.args if pair[0].lstrip("-").replace("-", "_") not in REDUCING
    )
    packed = engine.weights == "mxfp4" or (engine.weights == AS_STORED and _stores_mxfp4(engine))
    exact = replace(
        engine,
        dtype="fp32",
        args=kept,
        routing=False,
        prefill=True,
        weights="bf16" if packed else engine.weights,  # dequantised: engines refuse MXFP4 beside it
    )
    return replace(spec, engine=exact, exact_kl=0)


def _stores_mxfp4(engine: EngineSpec) -> bool:
    directory = Path(engine.model)
    return (directory / "config.json").is_file() and is_mxfp4(directory)


def training_passes(spec: CheckSpec) -> list[Pass]:
    """What one training world has to score: the trainer, and what its noise floor needs."""
    train = spec.train
    passes = [Pass(TRAIN, train)]
    effect = []  # after all passes with the trainer's own weights: one load more, not two
    if spec.weights_effect is not None:
        effect.append(Pass(WEIGHTS, replace(train, weights=spec.weights_effect)))
    if not spec.noise_floor:
        return passes + second_passes(spec) + effect
    passes.append(Pass(f"{TRAIN}:regrouped", regrouped(train)))
    passes.append(Pass(f"{TRAIN}:repeated", train))
    if not train.grad:
        passes.append(Pass(f"{TRAIN}:grad", replace(train, grad=True, routing=False)))
    passes += second_passes(spec) + effect
    reference = reference_of(train)
    if replace(reference, micro_batch_tokens=train.micro_batch_tokens) != train:
        passes.append(Pass(REFERENCE, reference))
    return passes + plain_passes(spec)


def second_passes(spec: CheckSpec) -> list[Pass]:
    """What PPO's second forward pass takes beyond the passes of the noise floor.

    The trainer regrouped is such a pass; noise is injected into a copy of it. Router replay of the
    first pass in the second, and of the engine in the trainer, are made where they were asked for.
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
    """The same trainer with other micro-batches."""
    return replace(train, micro_batch_tokens=max(256, train.micro_batch_tokens // 4))


def reference_of(train: TrainSpec) -> TrainSpec:
    """The plain forward of the same weights in float32."""
    return plain_of(train, "fp32")


@dataclass(frozen=True)
class Job:
    """One pass of a training world.

    Attributes:
        place: run directory whose rollout it scores.
        optional: the others go on where it fails.
        side: a check can do without it: the others go on where memory does not suffice.
    """

    place: Path
    one: Pass
    optional: bool = False
    side: bool = False

    def entry(self, run_dir: Path) -> dict[str, Any]:
        """As the worker reads it."""
        entry: dict[str, Any] = {"name": self.one.name, "spec": to_dict(self.one.spec)}
        entry |= {"run_dir": str(self.place)} if self.place != run_dir else {}
        marks = {"optional": self.optional, "side": self.side}
        return entry | {name: True for name, value in marks.items() if value}

    @classmethod
    def of(cls, entry: dict[str, Any], run_dir: str) -> Job:
        """The inverse of :meth:`entry`."""
        one = Pass(entry["name"], from_dict(TrainSpec, entry["spec"]))
        marks = bool(entry.get("optional")), bool(entry.get("side"))
        return cls(Path(entry.get("run_dir", run_dir)), one, *marks)


def by_load(jobs: list[Job]) -> list[Job]:
    """Passes of the same weights next to each other, then those of the same kernels, else as they
    come; of these, optional ones last.
    """
    weights: dict[Any, int] = {}
    kernels: dict[Any, int] = {}
    for number, job in enumerate(jobs):
        weights.setdefault(weights_key(job.one.spec), number)
        kernels.setdefault(load_key(job.one.spec), number)

    def place(job: Job) -> tuple[int, int, bool]:
        spec = job.one.spec
        return weights[weights_key(spec)], kernels[load_key(spec)], job.optional

    return sorted(jobs, key=place)
