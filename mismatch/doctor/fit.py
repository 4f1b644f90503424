"""Does it fit? Both sides' predictions against a device's memory, and what would make them fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from mismatch.doctor.engine import UTILISATION, Demand, batch_class, predict_engine
from mismatch.doctor.machine import Machine
from mismatch.doctor.memory import GIB, Moment, Prediction, Work, host_shard, predict_trainer
from mismatch.errors import MismatchError
from mismatch.models.config import ModelConfig
from mismatch.run.machine import gib
from mismatch.specs import CheckSpec, Pass

ERROR = 0.15  # the prediction's own: what needs more than this share of the rest is tight
# What a process takes beside its tensors: CUDA context, NCCL and library workspaces on a GPU;
# Python, torch and transformers (and vLLM's) on a CPU, measured.
GPU_RESERVE = int(1.5 * GIB)
CPU_TRAINER_RESERVE = int(0.6 * GIB)
CPU_ENGINE_RESERVE = int(1.8 * GIB)
WORLDS = (2, 4, 8, 16, 32, 64)
SPLITS = (2, 4, 8)

_EAGER = "--attention auto (the eager kernel holds every score)"
_FEWER = "a smaller --micro-batch-tokens"
REMEDIES = {
    "attention scores": _EAGER,
    "attention weights held on": _EAGER,
    "weights gathered per token and expert": "--experts-implementation bounded",
    "kept for the backward pass": _FEWER,
    "experts workspace": f"--experts-implementation bounded, or {_FEWER}",
    "expert by expert": "--experts-implementation bounded",
    "MLP": _FEWER,
    "attention states": _FEWER,
    "sharded parameters": "--master-dtype auto, --offload, or more GPUs",
    "logits of the prefill": "--no-prefill, or a smaller --max-tokens",
    "KV cache": "a smaller --max-tokens or --max-model-len, or --engine-arg max_num_seqs=64",
    "weights": "a larger --tensor-parallel-size",
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
        warnings: what is wrong, each with the setting that mends it.
        certain: it can never fit here. A CPU's memory that others hold now may be free later.
    """

    prediction: Prediction
    needed: int
    capacity: int
    level: Level
    warnings: tuple[str, ...] = field(default=())
    certain: bool = False


def fits(
    prediction: Prediction,
    capacity: int,
    reserve: int,
    smaller: Callable[[], str] | None = None,
    most: int = 0,
) -> Fit:
    """Compare a prediction with the memory of one device.

    Args:
        reserve: what the process takes beside its tensors.
        smaller: called where it does not surely fit; names a setting that would (or "").
        most: what there would be if nobody else took any; 0: the same.
    """
    needed = prediction.peak_bytes + reserve
    level: Level = "fits"
    if needed > capacity:
        level = "does not fit"
    elif needed + ERROR * prediction.peak_bytes > capacity:
        level = "tight"
    if level == "fits":
        return Fit(prediction, needed, capacity, level)
    remedies = [smaller() if smaller is not None else "", *remedies_of(prediction)]
    text = (
        f"{prediction.side}: {gib(needed)} needed at its highest ({prediction.moment}), "
        f"{gib(capacity)} there: {level}. What would help: {'; '.join(r for r in remedies if r)}"
    )
    return Fit(prediction, needed, capacity, level, (text,), needed > max(most, capacity))


def remedies_of(prediction: Prediction) -> list[str]:
    """Settings for the parts that take at least a fifth of the peak, largest first."""
    parts = sorted(prediction.highest.parts, key=lambda part: -part.bytes)
    large = [part for part in parts if part.bytes >= prediction.peak_bytes / 5]
    return list(dict.fromkeys(REMEDIES[part.name] for part in large if part.name in REMEDIES))


