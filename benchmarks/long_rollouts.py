"""Scoring long rollouts of several turns: peak memory against length, and the report's size.

    python benchmarks/long_rollouts.py [--tokens 1024 2048 4096 8192 16384] [--json FILE]

For each length a recording of 4 sequences of 8 turns (an eighth is observations) goes through
`mismatch read-rollouts`, `score` (one FSDP2 rank, bf16, a sequence at a time, no noise floor)
and `compare`, as a user's own does. Peak: the largest resident set of the processes that scored.

Goals: from the last length but one to the last a token costs no more than between the two before
(within 15 %; at short lengths loading sets the peak); report.html stays within 5 MB. Exit code 1 if
one is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
SEQUENCES, TURNS, VOCABULARY = 4, 8, 900
GROWTH_GOAL, PAGE_GOAL = 1.15, 5e6
PEAK = "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); " \
       "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One length: MiB, seconds and bytes."""

    tokens: int
    peak_mib: float
    seconds: float
    page_bytes: int
    json_bytes: int


def recording(path: Path, tokens: int) -> Path:
    """Sequences of random ids; what was sampled is given log-probabilities of a nat or so."""
    rng = np.random.default_rng(tokens)
    lines = []
    for number in range(SEQUENCES):
        ids = rng.integers(10, VOCABULARY, tokens)
        mask = (np.arange(tokens) % (tokens // TURNS)) >= tokens // TURNS // 8
        logprobs = -rng.exponential(1.0, int(mask.sum()))
        lines.append({"token_ids": ids.tolist(), "action_mask": mask.astype(int).tolist(),
                      "logprobs": logprobs.tolist(), "prompt_id": str(number),
                      "finish_reason": "length"})  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(*arguments: str) -> int:
    """`mismatch ARGUMENTS`; the largest resident set of its processes, KiB.

    Raises:
        SystemExit: it measured nothing.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PEAK, sys.executable, "-m", "mismatch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    if done.returncode > 1:
        sys.exit(done.stdout + done.stderr)
    return int(done.stdout.split()[-1])


def measure(tokens: int, place: Path) -> Row:
    """One length, through the three commands."""
    there = place / str(tokens)
    file = recording(place / f"{tokens}.jsonl", tokens)
    run("read-rollouts", str(file), "--model", "tiny-gpt-oss", "--out", str(there))
    start = time.monotonic()
    peak = run("score", str(there), "--nproc-per-node", "1", "--no-noise-floor",
               "--micro-batch-tokens", "1024")  # fmt: skip
    seconds = time.monotonic() - start
    run("compare", str(there))
    sizes = [(there / name).stat().st_size for name in ("report.html", "report.json")]
    return Row(tokens, peak / 1024, seconds, *sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for tokens in asked.tokens:
            rows.append(measure(tokens, Path(place)))
            print(*asdict(rows[-1]).items(), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    slopes = [1024 * (b.peak_mib - a.peak_mib) / (b.tokens - a.tokens)
              for a, b in itertools.pairwise(rows)]  # fmt: skip
    print("KiB a token, from each length to the next:", *(f"{slope:.0f}" for slope in slopes))
    grows = len(slopes) > 1 and slopes[-1] > GROWTH_GOAL * slopes[-2]
    return int(grows or max(row.page_bytes for row in rows) > PAGE_GOAL)


if __name__ == "__main__":
    sys.exit(main())
