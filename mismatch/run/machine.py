"""This machine, as far as it is known without torch."""

from __future__ import annotations

import os
import subprocess

GIB = 1 << 30
SHARED_BYTES = 192 * 2**20  # vLLM's message ring is 160 MiB


def local_gpus() -> int:
    """GPUs that a process here would see, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() not in ("", "-1")])
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU") for line in answer.stdout.splitlines())


def free_gpu_bytes() -> list[int]:
    """Free memory of every GPU of this machine, visible or not; [] without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    numbers = [line.strip() for line in answer.stdout.splitlines()]
    return [int(number) << 20 for number in numbers if number.isdigit()]


def gib(count: float) -> str:
    """Bytes for people: GiB, or MiB where it is less than one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"
