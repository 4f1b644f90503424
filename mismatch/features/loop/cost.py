"""What a training loop takes, before it starts: memory of both sides, and seconds of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from mismatch.doctor.fit import Fit, engine_fit, trainer_fits
from mismatch.doctor.machine import TYPES, Gpu, GpuType, Machine, inspect_machine
from mismatch.doctor.memory import sharded
from mismatch.doctor.plan import work_of
from mismatch.errors import MismatchError
from mismatch.features.loop.spec import SLEEPERS, LoopSpec
from mismatch.models.config import find_config
from mismatch.models.sizes import sized
from mismatch.run.machine import placement
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec, Pass

# Dense TFLOP/s (bf16, fp32) and GB/s of the vendors' data sheets, without sparsity and TF32.
SHEETS = {
    "A100-40GB": (312, 19.5, 1555),
    "A100-80GB": (312, 19.5, 2039),
    "H100-80GB": (989, 67, 3350),
    "H200-141GB": (989, 67, 4800),
    "B200-192GB": (2250, 80, 8000),
    "L40S-48GB": (362, 91.6, 864),
    "RTX4090-24GB": (165, 82.6, 1008),
    "MI300X-192GB": (1307, 163, 5300),
}
# Shares of the data sheet that such work is usually seen to reach, (slow, fast): matrix products,
# memory traffic; then seconds of a step.
PRODUCTS, TRAFFIC, STEP_S = (0.1, 0.45), (0.25, 0.7), (0.02, 0.003)
DISK_BYTES_S = (0.3e9, 3e9)
UPDATE = 4  # forward passes that a scoring and a forward and backward pass take
SIDE, PROBE_S = 512, 0.1  # of the matrices that are multiplied, and for how long
CPU_SHARE = (0.1, 1.0)  # of that rate, for small matrices of many kinds
CPU_STEP_S = (0.1, 0.005)  # of an engine's step beside its products


def memory_of_loop(spec: CheckSpec, machine: Machine | None = None) -> tuple[Fit, ...]:
    """Engine and a trainer with its optimiser, alive at once; empty where nothing is predicted.

    The trainer has what the engine leaves, unless each has GPUs of its own, or they take the same
    in turns.

    Args:
        machine: where it would run; None: this one.
    """
    machine = machine or inspect_machine(try_imports=False)
    try:
        shape = sized(find_config(spec.train.model, spec.train.revision))
        work = work_of(spec)[0]
        where = placement(spec, len(machine.gpus))
    except MismatchError:
        return ()
    steps = [Pass(TRAIN, replace(spec.train, grad=True))]
    sleeps = bool(machine.gpus) and spec.rollout.engine.engine in SLEEPERS
    if sleeps and not where.trainer:  # parameters and moments stay while the engine is awake
        stays = 3 * sharded(shape, spec.train, spec.nproc_per_node)
        left = tuple(
            replace(gpu, free_bytes=max(0, gpu.free_bytes - stays)) for gpu in machine.gpus
        )
        awake = engine_fit(spec, shape, work, replace(machine, gpus=left))
        return (awake, *trainer_fits(spec, shape, work, machine, steps, 0))
    engine = engine_fit(spec, shape, work, machine)
    beside = 0 if where.trainer else engine.needed
    return (engine, *trainer_fits(spec, shape, work, machine, steps, beside))


def seconds_of_step(
    loop: LoopSpec, machine: Machine, rate: Callable[[], float] | None = None
) -> tuple[float, float] | None:
    """(fewest, most) seconds of a step, every response at its longest: an estimate from sizes.

    Products of matrices by the GPU's data sheet, or by a short measurement on a CPU; beside them
    the weights that every step of the engine reads, and the files that bring new ones.

    Args:
        rate: what measures a CPU's FLOP/s.

    Returns:
        None where a model's sizes or the kind of GPU are not known.
    """
    spec = loop.check
    kind = kind_of(machine.gpus[0]) if machine.gpus else None
    try:
        shape = sized(find_config(spec.train.model, spec.train.revision))
        longest = work_of(spec)[0].longest
    except MismatchError:
        return None
    if machine.gpus and kind is None:
        return None
    sampling, ranks = spec.rollout.sampling, spec.nproc_per_node
    tokens = loop.prompts * sampling.samples_per_prompt * longest
    forward = 2 * shape.active_parameters * tokens
    weights = 2 * shape.parameters
    measured = (rate or flops_here)() if kind is None else 0.0

    def seconds(end: int) -> float:
        if kind is None:
            engine = trainer = measured * CPU_SHARE[end]
            step = CPU_STEP_S[end]
        else:
            bf16, fp32, gb_s = SHEETS[kind.name]
            dtypes = (spec.rollout.engine.dtype, spec.train.dtype)
            engine, trainer = (
                (fp32 if dtype == "fp32" else bf16) * 1e12 * PRODUCTS[end] for dtype in dtypes
            )
            step = STEP_S[end] + weights / (gb_s * 1e9 * TRAFFIC[end])
        files = 2 * weights / DISK_BYTES_S[end]
        sampled = sampling.max_tokens * step + forward / engine
        return sampled + UPDATE * forward / trainer / ranks + files

    return seconds(1), seconds(0)


def kind_of(gpu: Gpu) -> GpuType | None:
    """By the chip in nvidia-smi's name; among several the one with about as much memory."""
    name = gpu.name.replace(" ", "").upper()
    kinds = [kind for kind in TYPES if kind.name.partition("-")[0] in name]
    return min(kinds, key=lambda kind: abs((kind.mib << 20) - gpu.memory_bytes), default=None)


def flops_here() -> float:
    """FLOP/s of float32 products on this CPU, as busy as it is now."""
    import numpy as np

    matrix = np.ones((SIDE, SIDE), np.float32)
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < PROBE_S or not count:
        matrix @ matrix
        count += 1
    return 2 * SIDE**3 * count / max(passed, PROBE_S)
