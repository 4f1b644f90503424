"""Run the unit and command-line tests as another machine would run them.

Sums differ in their last bits between CPUs, because vector units add in another order. This script
simulates other CPUs and another surrounding on this machine:

- ``plain``: numpy and torch without AVX2 and AVX-512, oneDNN without AVX-512 and AMX, OpenBLAS's
  kernels for Haswell, two OpenMP threads, the C locale, Tokyo's time zone, a terminal of 200
  columns, an umask of 077. All tests.
- ``old``: the same, with OpenBLAS's kernels for Nehalem. The tests that compute numbers.

Arguments after the name go to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAST = ("-m", "not grid and not slow")
MACHINES = {
    "plain": ("Haswell", ("tests/unit", "tests/cli")),
    "old": ("Nehalem", ("tests/unit", "-k", "golden or metric or estimat or square or causes")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=MACHINES)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of pytest")
    asked = parser.parse_args()
    core, tests = MACHINES[asked.machine]
    os.umask(0o077)
    env = os.environ | {
        "NPY_DISABLE_CPU_FEATURES": " ".join(newer_than_avx()),
        "OPENBLAS_CORETYPE": core,
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # else oneDNN offers torch what its kernels here lack
        "OMP_NUM_THREADS": "2",
        "LANG": "C",
        "TZ": "Asia/Tokyo",
        "COLUMNS": "200",
    }
    env.pop("LC_ALL", None)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadscope"]
    return subprocess.run([*command, *FAST, *tests, *asked.arguments], cwd=ROOT, env=env).returncode


def newer_than_avx() -> list[str]:
    """Return the CPU features above AVX that this numpy would use here.

    Numpy refuses to disable what it does not know, so the names come from numpy itself.
    """
    import numpy as np

    (simd,) = [
        found for line in [np.show_config(mode="dicts")] for found in [line["SIMD Extensions"]]
    ]
    return [name for name in simd["found"] if name.startswith(("AVX2", "AVX512", "FMA3", "X86_V"))]


if __name__ == "__main__":
    raise SystemExit(main())
