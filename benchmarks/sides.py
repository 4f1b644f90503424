"""Twenty faults on each side and in the model code that both sides of the training world share.

    python benchmarks/sides.py DIR [--faults NAME …] [--places engine trainer shared]

Every case is one `mismatch check` of default size with one rank (no `locate`). A fault of the
training world scores the clean run's own tokens again. A case whose report is in DIR is not run
again, so the command goes on where it was stopped; docs/evidence/sides.json and the page next to
it are written after each case. `--write` only writes.

Goal: no HEALTHY and no TOLERABLE where mean |delta| or a float32 gap is beyond its level, and the
clean run HEALTHY; exit code 1 if one is missed. About 75 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.calibration import plugin  # noqa: E402
from benchmarks.planted_sides import FAULTS, FUNCTIONS  # noqa: E402
from mismatch.pipeline.build import build_report  # noqa: E402
from mismatch.pipeline.document import headline_of  # noqa: E402
from mismatch.run.directory import load_spec  # noqa: E402

STATE = ROOT / "docs" / "evidence" / "sides.json"
PLACES = ("engine", "trainer", "shared")
CLEAN = "clean"
FLAGS = ("--model", "tiny-gpt-oss", "--nproc-per-node", "1", "--no-locate")
# What the side may be called. Shared code shows as a difference of two implementations; of weights
# the digests say that it is the training world that holds others than the checkpoint.
RIGHT_SIDES = {
    "engine": {"engine", "either"},
    "trainer": {"trainer"},
    "shared": {"either", "trainer"},
}
HEAD = """# Twenty faults on each side

One fault at a time was planted in memory: in the engine, in the trainer's passes, or in the model
code that trainer and float32 reference share. Each got a `mismatch check` of tiny-gpt-oss at
default size ({tokens:,} tokens, one rank, bf16). The table has the largest gap to the reference in
float32, mean \\|delta\\| in nats. Made by `benchmarks/sides.py`, {date}.
"""
TITLES = {
    "engine": "In the engine",
    "trainer": "In the trainer",
    "shared": "In shared model code",
}
PAGE = """
| fault | in the engine | in the trainer | in shared code |
| --- | ---: | ---: | ---: |"""
END = """
**Next:** [the smallest faults that are seen](smallest.md).
"""
WORLD = """
import os
import sys

if "RANK" in os.environ or "mismatch.features.locate.worker" in sys.orig_argv:
    import planted_sides

    planted_sides.plant_in_world()
