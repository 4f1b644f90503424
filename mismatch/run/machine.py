"""This machine, as far as it is known without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from glob import glob

from mismatch.errors import MismatchError
from mismatch.specs import CheckSpec, EngineSpec

GIB = 1 << 30
SHARED = "/dev/shm"  # where processes of one machine talk to each other
ENGINE_SHARED = 192 * 2**20  # bytes: the message ring of vLLM's processes takes 160 MiB of them
RANK_SHARED = 32 * 2**20  # bytes: NCCL's segments of one rank on a GPU are 9 to 33 MB
# nvidia-smi counts GPUs by their place on the PCI bus, CUDA the fastest first unless told.
BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
SMI_S = 60.0  # without persistence mode the driver starts for every question: seconds a GPU
TORCH_S = 180.0  # a cold import of torch from a network file system takes a minute
CSV = "--format=csv,noheader,nounits"
FIELDS = "index,uuid,name,memory.total,driver_version,mig.mode.current"
# Of a driver: Linux, WSL, Jetson.
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu")
ASK_TORCH = """
import torch
for number in range(torch.cuda.device_count()):
    seen = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    print(number, getattr(seen, "uuid", number), total >> 20, free >> 20, seen.name)
"""


def require_shared_memory(split: int, ranks: int = 1) -> None:
    """Check that there is what an engine on ``split`` GPUs, or a trainer's ranks on GPUs, take.

    Raises:
        MismatchError: there is too little, or no, shared memory.
    """
    size, who = (split > 1) * ENGINE_SHARED, f"an engine on {split} GPUs"
    if ranks > 1 and visible_cards():
        size, who = max((size, who), (ranks * RANK_SHARED, f"a trainer of {ranks} ranks"))
    if not size:
        return
    fix = "in a container: docker run --shm-size=2g (or --ipc=host); elsewhere: mount a larger one"
    try:
        free = shutil.disk_usage(SHARED).free
    except OSError as error:
        raise MismatchError(f"no shared memory: {SHARED}: {error.strerror}", fix) from error
    if free < size:
        fault = f"too little shared memory: {SHARED} has {free / 2**20:.0f} MiB free"
        raise MismatchError(f"{fault}, {who} needs {size / 2**20:.0f}", fix)


def nvidia_smi(*arguments: str) -> str:
    """Return what nvidia-smi answers; "" where it is missing, hangs or fails."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or a slice of one (MIG), with what does not change while a process runs.

    Attributes:
        name: as CUDA_VISIBLE_DEVICES takes it: an index in the order of the PCI bus, or a UUID.
        total: MiB; "[N/A]" of a GPU that shares the host's memory.
        free: MiB where torch was asked; "": see :func:`cards_now`.
    """

    name: str
    uuid: str
    model: str
    total: str
    driver: str = ""
    free: str = ""
    sliced: bool = False


@cache
def cards() -> tuple[Card, ...]:
    """Return the GPUs of this machine, visible or not: nvidia-smi is asked once a process."""
    found = []
    for line in nvidia_smi(f"--query-gpu={FIELDS}", CSV).splitlines():
        head, *tail = (field.strip() for field in line.rsplit(",", 3))
        index, uuid, model = (field.strip() for field in [*head.split(",", 2), "", ""][:3])
        if index.isdigit() and len(tail) == 3:
            sliced = tail[2] == "Enabled"
            found.append(Card(index, uuid, model, tail[0], tail[1], sliced=sliced))
    return tuple(found)


def visible_cards() -> tuple[Card, ...]:
    """Return the GPUs that a process started here would see, in its order.

    torch is asked, in a separate process, for slices of a GPU and where the driver has devices
    but nvidia-smi is missing or too slow.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = cards()
    chosen = known if visible is None else chosen_cards(visible, known)
    sliced = (visible or "").startswith("MIG-") or any(card.sliced for card in chosen)
    unlisted = visible != "" and not known and any(glob(pattern) for pattern in DEVICES)
    return cards_of_torch(visible) if sliced or unlisted else chosen


def chosen_cards(visible: str, known: tuple[Card, ...]) -> tuple[Card, ...]:
    """Return the GPUs that CUDA takes from CUDA_VISIBLE_DEVICES: up to the first that is none.

    Items are indices, or UUIDs or beginnings of UUIDs; one that is named twice leaves none.
    """
    chosen: list[Card] = []
    for item in map(str.strip, visible.split(",")):
        if item.startswith("GPU-"):
            fitting = [card for card in known if card.uuid.startswith(item)]
        else:
            number = re.match(r"\+?[0-9]+", item)
            fitting = [card for card in known if number and int(card.name) == int(number[0])]
        if len(fitting) != 1:
            break
        if any(card.uuid == fitting[0].uuid for card in chosen):
            return ()
        name = item if item.startswith("GPU-") else fitting[0].name
        chosen.append(replace(fitting[0], name=name))
    return tuple(chosen)


@cache
def cards_of_torch(visible: str | None) -> tuple[Card, ...]:
    """Return what torch sees, asked in a process that ends; () where it sees none.

    Args:
        visible: CUDA_VISIBLE_DEVICES, of which the answer depends.
    """
    command = [sys.executable, "-c", ASK_TORCH]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TORCH_S, env=os.environ | BUS_ORDER
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    names = [item.strip() for item in visible.split(",")] if visible else []
    found = []
    for line in done.stdout.splitlines():
        number, uuid, total, free, model = line.split(" ", 4)
        name = names[int(number)] if int(number) < len(names) else number
        found.append(Card(name, uuid, model, total, free=free, sliced=True))
    return tuple(found)


def local_gpus() -> int:
    """GPUs that a process here would see, without importing torch."""
    return len(visible_cards())


def cards_now() -> list[Card]:
    """Return the visible GPUs, each with the memory that is free now."""
    seen = visible_cards()
    lines: list[str] = []
    if not all(card.free for card in seen):
        lines = nvidia_smi("--query-gpu=uuid,memory.free", CSV).splitlines()
    now = {uuid.strip(): free.strip() for uuid, _, free in (line.partition(",") for line in lines)}
    return [card if card.free else replace(card, free=now.get(card.uuid, "")) for card in seen]


def free_gpu_bytes() -> list[int]:
    """Free memory of the visible GPUs now; [] without nvidia-smi, and for slices of a GPU."""
    return [int(card.free) << 20 for card in cards_now() if card.free.isdigit() and not card.sliced]


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
    seen = visible_cards()
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[index].name for index in places)}


def in_words(places: tuple[int, ...]) -> str:
    """As a plan has it.

    >>> in_words((0, 1, 2)), in_words((7,)), in_words(())
    (', GPUs 0 to 2', ', GPU 7', '')
    """
    if len(places) > 1:
        return f", GPUs {places[0]} to {places[-1]}"
    return f", GPU {places[0]}" if places else ""
