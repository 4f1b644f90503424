"""A step of the loop against its floor: generation, forward and backward.

    python -m benchmarks.loop_step [--steps 5] [--engine vllm] [--run DIR]

The embedded model, 32 prompts x 4 samples x 96 tokens, on one process; medians of all steps but the
first. The floor is what a loop without any measurement would spend on the same step: generation,
and the optimiser's forward and backward passes. ``--run`` reads the steps of an arm and a seed that
ran before. Goals: a step within 30 s, weights in the engine within 2 s of it, 1.5 times the floor.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from mismatch.features.loop.history import Row, rows_of

STEP_S, WEIGHTS_S, RATIO = 30.0, 2.0, 1.5
FLOOR = ("generate_s", "update_s")
PARTS = ("export_s", "push_s", "verify_s", "generate_s", "score_s", "update_s")
SETTINGS = (
    *("--prompts-per-step", "32", "--samples-per-prompt", "4", "--max-tokens", "96"),
    *("--nproc-per-node", "1", "--no-perfectible", "--checkpoint-every", "1000"),
)


def run(engine: str, steps: int, out: Path) -> Path:
    """Run the loop and return the folder of the arm and seed."""
    command = [sys.executable, "-m", "mismatch", "loop", "--engine", engine]
    subprocess.run(
        [*command, "--steps", str(steps), "--out", str(out), *SETTINGS],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return out / "as-is" / "seed-0"


def medians(rows: list[Row]) -> dict[str, float]:
    """Of every part, the whole step and its floor; without the first step."""
    rest = {name: np.array([row[name] for row in rows[1:]]) for name in (*PARTS, "seconds")}
    rest["floor"] = np.sum([rest[name] for name in FLOOR], axis=0)
    rest["weights"] = rest["export_s"] + rest["push_s"]
    return {name: float(np.median(values)) for name, values in rest.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--run", type=Path, help="ARM/seed-N of a run")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = asked.run or run(asked.engine, asked.steps, Path(scratch) / "run")
        found = medians(rows_of(place))
    for name in PARTS:
        print(f"{name:12} {found[name]:8.2f} s")
    ratio = found["seconds"] / found["floor"]
    print(f"whole step   {found['seconds']:8.2f} s (goal {STEP_S:g})")
    print(f"weights      {found['weights']:8.2f} s (goal {WEIGHTS_S:g})")
    print(f"over floor   {ratio:8.2f}   (goal {RATIO:g})")
    passed = found["seconds"] <= STEP_S and found["weights"] <= WEIGHTS_S and ratio <= RATIO
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
