"""GPUs that a plan can be made for without having them, and how long a run may take there.

Sizes are what nvidia-smi lists; rates are the vendors' data sheets (dense, no sparsity). Times are
estimates until they were measured on that GPU: a range, from the share of the rates that such work
is usually seen to reach.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from mismatch.doctor.machine import Gpu, Machine
from mismatch.errors import MismatchError
from mismatch.models.config import ModelConfig
from mismatch.specs import CheckSpec, Pass

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB  # of an idle GPU, already taken
UNTRIED = "vLLM's and the trainer's kernels were read for it, not run"
# Shares of the data sheet: (slow, fast) for matrix products, for memory, and seconds of a step.
PRODUCTS, TRAFFIC, STEP_S = (0.1, 0.45), (0.25, 0.7), (0.02, 0.003)
DISK_BYTES_S = (0.3e9, 3e9)
STARTS_S = (300.0, 60.0)  # engine with compilation and graphs, then the training world


@dataclass(frozen=True, slots=True)
class GpuType:
    """One kind of GPU.

    Attributes:
        mib: of memory, as nvidia-smi lists it.
        bf16, fp32: dense TFLOP/s, without TF32.
        gb_s: memory bandwidth.
        supported: what can be said of running there.
    """

    name: str
    mib: int
    bf16: float
    fp32: float
    gb_s: float
    supported: str = UNTRIED


TYPES = (
    GpuType("A100-40GB", 40_960, 312, 19.5, 1555, f"{UNTRIED}; MXFP4 by Marlin"),
    GpuType("A100-80GB", 81_920, 312, 19.5, 2039, f"{UNTRIED}; MXFP4 by Marlin"),
    GpuType("H100-80GB", 81_559, 989, 67, 3350),
    GpuType("H200-141GB", 143_771, 989, 67, 4800),
    GpuType("B200-192GB", 183_359, 2250, 80, 8000),
    GpuType("L40S-48GB", 46_068, 362, 91.6, 864, f"{UNTRIED}; MXFP4 by Marlin"),
    GpuType("RTX4090-24GB", 24_564, 165, 82.6, 1008, f"{UNTRIED}; MXFP4 by Marlin"),
    GpuType("MI300X-192GB", 196_288, 1307, 163, 5300, "not supported: ROCm was never run"),
)


def parse(text: str) -> tuple[int, GpuType]:
    """Number and kind of "8xH100-80GB", "4xa100-80gb", "H200" …

    Raises:
        MismatchError: no such kind, or several with other memory.
    """
    match = re.fullmatch(r"(?:([0-9]+)\s*[x×*])?\s*(?:rtx)?(.+)", text.strip().lower())
    count, name = (int(match[1] or 1), match[2]) if match else (0, "")
    kinds = [kind for kind in TYPES if kind.name.lower().removeprefix("rtx").startswith(name)]
    if count < 1 or len(kinds) != 1:
        choices = ", ".join(kind.name for kind in (kinds if len(kinds) > 1 else TYPES))
        raise MismatchError(f"--gpus {text}: no kind of GPU known here", f"e.g. 8x{choices}")
    return count, kinds[0]


def machine_with(machine: Machine, count: int, kind: GpuType) -> Machine:
    """This machine with other GPUs; its host memory is kept, where that is more than theirs."""
    total = kind.mib * MIB
    gpu = Gpu(kind.name, total, total - CONTEXT_BYTES, "")
    ram = max(machine.ram_free_bytes, count * total)
    return replace(machine, gpus=(gpu,) * count, ram_bytes=ram, ram_free_bytes=ram)


def minutes(
    spec: CheckSpec, shape: ModelConfig, passes: list[Pass], longest: int, sequences: int,
    kind: GpuType,
) -> tuple[float, float]:  # fmt: skip
    """(fewest, most) minutes of a check, every response at its longest."""
    tokens = longest * sequences
    fast, slow = (_seconds(spec, shape, passes, tokens, kind, end) for end in (1, 0))
    return fast / 60, slow / 60


def _seconds(
    spec: CheckSpec, shape: ModelConfig, passes: list[Pass], tokens: int, kind: GpuType, end: int
) -> float:
    ranks, engine = spec.nproc_per_node, spec.rollout.engine
    weights = 2 * shape.parameters  # in bf16, read from disk for each load and at each step
    forward = 2 * shape.active_parameters * tokens / PRODUCTS[end] / 1e12
    step = weights / engine.tensor_parallel_size / (kind.gb_s * 1e9 * TRAFFIC[end]) + STEP_S[end]
    sampling = spec.rollout.sampling.max_tokens * step
    prefill = forward / kind.bf16 / engine.tensor_parallel_size
    loads = len({(item.spec.dtype, item.spec.weights) for item in passes})
    reading = (1 + loads) * weights / DISK_BYTES_S[end]
    scoring = sum(
        forward / (kind.fp32 if item.spec.dtype == "fp32" else kind.bf16) / ranks for item in passes
    )
    # Every micro-batch gathers and copies all weights once more.
    batches = max(1, tokens // ranks // spec.train.micro_batch_tokens)
    gathers = len(passes) * batches * 2 * weights / (kind.gb_s * 1e9 * TRAFFIC[end])
    return STARTS_S[end] + reading + sampling + prefill + scoring + gathers
