"""Fail every write of a run in turn: ``python -m benchmarks.write_faults --state faults.jsonl``.

See tests/write_faults.py. Every trial is appended to ``--state``; run again with the same file to
go on. ``--every N`` takes each Nth trial, so that operations and faults take turns. The last lines
are rows for docs/evidence/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from tests.write_faults import FAULTS, SCENARIOS, run_scenario


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="default: all")
    parser.add_argument("--state", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--place", type=Path, help="keeps recordings for the next call")
    asked = parser.parse_args()
    lines = asked.state.read_text().splitlines() if asked.state.exists() else []
    trials = {(t["scenario"], t["number"], t["fault"]): t for t in map(json.loads, lines)}
    rows, wrong = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.scenario or SCENARIOS:

            def wanted(number: int, fault: str, operation: str, name: str = name) -> bool:
                turn = number * len(FAULTS) + FAULTS.index(fault)
                return turn % asked.every == 0 and (name, number, fault) not in trials

            def report(
                number: int, fault: str, operation: str, wrong: str, name: str = name
            ) -> None:
                trial = {"scenario": name, "number": number, "fault": fault}
                trial |= {"operation": operation, "wrong": wrong}
                with asked.state.open("a") as file:
                    file.write(json.dumps(trial) + "\n")
                if wrong:
                    print(f"{name}, operation {number} ({operation}), {fault}: {wrong}", flush=True)

            place = (asked.place or Path(scratch)) / name.replace(" ", "-")
            operations = run_scenario(name, place.resolve(), wanted, report)
            all_trials = map(json.loads, asked.state.read_text().splitlines())
            mine = [trial for trial in all_trials if trial["scenario"] == name]
            bad = sum(bool(trial["wrong"]) for trial in mine)
            wrong += bad
            day = datetime.now(UTC).date()
            rows.append(f"| {day} | {name} | {operations} | {len(mine)} | {bad} |")
    print("\n".join(rows))
    return int(wrong > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
