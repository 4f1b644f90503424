"""Does it fit? Both sides' predictions against a device's memory, and what would make them fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from mismatch.doctor.machine import Machine
from mismatch.doctor.memory import (
    GIB,
    UTILISATION,
    Prediction,
    Workload,
    predict_engine,
    predict_trainer,
    sharded,
)
from mismatch.errors import MismatchError
from mismatch.models.sizes import SizedModel
from mismatch.run.machine import engine_gpus, gib
from mismatch.specs import CheckSpec, Pass

ERROR = 0.15  # the prediction's own: what needs more than this share of the rest is tight
# What a process takes on top of its tensors: CUDA context, NCCL and library workspaces on a GPU;
# Python, torch and transformers (and vLLM's) on a CPU, measured.
GPU_RESERVE = int(1.5 * GIB)
CPU_TRAINER_RESERVE = int(0.6 * GIB)
CPU_ENGINE_RESERVE = int(1.8 * GIB)
WORLDS = (2, 4, 8, 16, 32, 64)

_EAGER = "--attention auto (the eager kernel holds every score)"
_FEWER = "a smaller --micro-batch-tokens"
REMEDIES = {
    "attention scores": _EAGER,
    "attention weights held on": _EAGER,
    "kept for the backward pass": _FEWER,
    "experts workspace": f"--experts-implementation bounded, or {_FEWER}",
    "MLP": _FEWER,
    "attention states": _FEWER,
    "sharded parameters": "--master-dtype auto, --offload, more GPUs, or --layers N alone",
    "logits of the prefill": "--no-prefill, or a smaller --max-tokens",
    "KV cache": "a smaller --max-tokens or --max-model-len, or --engine-arg max_num_seqs=64",
    "weights": "a larger --tensor-parallel-size, or --layers N alone",
    "activations": "--engine-arg max_num_batched_tokens=4096",
    "logits": "--engine-arg max_num_seqs=64",
}

Level = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class Fit:
    """One side on one device.

    Attributes:
        needed: predicted peak and reserve, bytes.
        capacity: bytes that one process may take.
        warnings: what is wrong, each with the setting that would help.
        certain: it can never fit here. A CPU's memory that others hold now may be free later.
    """

    prediction: Prediction
    needed: int
    capacity: int
    level: Level
    warnings: tuple[str, ...] = ()
    certain: bool = False

    @property
    def side(self) -> str:
        return self.prediction.side


def fits(
    prediction: Prediction,
    capacity: int,
    reserve: int,
    smaller: Callable[[], list[str]] = list,
    most: int = 0,
) -> Fit:
    """Compare a prediction with the memory of one device.

    Args:
        reserve: what the process takes on top of its tensors.
        smaller: called where it does not surely fit; names settings that would.
        most: what there would be if nobody else took any; 0: the same.
    """
    needed = prediction.peak_bytes + reserve
    if needed + ERROR * prediction.peak_bytes <= capacity:
        return Fit(prediction, needed, capacity, "fits")
    level: Level = "does not fit" if needed > capacity else "tight"
    text = (
        f"{prediction.side}: {gib(needed)} needed at its highest ({prediction.moment}), "
        f"{gib(capacity)} there: {level}. What would help: "
        f"{'; '.join([*smaller(), *remedies_of(prediction)])}"
    )
    return Fit(prediction, needed, capacity, level, (text,), needed > max(most, capacity))


def remedies_of(prediction: Prediction) -> list[str]:
    """Return settings for the parts that take at least a fifth of the peak, largest first."""
    parts = sorted(prediction.highest.items(), key=lambda part: -part[1])
    large = [name for name, size in parts if size >= prediction.peak_bytes / 5]
    return list(dict.fromkeys(REMEDIES[name] for name in large if name in REMEDIES))


def engine_fit(spec: CheckSpec, shape: SizedModel, work: Workload, machine: Machine) -> Fit:
    """Judge whether the engine fits on one device.

    Raises:
        MismatchError: the sequences are longer than the model's context, or more GPUs are asked
            for than there are.
    """
    engine, gpus = spec.rollout.engine, machine.gpus
    context = engine.max_model_len or shape.context
    if context is not None and work.longest > context:
        fault = f"sequences of up to {work.longest} tokens, but the context is {context}"
        fix = "lower --max-tokens, or raise --max-model-len where the model allows it"
        raise MismatchError(fault, fix)
    if not gpus:
        prediction = predict_engine(shape, engine, work, "cpu")
        free, most = machine.ram_free_bytes, machine.ram_bytes
        return fits(prediction, free, CPU_ENGINE_RESERVE, most=most)
    if engine_gpus(engine) > len(gpus):
        fault = f"--tensor-parallel-size {engine.tensor_parallel_size}: {len(gpus)} GPUs here"
        raise MismatchError(fault, f"use at most {len(gpus)}")
    size, free = (min(getattr(g, name) for g in gpus) for name in ("memory_bytes", "free_bytes"))
    if engine.engine != "vllm":
        return fits(predict_engine(shape, engine, work, "cuda", size), free, GPU_RESERVE)
    # vLLM makes do with less cache than all sequences want: they wait for one another.
    least = Workload((work.longest,), work.sampling)
    prediction = predict_engine(shape, engine, least, "cuda", size)
    asked = int((engine.gpu_memory_utilization or UTILISATION) * size)
    if free >= asked:
        return fits(prediction, asked, 0)
    # It refuses to start where less is free than its share of the GPU's whole memory.
    share = int(100 * free / size) / 100 - 0.01
    text = (
        f"engine: {gib(free)} of the GPU's {gib(size)} are free, vLLM asks for {gib(asked)} and "
        "refuses: does not fit. What would help: end what holds the GPU"
    )
    if prediction.peak_bytes <= share * size:
        text += f", or --gpu-memory-utilization {share:.2f}"
    return Fit(prediction, asked, free, "does not fit", (text,), certain=True)


def trainer_fits(
    spec: CheckSpec,
    shape: SizedModel,
    work: Workload,
    machine: Machine,
    passes: Sequence[Pass],
    beside: int | None = None,
) -> tuple[Fit, ...]:
    """One per pass, on one rank, and the host's where shards rest there; ranks share a CPU's.

    Args:
        beside: of a trainer that trains: bytes that an engine holds on the same device.
    """
    gpus, world = machine.gpus, spec.nproc_per_node
    reserve = GPU_RESERVE if gpus else CPU_TRAINER_RESERVE
    capacity, most = machine.ram_free_bytes // world, machine.ram_bytes // world
    if gpus:
        capacity = most = min(gpu.free_bytes for gpu in gpus)
    held = (beside or 0) // (1 if gpus else world)
    capacity, most = max(0, capacity - held), max(0, most - held)

    def predict(item: Pass, ranks: int, offload: bool = False) -> Prediction:
        changed = replace(item.spec, offload=offload or item.spec.offload)
        trains = beside is not None
        return predict_trainer(shape, changed, ranks, work, machine.device, item.name, trains)

    def settings(item: Pass) -> list[str]:
        room = capacity - reserve if gpus else 0  # on a CPU neither ranks nor --offload help
        enough = (n for n in WORLDS if n > world and predict(item, n).peak_bytes <= room)
        helps = [f"--nproc-per-node {n}, or torchrun over machines" for n in list(enough)[:1]]
        if not item.spec.offload and predict(item, world, offload=True).peak_bytes <= room:
            helps.append("--offload")
        return helps

    sides = [
        fits(predict(item, world), capacity, reserve, partial(settings, item), most)
        for item in passes
    ]
    if gpus and spec.train.offload:  # shards of all ranks in the host's memory
        shards = {"sharded parameters": sharded(shape, spec.train, world) * world}
        host = Prediction("host memory", {"all the time": shards})
        sides.append(fits(host, machine.ram_free_bytes, world * CPU_TRAINER_RESERVE))
    return tuple(sides)
