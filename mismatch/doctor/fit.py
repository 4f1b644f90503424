"""Does it fit? Both sides' predictions against a device's memory, and what would make them fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
from mismatch.run.store import TRAIN
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
AT_REST = ("--master-dtype auto", "--offload", "more GPUs", "--layers N alone")
WIDER = "a larger --tensor-parallel-size"
REMEDIES: dict[str, str | tuple[str, ...]] = {  # alternatives, of which some may be in use
    "attention scores": _EAGER,
    "attention weights held on": _EAGER,
    "kept for the backward pass": _FEWER,
    "experts workspace": f"--experts-implementation bounded, or {_FEWER}",
    "MLP": _FEWER,
    "attention states": _FEWER,
    "sharded parameters": AT_REST,
    "logits of the prefill": "--no-prefill, or a smaller --max-tokens",
    "KV cache": "a smaller --max-tokens or --max-model-len, or --engine-arg max_num_seqs=64",
    "weights": (WIDER, "--layers N alone"),
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
    useless: Collection[str] = (),
) -> Fit:
    """Compare a prediction with the memory of one device.

    Args:
        reserve: what the process takes on top of its tensors.
        smaller: called where it does not surely fit; names settings that would.
        most: what there would be if nobody else took any; 0: the same.
        useless: remedies that are in use already, or change nothing here.
    """
    needed = prediction.peak_bytes + reserve
    if needed + ERROR * prediction.peak_bytes <= capacity:
        return Fit(prediction, needed, capacity, "fits")
    level: Level = "does not fit" if needed > capacity else "tight"
    helps = smaller()
    helps += remedies_of(prediction, {*useless, *helps})
    text = (
        f"{prediction.side}: {gib(needed)} needed at its highest ({prediction.moment}), "
        f"{gib(capacity)} there: {level}. What would help: "
        f"{'; '.join(helps)}"
    )
    return Fit(prediction, needed, capacity, level, (text,), needed > max(most, capacity))


def remedies_of(prediction: Prediction, useless: Collection[str] = ()) -> list[str]:
    """Return settings for the parts that take at least a fifth of the peak, largest first."""

    def text(remedy: str | tuple[str, ...]) -> str:
        if isinstance(remedy, str):
            return remedy
        return ", or ".join(each for each in remedy if each not in useless)

    parts = sorted(prediction.highest.items(), key=lambda part: -part[1])
    large = [name for name, size in parts if size >= prediction.peak_bytes / 5]
    return list(dict.fromkeys(text(REMEDIES[name]) for name in large if name in REMEDIES))


def engine_fit(
    spec: CheckSpec, shape: SizedModel, work: Workload, machine: Machine, name: str = "engine"
) -> Fit:
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
        prediction = predict_engine(shape, engine, work, "cpu", name=name)
        free, most = machine.ram_free_bytes, machine.ram_bytes
        return fits(prediction, free, CPU_ENGINE_RESERVE, most=most, useless={WIDER})
    if engine_gpus(engine) > len(gpus):
        fault = f"--tensor-parallel-size {engine.tensor_parallel_size}: {len(gpus)} GPUs here"
        raise MismatchError(fault, f"use at most {len(gpus)}")
    size, free = (min(getattr(g, name) for g in gpus) for name in ("memory_bytes", "free_bytes"))
    useless = {WIDER} if engine_gpus(engine) == len(gpus) else set()
    if engine.engine != "vllm":
        prediction = predict_engine(shape, engine, work, "cuda", size, name)
        return fits(prediction, free, GPU_RESERVE, useless=useless)
    # vLLM makes do with less cache than all sequences want: they wait for one another.
    least = Workload((work.longest,), work.sampling)
    prediction = predict_engine(shape, engine, least, "cuda", size, name)
    asked = int((engine.gpu_memory_utilization or UTILISATION) * size)
    if free >= asked:
        return fits(prediction, asked, 0, useless=useless)
    # It refuses to start where less is free than its share of the GPU's whole memory.
    share = int(100 * free / size) / 100 - 0.01
    text = (
        f"{name}: {gib(free)} of the GPU's {gib(size)} are free, vLLM asks for {gib(asked)} and "
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

    def useless(item: Pass) -> set[str]:
        taken = {"--master-dtype auto"} if item.spec.master_dtype == "auto" else set()
        return taken | set(AT_REST[1:3] if not gpus else AT_REST[1:2] * item.spec.offload)

    sides = [
        fits(
            *(predict(item, world), capacity, reserve, partial(settings, item), most),
            useless(item),
        )
        for item in passes
    ]
    if gpus and spec.train.offload:  # shards of all ranks in the host's memory
        shards = {"sharded parameters": sharded(shape, spec.train, world) * world}
        host = Prediction("host memory", {"all the time": shards})
        own = useless(Pass(TRAIN, spec.train))
        free = machine.ram_free_bytes
        sides.append(fits(host, free, world * CPU_TRAINER_RESERVE, useless=own))
    return tuple(sides)
