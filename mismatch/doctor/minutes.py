"""About how long a check takes on a GPU: a few constants of runs on an H200, scaled by data sheets.

It adds up what stages take if every response is as long as allowed. It does not know downloads,
traffic between GPUs, stages that overlap, or fixes. CPUs differ too much for constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mismatch.doctor.machine import KINDS, Kind, Machine, kind_of
from mismatch.doctor.memory import BYTES, GIB, Workload, offload_gib
from mismatch.experiments.beyond import length_of
from mismatch.experiments.scoring_passes import NO_GRAPHS
from mismatch.keys import LONG, SAMPLES
from mismatch.models.derived import copied_bytes
from mismatch.models.sizes import SizedModel
from mismatch.specs import AS_STORED, OWN_SCORER, CheckSpec, Dtype, EngineSpec, Pass, weights_key

TIMED = "H200-141GB"
# docs/evidence/gpu-results.md. vLLM started and sampled in 84 s with tiny-gpt-oss, of which CUDA
# graphs took 43; in float32 it started and scored in 101 s, as many for graphs. Nine graphs took
# 29 s of 20b and of two layers of its width alike (51 had taken 101 s and 57 s); in MXFP4 Triton
# compiles kernels meanwhile, and for 12 s more as it samples.
START_S, GRAPHS_S, MXFP4_KERNELS_S = 50.0, 29.0, 30.0
PASS_S = 1.2  # of the same check: 11 passes of the trainer in 13 s, hardly any of it arithmetic
REST_S = 12.0  # of the same check: 3.5 minutes less the stages
# FLOP/s that solve the two timings of the same page, gpt-oss-20b's shape in bf16: 16 x 2048 tokens
# in 3.20 s, 1 x 16384 in 5.53 s. An engine's forward was not timed, and is taken for the same.
PRODUCTS, ATTENTION = 113e12, 23.6e12
# Assumed, never timed: a local disk, a step of decoding apart from its weights, what decoding
# reaches of the data sheet's bandwidth, and sequences that decode at the same time.
DISK_BYTES_S, STEP_S, BANDWIDTH, AT_ONCE = 1e9, 0.02, 0.5, 256
# Of weights in the host's memory, on the same H100: pinning 17.4 GiB took 27 s, and a batch of
# tokens 11 s, because a kernel reads an expert once for every block of its tokens. Two batches more
# warm it up.
PINNED_BYTES_S, BUS_BYTES_S, BATCHED, WARM_UP = 7e8, 1.6e9, 16384, 2
UNPACKED_S = 7.6e7  # MXFP4 values dequantised on a CPU: a layer of gpt-oss-20b took 10.5 s
LONG_PASS_S = 60.0  # in float32: beyond it, one sample of each prompt is scored
ON_CPUS = "no minutes for CPUs: one's speed tells little of another's; vLLM started in 16 to 41 s"
LEFT_OUT = "not in the minutes: downloads, fixes, traffic between GPUs; disks below 1 GB/s"


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


def forward_s(shape: SizedModel, tokens: int, longest: int, kind: Kind, dtype: Dtype) -> float:
    """Return the seconds of a forward pass on one GPU; every token attends to ``longest``.

    Float32 adds its products at the data sheet's rate without tensor cores (never timed).
    """
    idle = shape.expert_parameters * (1 - shape.top_k / shape.experts) if shape.experts else 0
    embedding = 0 if shape.tied else shape.vocab * shape.hidden
    products = 2.0 * tokens * (shape.parameters - idle - embedding)
    states = shape.layers * shape.heads * (shape.head_dim + shape.value_dim)
    attention = 2.0 * tokens * longest * states
    seconds = (products / PRODUCTS + attention / ATTENTION) * KINDS[TIMED].bf16 / kind.bf16
    return seconds + (dtype == "fp32") * (products + attention) / (kind.fp32 * 1e12)


def rescored_s(
    engine: EngineSpec, shape: SizedModel, tokens: int, longest: int, kind: Kind
) -> float:
    """Return the seconds of an engine's prefill of tokens, which attend to ``longest`` each."""
    seconds = forward_s(shape, tokens, longest, kind, engine.dtype) / engine.tensor_parallel_size
    offloaded = offload_gib(dict(engine.args)) * GIB
    return seconds + math.ceil(tokens / BATCHED) * offloaded / BUS_BYTES_S


