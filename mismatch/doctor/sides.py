"""Both sides of a check on the memory of a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mismatch.doctor import fit
from mismatch.doctor.engine import UTILISATION, Demand, predict_engine
from mismatch.doctor.fit import Fit
from mismatch.doctor.machine import Machine
from mismatch.doctor.memory import Prediction, Work, predict_trainer
from mismatch.errors import MismatchError
from mismatch.models.config import ModelConfig, find_config
from mismatch.specs import CheckSpec, Pass

WORLDS = (2, 4, 8, 16, 32, 64)
SPLITS = (2, 4, 8)


def engine_shape(spec: CheckSpec, trained: ModelConfig) -> ModelConfig:
    """The shape of the engine's model, which may be another checkpoint than the trainer's."""
    engine = spec.rollout.engine
    if (engine.model, engine.revision) == (spec.train.model, spec.train.revision):
        return trained
    return find_config(engine.model, engine.revision).model.require_counts()


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
        return fit.fits(prediction, machine.ram_free_bytes, fit.CPU_ENGINE_RESERVE)
    if engine.tensor_parallel_size > len(machine.gpus):
        raise MismatchError(
            f"--tensor-parallel-size {engine.tensor_parallel_size}: {len(machine.gpus)} GPUs here",
            f"use at most {len(machine.gpus)}",
        )
    size = min(gpu.memory_bytes for gpu in machine.gpus)
    free = min(gpu.free_bytes for gpu in machine.gpus)
    if engine.engine != "vllm":
        prediction = predict_engine(shape, engine, demand, "cuda", size)
        return fit.fits(prediction, free, fit.GPU_RESERVE)
    # vLLM makes do with less cache than all sequences want: they wait for one another.
    least = Demand(1, demand.longest, demand.sampling)
    capacity = min(int((engine.gpu_memory_utilization or UTILISATION) * size), free)

    def split() -> str:
        for count in SPLITS:
            wider = replace(engine, tensor_parallel_size=count)
            if predict_engine(shape, wider, least, "cuda", size).peak_bytes <= capacity:
                return f"--tensor-parallel-size {count}"
        return ""

    return fit.fits(predict_engine(shape, engine, least, "cuda", size), capacity, 0, split)


def trainer_fits(
    spec: CheckSpec, shape: ModelConfig, work: Work, machine: Machine, passes: list[Pass]
) -> tuple[Fit, ...]:
    """One per pass, on one rank; a CPU's memory is shared by the ranks."""
    device, world = machine.device, spec.nproc_per_node
    if device == "cuda":
        capacity = min(gpu.free_bytes for gpu in machine.gpus)
        reserve = fit.GPU_RESERVE
    else:
        capacity, reserve = machine.ram_free_bytes // world, fit.CPU_TRAINER_RESERVE

    def predict(item: Pass, ranks: int) -> Prediction:
        return predict_trainer(shape, item.spec, ranks, work, device, item.name)

    def remedy(item: Pass) -> Callable[[], str]:
        def settings() -> str:
            found = []
            for ranks in WORLDS if device == "cuda" else ():
                if ranks > world and predict(item, ranks).peak_bytes + reserve <= capacity:
                    found.append(f"--nproc-per-node {ranks}, or torchrun over machines")
                    break
            if item is not passes[0]:
                found.append("--no-noise-floor, which leaves this pass out")
            return "; ".join(found)

        return settings

    return tuple(fit.fits(predict(item, world), capacity, reserve, remedy(item)) for item in passes)
