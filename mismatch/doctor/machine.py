"""What hardware there is, here or as a user describes it. Nothing heavy is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mismatch.errors import MismatchError
from mismatch.models.derived import free_bytes
from mismatch.run.machine import Card, cards_now

CONTEXT_BYTES = 600 << 20  # of an idle GPU, already taken


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    shared: bool = False  # its memory is the host's


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware of a machine; sizes in bytes. Free disk is for copies of weights; None: unknown."""

    cores: int
    ram_bytes: int
    ram_free_bytes: int
    gpus: tuple[Gpu, ...]
    disk_free_bytes: int | None = None

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


def inspect_machine() -> Machine:
    """Look at this machine."""
    import psutil

    memory = psutil.virtual_memory()
    gpus = gpus_of(cards_now(), (memory.total, memory.available))
    cores, disk = len(os.sched_getaffinity(0)), free_bytes()
    return Machine(cores, memory.total, memory.available, gpus, disk)


def gpus_of(cards: Sequence[Card], shared: tuple[int, int]) -> tuple[Gpu, ...]:
    """Return GPUs with their memory.

    Args:
        shared: (total, free) bytes of the host's memory, for a GPU that shares it: "[N/A]".
    """
    gpus = []
    for card in cards:
        total, free, own = *shared, card.total.isdigit()
        if own:
            total, free = int(card.total) << 20, int(card.free or 0) << 20
        gpus.append(Gpu(card.model, total, free, card.driver, shared=not own))
    return tuple(gpus)


class Kind(NamedTuple):
    """A kind of GPU by its data sheet."""

    mib: int  # as nvidia-smi lists them
    bf16: float  # dense TFLOP/s
    fp32: float  # TFLOP/s without tensor cores
    bytes_s: float  # of its memory


# Those that a plan can be made for without having them, by their makers' data sheets.
KINDS = {
    "A100-40GB": Kind(40_960, 312, 19.5, 1.56e12),
    "A100-80GB": Kind(81_920, 312, 19.5, 2.04e12),
    "A800-80GB": Kind(81_920, 312, 19.5, 2.04e12),
    "H100-80GB": Kind(81_559, 989, 67, 3.35e12),
    "H100-NVL-94GB": Kind(95_830, 835, 60, 3.9e12),
    "H800-80GB": Kind(81_559, 989, 67, 3.35e12),
    "H20-96GB": Kind(97_871, 148, 44, 4e12),
    "H200-141GB": Kind(143_771, 989, 67, 4.8e12),
    "GH200-96GB": Kind(97_871, 989, 67, 4e12),
    "B200-192GB": Kind(183_359, 2250, 75, 8e12),
    "B300-288GB": Kind(275_040, 2250, 75, 8e12),
    "L4-24GB": Kind(23_034, 121, 30.3, 0.3e12),
    "L40S-48GB": Kind(46_068, 362, 91.6, 0.86e12),
    "A10G-24GB": Kind(23_028, 70, 31.5, 0.6e12),
    "RTX4090-24GB": Kind(24_564, 165, 82.6, 1.01e12),
    "RTX5090-32GB": Kind(32_607, 210, 105, 1.79e12),
    "RTX-PRO-6000-96GB": Kind(97_887, 504, 125, 1.79e12),
}


def kind_of(gpu: Gpu) -> str:
    """Return the kind of a GPU, by its name and memory; "": none of those known here.

    >>> kind_of(Gpu("NVIDIA H100 80GB HBM3", 81_559 << 20, 0, ""))
    'H100-80GB'
    """
    for name, kind in KINDS.items():
        model = name.rpartition("-")[0].removeprefix("RTX").strip("-").replace("-", " ")
        alike = abs((gpu.memory_bytes >> 20) / kind.mib - 1) < 0.1  # a slice (MIG) has less
        if alike and re.search(rf"\b{model}\b", gpu.name.replace("RTX", "").replace("-", " ")):
            return name
    return ""


def parse_kind(text: str) -> tuple[int, str]:
    """Return the number and kind of "8xH100-80GB", "4xa100-80gb", "H200" …

    Raises:
        MismatchError: no such kind, or several with other memory.
    """
    match = re.fullmatch(r"(?:([0-9]+)\s*[x×*])?\s*(.+)", text.strip(), re.IGNORECASE)
    count, name = (int(match[1] or 1), _plain(match[2])) if match else (0, "")
    # With its memory or without: a part of a name is another GPU's (H20 and H200, L4 and L40S).
    kinds = [kind for kind in KINDS if name in (_plain(kind), _plain(kind.rpartition("-")[0]))]
    if count < 1 or len(kinds) != 1:
        choices = ", ".join(kinds if len(kinds) > 1 else KINDS)
        raise MismatchError(f"--gpus {text}: no kind of GPU known here", f"e.g. 8x{choices}")
    return count, kinds[0]


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]|^rtx|gb$", "", name.lower())


def machine_with(machine: Machine, count: int, kind: str) -> Machine:
    """Return this machine with other GPUs; its host memory is kept if it is more than theirs."""
    total = KINDS[kind].mib << 20
    gpus = (Gpu(kind, total, total - CONTEXT_BYTES, ""),) * count
    ram = max(machine.ram_free_bytes, count * total)
    return replace(machine, gpus=gpus, ram_bytes=ram, ram_free_bytes=ram, disk_free_bytes=None)
