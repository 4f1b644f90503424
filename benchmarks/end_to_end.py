"""What a whole check costs beyond its two measurements: sampling, and one forward of the trainer.

    python benchmarks/end_to_end.py [--num-prompts 1024] [--max-tokens 128] [--keep DIR] [--whole]

One `mismatch check` (without the passes of the noise floor), with times from its run.json.
Floor: the engine's generation alone plus one trainer forward over the same tokens. Taken off: the
start-ups (until the engine is ready to sample; what the trainer still needs to get ready after the
engine is done; the interpreter of the tool). Counted: everything else, such as digests of the
weights, the ends of both processes, metrics with their intervals, and the report. Goal: at most
1.25 times the floor. The engine's prefill rescoring is a separate measurement (--no-prefill
leaves it out), so the goal is without it; the ratio with it is printed as well. Also printed: how
much of the trainer's start-up passed while the engine was at work.

With --whole the check is the default one, with every pass of the noise floor and the engine in
float32: the floor is all generation and scoring that ran, the goal at most 2.0 times that, at the
default number of prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOAL, WHOLE_GOAL, WHOLE_PROMPTS = 1.25, 2.0, 64
NOT_WORK = ("ready", "sampled", "scored")  # timings that are no part of generation or scoring


def run_check(directory: Path, flags: list[str]) -> tuple[float, dict[str, Any]]:
    """Wall-clock seconds of the command, and its entry in run.json."""
    command = [sys.executable, "-m", "mismatch", "check", "--model", "tiny-gpt-oss"]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--out", str(directory), *flags], capture_output=True, text=True, check=False
    )
    wall = time.perf_counter() - start
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    (entry,) = json.loads((directory / "run.json").read_text())["invocations"]
    return wall, entry


def interpreter() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "mismatch", "--version"], check=True, capture_output=True)
    return time.perf_counter() - start


def account(wall: float, entry: dict[str, Any], tool: float) -> dict[str, float]:
    """Return the parts of one check, in seconds."""
    engine, train = entry["timings"]["engine"], entry["timings"]["train"]
    late = max(0.0, train["ready"] - entry["seconds"]["rollout"])
    startups = tool + engine["ready"] + late
    floor = engine["generate"] + train["fsdp"]
    return {
        "whole command": wall,
        "start-up: tool": tool,
        "start-up: engine": engine["ready"],
        "start-up: trainer, not overlapped": late,
        "start-up: trainer, overlapped": train["ready"] - late,
        "engine: generation": engine["generate"],
        "engine: prefill": engine.get("prefill", 0.0),
        "trainer: one forward": train["fsdp"],
        "compare": entry["seconds"]["compare"],
        "end to end, start-ups apart": wall - startups,
        "floor: generation + one forward": floor,
    }


def account_whole(wall: float, entry: dict[str, Any], tool: float) -> dict[str, float]:
    """Return the parts of a default check, in seconds: start-ups, passes, all else."""
    timings, seconds = entry["timings"], entry["seconds"]
    engines = seconds["rollout"] + seconds.get("float32-engine", 0.0)
    starts = {name: part["ready"] for name, part in timings.items() if name != "train"}
    starts["trainer, not overlapped"] = max(0.0, timings["train"]["ready"] - engines)
    passes = {
        f"{worker}: {name}": took
        for worker, part in timings.items()
        for name, took in part.items()
        if name not in NOT_WORK and not name.startswith("load:")
    }
    floor = sum(passes.values())
    return {
        "whole command": wall,
        "start-up: tool": tool,
        **{f"start-up: {name}": took for name, took in starts.items()},
        **passes,
        "compare and report": seconds["compare"],
        "end to end, start-ups apart": wall - tool - sum(starts.values()),
        "floor: all passes that ran": floor,
    }


def run_whole(options: argparse.Namespace, directory: Path) -> int:
    """Measure the default check against the passes that ran."""
    flags = ["--engine", options.engine, "--num-prompts", str(options.num_prompts)]
    wall, entry = run_check(directory, [*flags, "--max-tokens", str(options.max_tokens)])
    parts = account_whole(wall, entry, interpreter())
    for name, seconds in parts.items():
        print(f"{name:36} {seconds:8.2f} s")
    ratio = parts["end to end, start-ups apart"] / parts["floor: all passes that ran"]
    verdict = "PASS" if ratio <= WHOLE_GOAL else "FAIL"
    print(f"{verdict}: {ratio:.2f} times the passes that ran, goal {WHOLE_GOAL}")
    return 0 if ratio <= WHOLE_GOAL else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="the default check, all passes")
    parser.add_argument("--num-prompts", type=int, help="default: 1024, with --whole 64")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--keep", type=Path, help="directory for the run, kept")
    options = parser.parse_args()
    if options.num_prompts is None:
        options.num_prompts = WHOLE_PROMPTS if options.whole else 1024
    flags = ["--no-noise-floor", "--engine", options.engine]
    flags += ["--num-prompts", str(options.num_prompts), "--max-tokens", str(options.max_tokens)]
    with tempfile.TemporaryDirectory() as temporary:
        if options.whole:
            return run_whole(options, options.keep or Path(temporary) / "run")
        wall, entry = run_check(options.keep or Path(temporary) / "run", flags)
    parts = account(wall, entry, interpreter())
    for name, seconds in parts.items():
        print(f"{name:36} {seconds:8.2f} s")
    whole, floor = parts["end to end, start-ups apart"], parts["floor: generation + one forward"]
    ratio = (whole - parts["engine: prefill"]) / floor
    print(f"with the engine's prefill, a third measurement: {whole / floor:.2f} times the floor")
    print(f"{'PASS' if ratio <= GOAL else 'FAIL'}: {ratio:.2f} times the floor, goal {GOAL}")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
