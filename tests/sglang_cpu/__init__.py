"""What SGLang lacks on a CPU without AMX, so that tests run the real SGLang there.

SGLang's CPU kernels come in a package of their own (``sgl_kernel``) that the package index has no
build of, and PyTorch's index is needed for a CPU build of torchvision. Without them SGLang 0.5.23
does not import on a CPU. With this folder in ``MISMATCH_SGLANG_HOOK``, SGLang's own processes, and
no others, take from here:

1. ``sgl_kernel``, of which SGLang imports names whatever the model (``kernels.py``);
2. the declaration of two torchvision operators, so that torchvision's Python code can be imported;
3. plain host memory for the capture of routed experts, which SGLang pins to a GPU;
4. attention with learned sinks, as gpt-oss has them, which SGLang's portable attention ignores:
   numbers of gpt-oss on a CPU are those of this substitute, and reports say so (``used``).

All of it is inert where SGLang runs on a GPU.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

CPU_SWITCH = "SGLANG_USE_CPU_ENGINE"  # SGLang's own, read when it is imported
SINKS = "gpt-oss attention on CPU is mismatch's substitute"
# What of it was used in this process, one sentence each.
used: list[str] = []
_keep: list[object] = []  # operator libraries go when nothing refers to them


def on_cpu() -> bool:
    """Tell whether SGLang here computes on the CPU; known without importing torch."""
    return os.environ.get(CPU_SWITCH) == "1" or "+cpu" in _version("torch")


def arguments(context: int) -> dict[str, Any]:
    """Return what SGLang is started with on a CPU, unless a user says otherwise."""
    if not on_cpu():
        return {}
    return {
        "device": "cpu",
        "attention_backend": "intel_amx",  # SGLang's own choice; torch_native without AMX
        "mem_fraction_static": 0.1,
        "max_total_tokens": max(8192, 4 * context),
        "max_running_requests": 48,
        "disable_cuda_graph": True,
    }


def prepare() -> None:
    """Make SGLang importable in this process; before its first import, in every process of it."""
    if not on_cpu():
        return
    os.environ.setdefault(CPU_SWITCH, "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiles for minutes what runs for seconds
    if "+cpu" in _version("torch") and "+cpu" not in (_version("torchvision") or "+cpu"):
        _declare_torchvision_operators()
    from . import kernels

    kernels.install()


def register() -> None:
    """Change what SGLang runs on this CPU; in its scheduler's process, before a model is loaded."""
    if on_cpu():
        from . import kernels

        kernels.register(used, SINKS)


def _declare_torchvision_operators() -> None:
    """Declare the two operators that torchvision's import asks for and a GPU build lacks here."""
    from torch import library, ops

    if _keep or hasattr(ops.torchvision, "nms"):
        return
    torchvision: Any = library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    taken = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    torchvision.define(f"nms{taken}")
    torchvision.define(f"qnms{taken}")
    _keep.append(torchvision)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
