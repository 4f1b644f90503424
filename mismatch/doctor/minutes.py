"""About how long a check takes on a GPU: a few constants of runs on an H200, scaled by data sheets.

It adds up what stages take if every response is as long as allowed. It does not know downloads,
traffic between GPUs, stages that overlap, or fixes. CPUs differ too much for constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mismatch.doctor.machine import KINDS, Kind, Machine, kind_of
from mismatch.doctor.memory import BYTES, Workload
from mismatch.experiments.beyond import length_of, long_passes, wanted
from mismatch.experiments.scoring_passes import NO_GRAPHS
from mismatch.models.sizes import SizedModel
from mismatch.specs import AS_STORED, OWN_SCORER, CheckSpec, Dtype, EngineSpec, Pass, weights_key

TIMED = "H200-141GB"
# docs/evidence/gpu-results.md, check of tiny-gpt-oss: vLLM started and sampled in 84 s; in float32
# it started and scored in 101 s. CUDA graphs took 43 s of each: without them 41 and 58 s are left.
START_S, GRAPHS_S = 50.0, 43.0
PASS_S = 1.2  # of the same check: 11 passes of the trainer in 13 s, hardly any of it arithmetic
REST_S = 12.0  # of the same check: 3.5 minutes less the stages
# FLOP/s that solve the two timings of the same page, gpt-oss-20b's shape in bf16: 16 x 2048 tokens
# in 3.20 s, 1 x 16384 in 5.53 s. An engine's attention was not timed: it is taken for products.
PRODUCTS, ATTENTION = 113e12, 23.6e12
# Assumed, never timed: a local disk, a step of decoding apart from its weights, what decoding
# reaches of the data sheet's bandwidth, and sequences that decode at the same time.
DISK_BYTES_S, STEP_S, BANDWIDTH, AT_ONCE = 1e9, 0.02, 0.5, 256
ON_CPUS = "no minutes for CPUs: no constant is within a factor of 2 of what was timed there"
LEFT_OUT = (
    "not in the minutes: downloads, fixes, traffic between GPUs; disks that read under 1 GB/s"
)


@dataclass(frozen=True, slots=True)
class Time:
    """How long a check takes.

    >>> Time({"engine: start": 50.0, "fsdp": 10.0}).seconds
    60.0

    Attributes:
        stages: seconds of each, in the order of a run; empty: they cannot be estimated.
        notes: what the estimate rests on, or why there is none.
    """

    stages: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


def forward_s(
    shape: SizedModel, tokens: int, longest: int, kind: Kind, dtype: Dtype, engine: bool = False
) -> float:
    """Return the seconds of a forward pass on one GPU.

    Float32 adds its products at the data sheet's rate without tensor cores (never timed).

    Args:
        longest: tokens of a sequence, each of which attends to all of them.
        engine: its attention is as fast as its other products.
    """
    idle = shape.expert_parameters * (1 - shape.top_k / shape.experts) if shape.experts else 0
    embedding = 0 if shape.tied else shape.vocab * shape.hidden
    products = 2.0 * tokens * (shape.parameters - idle - embedding)
    states = shape.layers * shape.heads * (shape.head_dim + shape.value_dim)
    attention = 2.0 * tokens * longest * states
    scale = KINDS[TIMED].bf16 / kind.bf16
    seconds = scale * (products / PRODUCTS + attention / (PRODUCTS if engine else ATTENTION))
    return seconds + (dtype == "fp32") * (products + attention) / (kind.fp32 * 1e12)


def estimate(
    spec: CheckSpec,
    shapes: tuple[SizedModel, SizedModel],
    work: Workload,
    machine: Machine,
    passes: Iterable[Pass],
    exact: EngineSpec | None = None,
) -> Time:
    """Estimate the seconds of every stage of a check.

    Args:
        shapes: the trainer's model, and the engine's.
        passes: of the trainer, those that fit.
        exact: the engine in float32; None: it is not started.
    """
    if not machine.gpus:
        return Time({}, (ON_CPUS,))
    name = kind_of(machine.gpus[0])
    if not name:
        return Time({}, (f"no minutes: the speed of {machine.gpus[0].name} is not known",))
    kind, (model, served), own = KINDS[name], shapes, spec.rollout.engine
    tokens, world, stages = work.sequences * work.longest, spec.nproc_per_node, {"the rest": REST_S}
    stored = served.stored_bytes(2, keeps_mxfp4=True)
    for engine, label in ((own, "engine"), (exact, f"{own.engine} in float32")):
        if engine is None or own.servers:
            continue
        args, split = dict(engine.args), engine.tensor_parallel_size
        graphs = not args.get("enforce_eager") and NO_GRAPHS.get(engine.engine) not in engine.args
        packed = engine.weights in (AS_STORED, "mxfp4")
        held = served.stored_bytes(BYTES[engine.dtype], keeps_mxfp4=packed)
        # Experts in another form than as stored are written and read once more.
        copied = 0 if packed or served.quantised != "mxfp4" else 2 * served.stored_bytes(2, False)
        stages[f"{label}: start"] = START_S + graphs * GRAPHS_S
        stages[f"{label}: weights"] = (stored + copied) / DISK_BYTES_S
        rescored = forward_s(served, tokens, work.longest, kind, engine.dtype, True) / split
        if engine is own:
            turns = math.ceil(work.sequences / int(args.get("max_num_seqs") or AT_ONCE))
            steps = turns * work.sampling.max_tokens * spec.rollout.prompts.turns
            step = STEP_S + held / split / (BANDWIDTH * kind.bytes_s)
            stages[f"{label}: samples"] = steps * step + rescored
        if engine.prefill:
            stages[f"{label}: rescores"] = rescored
    scored = list(passes)
    loads = len({weights_key(item.spec) for item in scored})
    stages["trainer: weights"] = loads * model.stored_bytes(2, keeps_mxfp4=True) / DISK_BYTES_S
    for item in scored:
        forward = forward_s(model, tokens, work.longest, kind, item.spec.dtype) / world
        stages[item.name] = PASS_S + forward
    if wanted(spec):
        length = length_of(spec, model, tokens, min(gpu.free_bytes for gpu in machine.gpus))[0]
        stages["one long sequence"] = sum(
            PASS_S + forward_s(model, length, length, kind, item.spec.dtype)
            for item in long_passes(spec)
        )
    stages["the rest"] = stages.pop("the rest")
    timed = f"minutes are estimated from runs on an {TIMED}"
    if name != TIMED:
        timed += f"; no run on {name} has checked them"
    others = {own.engine, spec.train.scorer} - {"vllm", OWN_SCORER}
    untimed = [f"{other} was never timed on a GPU" for other in sorted(others)]
    return Time(stages, (timed, *untimed, LEFT_OUT))
