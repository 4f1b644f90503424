"""The ranks of a training world: process groups, gathering, progress lines; memory of each."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mismatch.errors import MismatchError
from mismatch.run.machine import local_gpus


def capture_rng_and_autocast(
    device: torch.device, random: bool = False
) -> Callable[[], AbstractContextManager[None]]:
    """Record the current autocast state, and the RNG state if ``random``.

    Returns:
        A context manager that restores both. Within it the random numbers are those that follow
        this call; the generators outside are not moved.
    """
    enabled = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type)
    gpu = device.type == "cuda"
    state = torch.get_rng_state() if random else None
    gpu_state = torch.cuda.get_rng_state(device) if random and gpu else None

    @contextmanager
    def restored() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(device.type, dtype, enabled=enabled))
            if state is not None:
                stack.enter_context(torch.random.fork_rng([device] if gpu else []))
                torch.set_rng_state(state)
            if gpu_state is not None:
                torch.cuda.set_rng_state(gpu_state, device)
            yield

    return restored


class MemoryPeak:
    """Peak memory of a block of code, above what was in use before it, and its duration.

    On a GPU the allocator counts; on a CPU the process's anonymous memory is sampled (mapped
    checkpoint files are not counted: the kernel can drop them at any time). Free memory that the C
    library holds is returned to the system first: its reuse would not show.

    Attributes:
        bytes: None until the block has ended, or if not active.
        seconds: wall clock of the block; 0.0 until it has ended.
    """

    INTERVAL_S = 0.005

    def __init__(self, device: torch.device, active: bool) -> None:
        self.bytes: int | None = None
        self.seconds = 0.0
        self._device, self._active = device, active
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def _read(self) -> int:
        if self._device.type != "cpu":
            return torch.cuda.max_memory_allocated(self._device)
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0

    def __enter__(self) -> MemoryPeak:
        self._start = time.monotonic()
        if not self._active:
            return self
        if self._device.type == "cpu":
            # glibc's; other C libraries have no call that gives free memory back.
            getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)(0)
            self._thread = threading.Thread(target=self._sample, daemon=True)
        else:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._base, self._highest = self._read(), 0
        if self._thread is not None:
            self._thread.start()
        return self

    def _sample(self) -> None:
        while True:
            self._highest = max(self._highest, self._read())
            if self._done.wait(self.INTERVAL_S):
                return

    def __exit__(self, *error: object) -> None:
        self.seconds = time.monotonic() - self._start
        if not self._active:
            return
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self.bytes = max(self._highest, self._read()) - self._base


TIMEOUT = timedelta(minutes=30)
MEET_TIMEOUT = timedelta(minutes=5)  # rank 0 saves a large scoring in less


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks.

    Attributes:
        control: a gloo group for objects and CPU tensors.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup

    @classmethod
    def start(cls) -> World:
        """Join the world that torchrun's environment describes; without it, a world of one."""
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        pin_precision()
        device = _device()
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, timeout=TIMEOUT)
        elif size == 1:
            dist.init_process_group(
                backend, store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT
            )
        else:
            fault = f"WORLD_SIZE is {size}, but there is no MASTER_ADDR"
            fix = "start it with torchrun, or without WORLD_SIZE in the environment"
            raise MismatchError(fault, fix)
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("fsdp",))
        control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return cls(rank, size, device, mesh, control)

    def gather(self, part: Any) -> list[Any] | None:
        """Return every rank's ``part`` on rank 0, in rank order; None elsewhere."""
        parts: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(part, parts, dst=0, group=self.control)
        return parts

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a CPU tensor over all ranks, on every rank; int64 wraps around."""
        dist.all_reduce(tensor, group=self.control)
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control)

    def meet(self, name: str) -> None:
        """Wait at a barrier with a name and a timeout.

        It uses the store, whose waits can time out: an ordinary barrier would also be matched by a
        rank in another collective, or hang.

        Args:
            name: name of the barrier, unique per call.

        Raises:
            RuntimeError: a rank did not arrive in time: it failed, or is elsewhere.
        """
        if self.size == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{name}/{self.rank}", "here")
        store.wait([f"{name}/{rank}" for rank in range(self.size)], MEET_TIMEOUT)

    def close(self) -> None:
        """Destroy the process groups; for the regular end, not after an error."""
        dist.barrier(group=self.control)
        dist.destroy_process_group()


def pin_precision() -> None:
    """Float32 products are float32: containers (NVIDIA's NGC) switch TF32 on by the environment."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def require_usable_gpus() -> None:
    """GPUs that nvidia-smi lists can be used; without them a CPU would be taken in silence.

    Raises:
        MismatchError: torch was built without CUDA, for a newer driver, or for ROCm.
    """
    if torch.version.hip is not None and torch.cuda.is_available():
        fault = "this torch is built for ROCm, and mismatch was never run on AMD GPUs"
        raise MismatchError(fault, "use NVIDIA GPUs, or the CPU build of torch")
    count = local_gpus()
    if not count or torch.cuda.is_available():
        return
    here, on_cpu = f"torch {torch.__version__}", "run on the CPU: CUDA_VISIBLE_DEVICES= mismatch …"
    if not torch.version.cuda:
        fault = f"{here} is a CPU build, and nvidia-smi lists {count} GPUs"
        raise MismatchError(fault, f"install a CUDA build of torch, or {on_cpu}")
    fault = (
        f"nvidia-smi lists {count} GPUs, but {here} for CUDA {torch.version.cuda} cannot use them"
    )
    needs = "a CUDA 13 build needs a driver of 580 or newer; install a torch for this driver"
    raise MismatchError(fault, f"{needs}, or {on_cpu}")


def _device() -> torch.device:
    require_usable_gpus()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", 0))
    count = torch.cuda.device_count()
    # srun --gpus-per-task=1 shows a single GPU to every rank, torchrun all of them.
    if count == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ["LOCAL_RANK"], local = "0", 0
    if local >= count:
        fault = f"rank {local} of this machine has no GPU: there are {count}"
        raise MismatchError(fault, f"lower --nproc-per-node to {count}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
