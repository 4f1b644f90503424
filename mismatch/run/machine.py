"""This machine, as far as it is known without torch."""

from __future__ import annotations

import os
import socket
import subprocess
from urllib.parse import urlsplit

GIB = 1 << 30
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
SHARED_BYTES = 192 * 2**20  # vLLM's message ring is 160 MiB


def nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi answers; "" where it is missing, hangs or fails."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout


def visible_gpus() -> list[str] | None:
    """The items of CUDA_VISIBLE_DEVICES; None: it is not set."""
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


def unknown_host() -> tuple[str, str]:
    """The hub's host where its name cannot be looked up (and no proxy does that), and why."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if not host or any(os.environ.get(name) for name in PROXIES):
        return "", ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        return host, error.strerror or str(error)
    return "", ""


def gib(count: float) -> str:
    """Bytes for people: GiB, or MiB where it is less than one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"
