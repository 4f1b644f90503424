"""Does it fit? Both sides' predictions against a device's memory, and what would make them fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from mismatch.experiments.fixes.spec_edits import ABSENT, engine_argument, with_argument
from mismatch.experiments.scoring_passes import OFFLOAD
from mismatch.models.config import find_config
from mismatch.models.derived import copied_bytes, has_copy
from mismatch.models.sizes import SizedModel, sized
from mismatch.run.machine import engine_gpus, gib
from mismatch.specs import CheckSpec, EngineSpec, Pass, TrainSpec

ERROR = 0.15  # the prediction's own: what needs more than this share of the rest is tight
# What a process takes on top of its tensors: CUDA context, NCCL and library workspaces on a GPU;
# Python, torch and transformers (and vLLM's) on a CPU, measured.
GPU_RESERVE = int(1.5 * GIB)
CPU_TRAINER_RESERVE = int(0.6 * GIB)
CPU_ENGINE_RESERVE = int(1.8 * GIB)
WORLDS = (2, 4, 8, 16, 32, 64)
LEAST_LAYERS, MOST_LAYERS = 2, 12  # of a cut model: kinds of layers alternate in 2 to 8 (Jamba)
MOST_OFFLOADED = 0.9  # of its weights: embeddings and head stay on the GPU
HOST = "host memory"  # a side: what --offload keeps there

_EAGER = "--attention auto (the eager kernel holds every score)"
_FEWER = "a smaller --micro-batch-tokens"
WIDER = "a larger --tensor-parallel-size"
CUT = "--layers N alone"
REMEDIES = {  # of parts of a prediction; those of weights depend on the settings in use
    "attention scores": _EAGER,
    "attention weights held on": _EAGER,
    "kept for the backward pass": _FEWER,
    "experts workspace": f"--experts-implementation bounded, or {_FEWER}",
    "MLP": _FEWER,
    "attention states": _FEWER,
    "logits of the prefill": "--no-prefill, or a smaller --max-tokens",
    "KV cache": "a smaller --max-tokens or --max-model-len, or --engine-arg max_num_seqs=64",
    "activations": "--engine-arg max_num_batched_tokens=4096",
    "logits": "--engine-arg max_num_seqs=64",
    "copy of the weights": "free space, or MISMATCH_CACHE=DIR on a larger disk",
}

Level = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class Fit:
    """One side on one device.

    Attributes:
        side: "engine", HOST, or the name of a pass of the trainer.
        needed: predicted peak and reserve, bytes.
        capacity: bytes that one process may take.
        warning: what is wrong, and the settings that would help; "": it fits.
        certain: it can never fit here. A CPU's memory that others hold now may be free later.
    """

    side: str
    prediction: Prediction
    needed: int
    capacity: int
    level: Level
    warning: str = ""
    certain: bool = False


def fits(
    side: str,
    prediction: Prediction,
    capacity: int,
    reserve: int,
    remedies: Mapping[str, str] = REMEDIES,
    helps: Sequence[str] = (),
    most: int = 0,
) -> Fit:
    """Compare a prediction with the memory of one device.

    Args:
        reserve: what the process takes on top of its tensors.
        remedies: part of a prediction -> settings that make it smaller.
        helps: settings with which it would fit.
        most: what there would be if nobody else took any; 0: the same.
    """
    needed = prediction.peak_bytes + reserve
    if needed + ERROR * prediction.peak_bytes <= capacity:
        return Fit(side, prediction, needed, capacity, "fits")
    level: Level = "does not fit" if needed > capacity else "tight"
    parts = sorted(prediction.highest.items(), key=lambda part: -part[1])
    large = [name for name, size in parts if size >= prediction.peak_bytes / 5]
    smaller = dict.fromkeys(remedies[name] for name in large if name in remedies)
    text = (
        f"{gib(needed)} needed at its highest ({prediction.moment}), "
        f"{gib(capacity)} there: {level}. What would help: {'; '.join([*helps, *smaller])}"
    )
    return Fit(side, prediction, needed, capacity, level, text, needed > max(most, capacity))


def warnings_of(sides: Iterable[Fit]) -> list[str]:
    """Return what is wrong, each with what would help; sides that lack the same share a line."""
    names: dict[str, dict[str, None]] = {}
    for fit in sides:
        if fit.warning:
            names.setdefault(fit.warning, {})[fit.side] = None
    return [f"{', '.join(same)}: {text}" for text, same in names.items()]


def engine_fit(
    spec: CheckSpec, shape: SizedModel, work: Workload, machine: Machine, side: str = "engine"
) -> Fit:
    """Judge whether the engine fits on one device.

    Raises:
        MismatchError: the sequences are longer than the model's context, or more GPUs are asked
            for than there are.
    """
    engine, gpus, split = spec.rollout.engine, machine.gpus, engine_gpus(spec.rollout.engine)
    context = engine.max_model_len or shape.context
    if context is not None and work.longest > context:
        fault = f"sequences of up to {work.longest} tokens, but the context is {context}"
        fix = "lower --max-tokens, or raise --max-model-len where the model allows it"
        raise MismatchError(fault, fix)
    remedies = REMEDIES | {"weights": f"{WIDER}, or {CUT}" if split < len(gpus) else CUT}
    if not gpus:
        prediction = predict_engine(shape, engine, work, 0)
        free, most = machine.ram_free_bytes, machine.ram_bytes
        return fits(side, prediction, free, CPU_ENGINE_RESERVE, remedies, most=most)
    if split > len(gpus):
        fault = f"--tensor-parallel-size {engine.tensor_parallel_size}: {len(gpus)} GPUs here"
        raise MismatchError(fault, f"use at most {len(gpus)}")
    size, free = min(gpu.memory_bytes for gpu in gpus), min(gpu.free_bytes for gpu in gpus)
    if engine.engine != "vllm":
        prediction = predict_engine(shape, engine, work, size)
        return fits(side, prediction, free, GPU_RESERVE, remedies)
    # vLLM makes do with less cache than all sequences want: they wait for one another.
    prediction = predict_engine(shape, engine, replace(work, sequences=1), size)
    asked = int((engine.gpu_memory_utilization or UTILISATION) * size)
    if free >= asked:
        return fits(side, prediction, asked, 0, remedies)
    # It refuses to start where less is free than its share of the GPU's whole memory.
    share = int(100 * free / size) / 100 - 0.01
    text = (
        f"{gib(free)} of the GPU's {gib(size)} are free, vLLM asks for {gib(asked)} and "
        "refuses: does not fit. What would help: end what holds the GPU"
    )
    if prediction.peak_bytes <= share * size:
        text += f", or --gpu-memory-utilization {share:.2f}"
    return Fit(side, prediction, asked, free, "does not fit", text, certain=True)


def copies(
    spec: EngineSpec | TrainSpec, shape: SizedModel, machine: Machine, side: str = "disk"
) -> list[Fit]:
    """Return why the disk may lack room for the copy of weights that a side reads; []: it has."""
    size, free = copied_bytes(spec, shape), machine.disk_free_bytes
    fit = fits(side, Prediction({"on disk": {"copy of the weights": size}}), free or 0, 0)
    return [] if free is None or fit.level == "fits" or has_copy(spec) else [fit]


def offloaded(
    spec: CheckSpec, shape: SizedModel, work: Workload, machine: Machine, without: Fit
) -> tuple[int, Fit]:
    """Keep in the host's memory what vLLM's weights lack of room, with the room of a sure fit.

    Args:
        without: the fit without; returned where the host's memory, another engine, or the user's
            own setting rules it out.

    Returns:
        (GiB of each GPU's weights in the host's memory, how the rest fits).
    """
    engine, weights = spec.rollout.engine, without.prediction.highest.get("weights", 0)
    given = engine_argument(spec, OFFLOAD) is not ABSENT
    missing = without.needed - without.capacity / (1 + ERROR)
    size = math.ceil(missing / GIB)
    host = size * engine.tensor_parallel_size * GIB + CPU_ENGINE_RESERVE
    apart = [gpu for gpu in machine.gpus if not gpu.shared]
    possible = apart and engine.engine == "vllm" and not given
    if not possible or size * GIB > MOST_OFFLOADED * weights or host > machine.ram_free_bytes:
        return 0, without
    fit = engine_fit(with_argument(spec, OFFLOAD, size), shape, work, machine, without.side)
    return (0, without) if fit.certain else (size, fit)


def first_layers_fit(
    spec: CheckSpec, whole: SizedModel, work: Workload, machine: Machine, without: Fit
) -> tuple[int, Fit]:
    """Cut a model behind its first layer of every kind; return the number of layers and their fit.

    Args:
        without: the fit of the whole, returned with 0 where no cut fits or the model has none.
    """
    engine, kinds = spec.rollout.engine, whole.layer_types
    for layers in range(LEAST_LAYERS, min(whole.layers, MOST_LAYERS + 1)):
        if {*kinds[:layers]} == {*kinds}:
            with suppress(MismatchError):
                shape = sized(find_config(engine.model, engine.revision, layers), engine.python)
                if shape.layer_parameters == whole.layer_parameters:  # of MoE layers, if any
                    cut = engine_fit(spec, shape, work, machine, without.side)
                    return (0, without) if cut.certain else (layers, cut)
    return 0, without


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
    if gpus:
        reserve, held = GPU_RESERVE, beside or 0
        free = most = min(gpu.free_bytes for gpu in gpus)
    else:
        reserve, held = CPU_TRAINER_RESERVE, (beside or 0) // world
        free, most = machine.ram_free_bytes // world, machine.ram_bytes // world
    capacity, most = max(0, free - held), max(0, most - held)

    def predict(train: TrainSpec, ranks: int) -> Prediction:
        return predict_trainer(shape, train, ranks, work, machine.device, beside is not None)

    def advice(train: TrainSpec) -> tuple[list[str], dict[str, str]]:
        """Return what would make a pass fit, and what makes its parts smaller."""
        room = capacity - reserve if gpus else 0  # on a CPU neither ranks nor --offload help
        enough = (n for n in WORLDS if n > world and predict(train, n).peak_bytes <= room)
        helps = [f"--nproc-per-node {n}, or torchrun over machines" for n in list(enough)[:1]]
        if not train.offload and predict(replace(train, offload=True), world).peak_bytes <= room:
            helps.append("--offload")
        at_rest = {
            "--master-dtype auto": train.master_dtype != "auto",
            "--offload": bool(gpus) and not train.offload and "--offload" not in helps,
            "more GPUs": bool(gpus),
            CUT: True,
        }
        named = ", or ".join(name for name, changes in at_rest.items() if changes)
        return helps, REMEDIES | {"sharded parameters": named}

    sides = []
    for item in passes:
        (helps, remedies), prediction = advice(item.spec), predict(item.spec, world)
        sides.append(fits(item.name, prediction, capacity, reserve, remedies, helps, most))
    if gpus and spec.train.offload:  # shards of all ranks in the host's memory
        shards = {"sharded parameters": sharded(shape, spec.train, world) * world}
        host, remedies = Prediction({"all the time": shards}), advice(spec.train)[1]
        own = world * CPU_TRAINER_RESERVE
        sides.append(fits(HOST, host, machine.ram_free_bytes, own, remedies))
    return tuple(sides)
