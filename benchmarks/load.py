"""Measure large dumps, runs and folders of runs: ``python -m benchmarks.load --place DIR``.

Each command runs in a separate process; seconds and the largest resident memory are the kernel's.
The dumps are drawn: two sides that differ by normal noise. What is there from an earlier call is
not made again. The output is the table of docs/evidence/load.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LIMIT_S = 600


@dataclass(frozen=True)
class Cost:
    """What one command took."""

    code: int
    seconds: float
    peak_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of the largest dump")
    asked = parser.parse_args()
    place = asked.place.resolve()
    place.mkdir(parents=True, exist_ok=True)
    print("| what | seconds | peak memory |\n| --- | ---: | ---: |")
    for name, arguments in cases(place, asked.tokens):
        if asked.only not in name:
            continue
        cost = measured(arguments, place / "log")
        words = "" if cost.code in (0, 1) else f" (exit code {cost.code})"
        print(
            f"| {name}{words} | {cost.seconds:.0f} | {cost.peak_bytes / 1e9:.1f} GB |", flush=True
        )
    return 0


def cases(place: Path, largest: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the command of every case; a dump is made when its case comes."""
    for tokens in (1_000_000, largest):
        name = f"{tokens // 1_000_000}M"
        dump = drawn(place / f"{name}.jsonl", tokens // 500, 500)
        out = place / f"run-{name}"
        shutil.rmtree(out, ignore_errors=True)
        yield f"postmortem, {name} tokens", ["postmortem", str(dump), "--out", str(out)]
        if tokens == 1_000_000:
            yield "compare, 1M tokens", ["compare", str(out)]
            yield "report, 1M tokens", ["report", str(out)]
    dump = drawn(place / "prompts.jsonl", 100_000, 8)
    out = place / "run-prompts"
    shutil.rmtree(out, ignore_errors=True)
    yield "postmortem, 100,000 prompts of 8 tokens", ["postmortem", str(dump), "--out", str(out)]
    runs = saved(place, 500)
    yield "report, 500 saved runs", ["report", *runs]


def drawn(path: Path, rows: int, tokens: int) -> Path:
    """Write a dump of rows of so many tokens."""
    if path.exists():
        return path
    random = np.random.default_rng(0)
    with path.with_suffix(".partial").open("w") as file:
        for number in range(rows):
            ids = random.integers(5, 50_000, tokens)
            rollout = -random.exponential(0.5, tokens)
            train = rollout + random.normal(0, 0.01, tokens)
            sides = (",".join(f"{value:.5f}" for value in side) for side in (rollout, train))
            first, second = sides
            file.write(
                f'{{"prompt_token_ids": [{number}, 1], "response_token_ids": {ids.tolist()}, '
                f'"logprobs": [{first}], "train_logprobs": [{second}]}}\n'
            )
    return path.with_suffix(".partial").rename(path)


def saved(place: Path, count: int) -> list[str]:
    """Make one run of 32 prompts, and copies of it."""
    first = place / "saved" / "run-000"
    if not first.exists():
        dump = drawn(place / "small.jsonl", 32, 50)
        measured(["postmortem", str(dump), "--out", str(first)], place / "log")
    runs = [first.with_name(f"run-{number:03d}") for number in range(count)]
    for run in runs[1:]:
        if not run.exists():
            shutil.copytree(first, run)
    return list(map(str, runs))


def measured(arguments: list[str], log: Path) -> Cost:
    """Run ``mismatch ARGUMENTS``; its output goes to ``log``."""
    command = ["timeout", str(LIMIT_S), sys.executable, "-m", "mismatch", *arguments]
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(process.returncode, time.monotonic() - start, usage.ru_maxrss * 1024)


if __name__ == "__main__":
    raise SystemExit(main())
