"""Fuzz every reader, and go on where it stopped: ``python -m benchmarks.fuzz --trials 20000``.

Trial N of every target has the seed N. Counts and faults go to ``--state`` after every 100 trials;
run again with the same file to continue. The last line is a row for docs/evidence/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from mismatch.run import store
from mismatch.run.directory import RUN, RUN_SCHEMA
from tests.fuzz import TARGETS
from tests.made_run import make_run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20_000, help="in all, over all targets")
    parser.add_argument("--state", type=Path, default=Path("fuzz.json"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--only", help="one target; its trials alone are counted")
    asked = parser.parse_args()
    state: dict[str, Any] = {"done": 0, "refused": 0, "same": 0, "faults": []}
    if asked.state.exists():
        state = json.loads(asked.state.read_text())
    longest = 0.0
    end = time.monotonic() + 60 * asked.minutes
    names = [asked.only] if asked.only else list(TARGETS)
    with tempfile.TemporaryDirectory() as scratch:
        run = make_run(Path(scratch) / "run")
        entry = {"verb": "check", "spec_hash": "0", "finished": None, "command": "mismatch check"}
        store.write_json(run / RUN, {"schema": RUN_SCHEMA, "invocations": [entry]})
        while state["done"] < asked.trials and time.monotonic() < end:
            seed, number = divmod(state["done"], len(names))
            started = time.monotonic()
            try:
                state[TARGETS[names[number]](Random(seed), run)] += 1
            except Exception:
                last = traceback.format_exc().strip().splitlines()
                state["faults"].append(
                    {"target": names[number], "seed": seed, "error": last[-1][:400]}
                )
                print("\n".join(last[-5:]))
            longest = max(longest, time.monotonic() - started)
            state["done"] += 1
            if state["done"] % 100 == 0:
                asked.state.write_text(json.dumps(state, indent=1))
    asked.state.write_text(json.dumps(state, indent=1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"longest trial {longest:.1f} s, at most {peak:,} MiB")
    day = datetime.now(UTC).date()
    seeds = f"0 to {max(0, state['done'] - 1) // len(names)}"
    print(
        f"| {day} | {state['done']:,} | {seeds} | {state['refused']:,} | {state['same']:,} "
        f"| {len(state['faults'])} |"
    )
    return int(bool(state["faults"]))


if __name__ == "__main__":
    raise SystemExit(main())