def float32_s(
    exact: CheckSpec, shapes: tuple[SizedModel, SizedModel], work: Workload, machine: Machine
) -> float:
    """Return the seconds in which the slower side scores all tokens in float32; 0: not known.

    Args:
        exact: a check whose engine runs in float32.
        shapes: the trainer's model, and the engine's.
    """
    name = kind_of(machine.gpus[0]) if machine.gpus else ""
    if not name:
        return 0.0
    kind, size = KINDS[name], (work.sequences * work.longest, work.longest)
    trainer = forward_s(shapes[0], *size, kind, "fp32") / exact.nproc_per_node
    return max(trainer, rescored_s(exact.rollout.engine, shapes[1], *size, kind))


def estimate(
    spec: CheckSpec,
    shapes: Sequence[SizedModel],
    work: Workload,
    machine: Machine,
    passes: Sequence[Pass],
    exact: EngineSpec | None = None,
    few: bool = False,
) -> Time:
    """Estimate the seconds of every stage of a check.

    Args:
        shapes: the trainer's model, the engine's, and that of the engine in float32.
        passes: of the trainer, those that fit.
        exact: the engine in float32; None: it is not started.
        few: in float32 the first sample of each prompt alone is scored.
    """
    if not machine.gpus:
        return Time({}, (ON_CPUS,))
    name, own, world = kind_of(machine.gpus[0]), spec.rollout.engine, spec.nproc_per_node
    if not name:
        return Time({}, (f"no minutes: the speed of {machine.gpus[0].name} is not known",))
    kind, model, stages = KINDS[name], shapes[0], {}
    tokens = work.sequences * work.longest
    labels = "engine", f"{own.engine} in float32"
    for engine, label, served in zip((own, exact), labels, shapes[1:], strict=True):
        if engine is None or own.servers:
            continue
        args, split = dict(engine.args), engine.tensor_parallel_size
        scored = tokens // (work.sampling.samples_per_prompt if few and engine is exact else 1)
        graphs = NO_GRAPHS.get(engine.engine) not in engine.args
        packed = engine.weights in (AS_STORED, "mxfp4")
        read = 2 * served.stored_bytes(2, keeps_packed=True)  # once more for their digests
        copy = copied_bytes(engine, served)
        read += 2 * copy  # written, and read from there
        unpacked = served.packed_parameters if served.quantised == "mxfp4" and not packed else 0
        starts = START_S + graphs * GRAPHS_S
        starts += MXFP4_KERNELS_S * (packed and served.quantised == "mxfp4")
        offloaded = offload_gib(args) * GIB
        starts += offloaded / PINNED_BYTES_S + WARM_UP * offloaded / BUS_BYTES_S
        stages[f"{label}: start"] = starts
        stages[f"{label}: weights"] = read / DISK_BYTES_S + bool(copy) * unpacked / UNPACKED_S
        rescored = rescored_s(engine, served, scored, work.longest, kind)
        if engine is own:
            turns = math.ceil(work.sequences / int(args.get("max_num_seqs") or AT_ONCE))
            steps = turns * work.sampling.max_tokens * spec.rollout.prompts.turns
            held = served.stored_bytes(BYTES[engine.dtype], keeps_packed=packed) / split
            step = STEP_S + held / (BANDWIDTH * kind.bytes_s)
            stages[f"{label}: samples"] = steps * step + rescored
        if engine.prefill:
            stages[f"{label}: rescores"] = rescored
    loads = len({weights_key(item.spec) for item in passes if item.folder != LONG})
    stages["trainer: weights"] = loads * model.stored_bytes(2, keeps_packed=True) / DISK_BYTES_S
    length = length_of(spec, model, tokens, machine.gpus[0].free_bytes)[0]
    for item in passes:
        scored = tokens // (work.sampling.samples_per_prompt if item.folder == SAMPLES else 1)
        if item.folder == LONG:
            seconds = PASS_S + forward_s(model, length, length, kind, item.spec.dtype)
            stages["one long sequence"] = stages.get("one long sequence", 0.0) + seconds
        else:
            forward = forward_s(model, scored, work.longest, kind, item.spec.dtype)
            stages[item.name] = PASS_S + forward / world
    stages["the rest"] = REST_S
    timed = f"minutes are estimated from runs on an {TIMED}"
    timed += f"; no run on {name} has checked them" if name != TIMED else ""
    others = sorted({own.engine, spec.train.scorer} - {"vllm", OWN_SCORER})
    return Time(stages, (timed, *(f"{each} was never timed on a GPU" for each in others), LEFT_OUT))
