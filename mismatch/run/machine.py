"""This machine, as far as it is known without torch."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from mismatch.errors import MismatchError
from mismatch.specs import CheckSpec, EngineSpec

GIB = 1 << 30
SHARED_BYTES = 192 * 2**20  # vLLM's message ring is 160 MiB


def nvidia_smi(*arguments: str) -> str:
    """Return what nvidia-smi answers; "" where it is missing, hangs or fails."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout


def visible_gpus() -> list[str] | None:
    """Return the items of CUDA_VISIBLE_DEVICES; None: it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return [item.strip() for item in visible.split(",") if item.strip() not in ("", "-1")]


def local_gpus() -> int:
    """GPUs that a process here would see, without importing torch."""
    visible = visible_gpus()
    if visible is not None:
        return len(visible)
    return sum(line.startswith("GPU") for line in nvidia_smi("-L").splitlines())


def free_gpu_bytes() -> list[int]:
    """Free memory of every GPU of this machine, visible or not; [] without nvidia-smi."""
    listing = nvidia_smi("--query-gpu=memory.free", "--format=csv,noheader,nounits")
    return [int(line) << 20 for line in listing.split() if line.isdigit()]


def gib(count: float) -> str:
    """Return bytes for people: GiB, or MiB where it is less than one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of both sides.

    Attributes:
        engine: places among the visible GPUs; () where both sides take all of them in turn, or
            there are none.
        overlap: the trainer scores while the engine rescores.
    """

    engine: tuple[int, ...] = ()
    trainer: tuple[int, ...] = ()
    overlap: bool = False


def engine_gpus(engine: EngineSpec) -> int:
    """Return how many GPUs an engine takes that mismatch starts."""
    if engine.servers:
        return 0
    return engine.tensor_parallel_size


def placement(spec: CheckSpec, gpus: int) -> Placement:
    """Give the trainer's ranks the first GPUs, the engine the last, where there are so many.

    Raises:
        MismatchError: both at once are asked for on GPUs that are too few.
    """
    wanted, ranks = engine_gpus(spec.rollout.engine), spec.nproc_per_node
    if wanted + ranks <= gpus:
        own = tuple(range(gpus - wanted, gpus))
        return Placement(own, tuple(range(ranks)), spec.overlap is not False)
    if gpus and wanted and spec.overlap:
        raise MismatchError(
            f"--overlap: the engine takes {wanted} GPUs and the trainer {ranks}, there are {gpus}",
            "a smaller --nproc-per-node or --tensor-parallel-size, or drop --overlap",
        )
    return Placement(overlap=bool(spec.overlap))


def visible_as(places: tuple[int, ...]) -> dict[str, str]:
    """Return the environment of a process that shall see these of the visible GPUs; {}: all."""
    if not places:
        return {}
    names = visible_gpus() or [str(number) for number in range(local_gpus())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[index] for index in places)}


def in_words(places: tuple[int, ...]) -> str:
    """As a plan has it.

    >>> in_words((0, 1, 2)), in_words((7,)), in_words(())
    (', GPUs 0 to 2', ', GPU 7', '')
    """
    if len(places) > 1:
        return f", GPUs {places[0]} to {places[-1]}"
    return f", GPU {places[0]}" if places else ""