"""


@dataclass(frozen=True)
class Row:
    """What a check said of one fault."""

    fault: str
    place: str
    verdict: str
    exit_code: int
    tokens: int
    nats: float
    """mean |delta|"""
    gaps: dict[str, float]
    failed: tuple[str, ...]
    cause: str
    side: str

    @property
    def right_side(self) -> bool:
        """Whether the side named, if any, is one that the run can know."""
        function = self.place == "shared" and self.fault in FUNCTIONS
        return self.side in ({"either"} if function else RIGHT_SIDES[self.place])

    @property
    def passed(self) -> bool:
        return self.verdict in ("healthy", "tolerable")


def run(fault: str, place: str, home: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """Return the directory of a finished check, made if it is not there.

    Raises:
        SystemExit: the check left no report; with its last lines.
    """
    target = home / (fault if fault == CLEAN else f"{place}-{fault}")
    if (target / "report.json").is_file():
        return target
    shutil.rmtree(target, ignore_errors=True)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mismatch", "check", *flags, "--out", str(target)]
    if fault != CLEAN:
        env["PLANTED_SIDE"] = f"{fault}@{place}"
        env["PYTHONPATH"] = os.pathsep.join([str(planted(home)), str(ROOT)])
    if place in ("trainer", "shared"):
        shutil.copytree(home / CLEAN, target)
        forget(target, ("vllm",) if place == "shared" else ("vllm", "reference", "plain"))
        command = [sys.executable, "-m", "mismatch", "check", "--resume", str(target)]
    print(f"{target.name}: {' '.join(command[2:])}", flush=True)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    (home / f"{target.name}.log").write_text(done.stdout + done.stderr)
    if not (target / "report.json").is_file():
        raise SystemExit(f"{target.name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return target


def forget(run_dir: Path, kept: tuple[str, ...]) -> None:
    """Delete the report, and scorings whose names do not begin with one of these."""
    for folder in (run_dir, run_dir / "long"):
        for kind in ("scores", "routing", "dists"):
            for file in (folder / kind).glob("*"):
                if not file.name.startswith(kept):
                    file.unlink()
    for file in (*run_dir.glob("report.*"), *run_dir.glob("locate.json")):
        file.unlink()


def planted(home: Path) -> Path:
    """Return a directory for PYTHONPATH that plants faults in vLLM and in the training world."""
    place = plugin(home, "planted_sides")
    (place / "sitecustomize.py").write_text(WORLD)
    return place


def row_of(fault: str, place: str, run_dir: Path) -> Row:
    """Read a finished check."""
    built, _ = build_report(run_dir, load_spec(run_dir))
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    square = report.get("square") or {}
    gaps = {gap["left"]: gap["size"]["value"] for gap in square.get("gaps", ())}
    ranked = (report.get("causes") or {}).get("ranked") or []
    headline = asdict(headline_of(built))  # of this version
    return Row(
        fault,
        place,
        report["verdict"]["status"],
        headline["exit_code"],
        headline["n_tokens"],
        headline["logprob_abs_diff_mean"],
        gaps,
        tuple(check["id"] for check in report["checks"] if check["status"] == "failed"),
        ranked[0]["id"] if ranked else "",
        headline.get("side_at_fault") or "",
    )


def page(rows: list[Row], made: str) -> str:
    """Write the page: what was passed and placed, then the gap that each fault makes."""
    clean, *planted = rows
    parts = [HEAD.format(tokens=clean.tokens, date=made)]
    parts.append(f"The clean run is {clean.verdict.upper()}.")
    for place, title in TITLES.items():
        of = [row for row in planted if row.place == place]
        broken = sum(row.verdict == "broken" for row in of)
        right = sum(row.right_side for row in of)
        parts.append(f"{title} {broken} of {len(of)} are BROKEN, {right} on the right side.")
    others = [row for row in planted if row.verdict != "broken"]
    parts += [f"`{row.fault}` in {row.place} is {row.verdict.upper()}." for row in others]
    parts.append(PAGE)
    for fault in dict.fromkeys(row.fault for row in planted):
        of_place = {row.place: row for row in planted if row.fault == fault}
        gaps = [number(max(of_place[p].gaps.values())) if p in of_place else "–" for p in PLACES]
        parts.append(f"| `{fault}` | {' | '.join(gaps)} |")
    return "\n".join(parts) + "\n" + END


def number(value: float) -> str:
    return f"{value:.2g}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("home", type=Path)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES)
    parser.add_argument(
        "--write", action="store_true", help="only write the page of what is in DIR"
    )
    asked = parser.parse_args()
    asked.home.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    cases = [(CLEAN, ""), *((fault, place) for fault in asked.faults for place in asked.places)]
    for fault, place in cases:
        target = asked.home / (fault if fault == CLEAN else f"{place}-{fault}")
        if asked.write and not (target / "report.json").is_file():
            continue
        rows.append(row_of(fault, place, run(fault, place, asked.home)))
        print(
            f"  {rows[-1].verdict}, exit {rows[-1].exit_code}, {rows[-1].nats:.3g} nats", flush=True
        )
        made = date.today().isoformat()
        state = {"date": made, "rows": [asdict(row) for row in rows]}
        STATE.write_text(json.dumps(state, indent=1) + "\n")
        STATE.with_suffix(".md").write_text(page(rows, made))
    passed = [row for row in rows[1:] if row.passed]
    for row in passed:
        print(f"passed: {row.fault} in the {row.place} ({row.verdict}, {row.nats:.2g} nats)")
    return int(rows[0].verdict != "healthy" or bool(passed))


if __name__ == "__main__":
    sys.exit(main())