def engine_fit(spec: CheckSpec, shape: ModelConfig, demand: Demand, machine: Machine) -> Fit:
    """Does the engine fit on one device?

    Raises:
        MismatchError: the sequences are longer than the model's context, or more GPUs are asked
            for than there are.
    """
    engine = spec.rollout.engine
    context = engine.max_model_len or shape.context
    if context is not None and demand.longest > context:
        raise MismatchError(
            f"sequences of up to {demand.longest} tokens, but the context is {context}",
            "lower --max-tokens, or raise --max-model-len where the model allows it",
        )
    if machine.device == "cpu":
        prediction = predict_engine(shape, engine, demand, "cpu")
        free, most = machine.ram_free_bytes, machine.ram_bytes
        return fits(prediction, free, CPU_ENGINE_RESERVE, most=most)
    if engine.tensor_parallel_size > len(machine.gpus):
        raise MismatchError(
            f"--tensor-parallel-size {engine.tensor_parallel_size}: {len(machine.gpus)} GPUs here",
            f"use at most {len(machine.gpus)}",
        )
    size = min(gpu.memory_bytes for gpu in machine.gpus)
    batches = min(batch_class(gpu.name, gpu.memory_bytes) for gpu in machine.gpus)
    free = min(gpu.free_bytes for gpu in machine.gpus)
    if engine.engine != "vllm":
        return fits(predict_engine(shape, engine, demand, "cuda", batches), free, GPU_RESERVE)
    # vLLM makes do with less cache than all sequences want: they wait for one another.
    least = Demand(1, demand.longest, demand.sampling)
    asked = int((engine.gpu_memory_utilization or UTILISATION) * size)
    if free < asked:
        return _taken(predict_engine(shape, engine, least, "cuda", batches), asked, free, size)
    capacity = asked

    def split() -> str:
        for count in SPLITS:
            wider = replace(engine, tensor_parallel_size=count)
            if predict_engine(shape, wider, least, "cuda", batches).peak_bytes <= capacity:
                return f"--tensor-parallel-size {count}"
        return ""

    return fits(predict_engine(shape, engine, least, "cuda", batches), capacity, 0, split)


def _taken(prediction: Prediction, asked: int, free: int, size: int) -> Fit:
    """vLLM refuses to start where less is free than its share of the GPU's whole memory."""
    share = int(100 * free / size) / 100 - 0.01
    text = (
        f"engine: {gib(free)} of the GPU's {gib(size)} are free, vLLM asks for {gib(asked)} and "
        "refuses: does not fit. What would help: end what holds the GPU"
    )
    if prediction.peak_bytes <= share * size:
        text += f", or --gpu-memory-utilization {share:.2f}"
    return Fit(prediction, asked, free, "does not fit", (text,), certain=True)


def trainer_fits(
    spec: CheckSpec, shape: ModelConfig, work: Work, machine: Machine, passes: list[Pass]
) -> tuple[Fit, ...]:
    """One per pass, on one rank; a CPU's memory is shared by the ranks."""
    gpu, world = machine.device == "cuda", spec.nproc_per_node
    reserve = GPU_RESERVE if gpu else CPU_TRAINER_RESERVE
    capacity, most = machine.ram_free_bytes // world, machine.ram_bytes // world
    if gpu:
        capacity = most = min(gpu.free_bytes for gpu in machine.gpus)

    def predict(item: Pass, ranks: int) -> Prediction:
        return predict_trainer(shape, item.spec, ranks, work, machine.device, item.name)

    def settings(item: Pass) -> str:
        enough = (
            f"--nproc-per-node {ranks}, or torchrun over machines"
            for ranks in WORLDS
            if gpu and ranks > world and predict(item, ranks).peak_bytes + reserve <= capacity
        )
        host = "" if item.spec.offload or not gpu else "--offload"
        rested = replace(item, spec=replace(item.spec, offload=True))
        if host and predict(rested, world).peak_bytes + reserve > capacity:
            host = ""
        return "; ".join(filter(None, (next(enough, ""), host)))

    def fit(item: Pass) -> Fit:
        return fits(predict(item, world), capacity, reserve, partial(settings, item), most)

    sides = tuple(fit(item) for item in passes)
    return sides if not (gpu and spec.train.offload) else (*sides, _host(spec, shape, machine))


def _host(spec: CheckSpec, shape: ModelConfig, machine: Machine) -> Fit:
    """Shards of all ranks in the host's memory."""
    world = spec.nproc_per_node
    one = host_shard(shape, spec.train, world)
    shards = replace(one, bytes=one.bytes * world)
    prediction = Prediction("host memory", (Moment.of("all the time", shards),))
    return fits(prediction, machine.ram_free_bytes, world * CPU_TRAINER_RESERVE)
