"""CPU support for SGLang: what it lacks on a CPU without AMX, in one room.

SGLang's CPU kernels come in a package of their own (``sgl_kernel``) that the package index has no
build of, and PyTorch's index is needed for a CPU build of torchvision. Without them SGLang 0.5.23
does not import on a CPU. This room supplies, in SGLang's own processes and nowhere else:

1. ``sgl_kernel``, of which SGLang imports names whatever the model (``sgl_kernel.py``);
2. the declaration of two torchvision operators, so that torchvision's Python code can be imported;
3. plain host memory for the capture of routed experts, which SGLang pins to a GPU;
4. attention with learned sinks, as gpt-oss has them, which SGLang's portable attention ignores:
   numbers of gpt-oss on a CPU are those of this substitute, and reports say so.

All of it is inert where SGLang runs on a GPU or has its own CPU kernels: see :func:`needed`.
"""

from __future__ import annotations

import os
from importlib import metadata
from importlib.util import find_spec
from typing import Any

CPU_SWITCH = "SGLANG_USE_CPU_ENGINE"  # SGLang's own, read when it is imported
# What SGLang is started with on a CPU, unless a user says otherwise.
ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "intel_amx",  # SGLang's own choice; torch_native without AMX
    "mem_fraction_static": 0.1,
    "max_total_tokens": 8192,
    "max_running_requests": 48,
    "disable_cuda_graph": True,
}
SINKS = "gpt-oss attention on CPU is mismatch's substitute"

# What of it was used in this process, one sentence each.
used: list[str] = []
_keep: list[object] = []  # operator libraries go when nothing refers to them


def on_cpu() -> bool:
    """Whether SGLang here computes on the CPU; known without importing torch."""
    if os.environ.get(CPU_SWITCH) == "1":
        return True
    return "+cpu" in _version("torch")


def needed() -> bool:
    """Whether SGLang computes on a CPU and has no kernels of its own for it."""
    if not on_cpu():
        return False
    from mismatch.engines.sglang.cpu import sgl_kernel

    return sgl_kernel.installed() or find_spec("sgl_kernel") is None


def prepare() -> None:
    """Make SGLang importable in this process; before its first import, in every process of it."""
    if not on_cpu():
        return
    os.environ.setdefault(CPU_SWITCH, "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiles for minutes what runs for seconds
    if "+cpu" in _version("torch") and "+cpu" not in (_version("torchvision") or "+cpu"):
        _declare_torchvision_operators()
    if needed():
        from mismatch.engines.sglang.cpu import sgl_kernel

        sgl_kernel.install()


def register() -> None:
    """Change what SGLang runs on this CPU; in its scheduler's process, before a model is loaded."""
    if needed():
        from mismatch.engines.sglang.cpu import sgl_kernel

        sgl_kernel.register(used, SINKS)


def _declare_torchvision_operators() -> None:
    """A GPU build of torchvision has no operators here, and its import asks for two of them."""
    from torch import library, ops

    if _keep or hasattr(ops.torchvision, "nms"):
        return
    torchvision: Any = library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    torchvision.define(f"nms{arguments}")
    torchvision.define(f"qnms{arguments}")
    _keep.append(torchvision)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
