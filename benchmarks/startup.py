"""How long the help takes, against importing typer and rich: the floor of any tool like it.

    python benchmarks/startup.py [--runs 20]

The commands are run in turns, each in a fresh interpreter, and compared by the fastest of each:
what the machine does meanwhile only ever adds. CPU time is compared, so that other processes count
little. Goals: `mismatch --help` at most 1.5 times, `mismatch check --help` at most 2 times.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

FLOOR = "import typer, rich"
GOALS = {"mismatch --help": 1.5, "mismatch check --help": 2.0}
COMMANDS = {
    FLOOR: [sys.executable, "-c", "import typer, rich"],
    "mismatch --help": [sys.executable, "-m", "mismatch", "--help"],
    "mismatch check --help": [sys.executable, "-m", "mismatch", "check", "--help"],
}


def run(command: list[str]) -> tuple[float, float]:
    """Seconds of wall clock and of CPU."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    count = parser.parse_args().runs
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(count):
        for name, command in COMMANDS.items():
            times[name].append(run(command))
    best = {
        name: [min(column) for column in zip(*rows, strict=True)] for name, rows in times.items()
    }
    print(f"{'fastest of ' + str(count):24} {'wall, s':>9} {'CPU, s':>9} {'ratio':>7} {'goal':>6}")
    passed = True
    for name, (wall, cpu) in best.items():
        ratio = cpu / best[FLOOR][1]
        goal = GOALS.get(name, 1.0)
        passed = passed and ratio <= goal
        print(f"{name:24} {wall:9.3f} {cpu:9.3f} {ratio:7.2f} {goal:6.1f}")
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
