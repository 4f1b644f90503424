"""Faults on each side and in the model code that both sides of the training world share.

    python benchmarks/sides.py DIR [--families NAME …] [--faults NAME …] [--places NAME …]

Every case is one `mismatch check` of default size with one rank (no `locate`), of tiny-gpt-oss and
of other families' models, each trained for some minutes and kept in DIR/models. A family gets the
faults that it can have. A fault of the training world scores the clean run's own tokens again. A
case whose report is in DIR is not run again, so the command goes on where it was stopped;
docs/evidence/sides.json and the page next to it are written after each case. `--write` runs
nothing, but reads what is in DIR.

Goal: no HEALTHY and no TOLERABLE where mean |delta| or a float32 gap is beyond its level, and the
clean runs HEALTHY; exit code 1 if one is missed. About 30 minutes for a family on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
from benchmarks.family_models import FLAGS, trained  # noqa: E402
from benchmarks.planted_sides import FAULTS, FUNCTIONS, NEEDS  # noqa: E402
from mismatch.models import resolve_model  # noqa: E402
from mismatch.pipeline.build import build_report  # noqa: E402
from mismatch.pipeline.document import headline_of  # noqa: E402
from mismatch.run.directory import load_spec  # noqa: E402

STATE = ROOT / "docs" / "evidence" / "sides.json"
PLACES = ("engine", "trainer", "shared")
CLEAN = "clean"
ALONE = ("--no-locate", "--no-explain")
EMBEDDED = "tiny-gpt-oss"
FAMILIES = (EMBEDDED, "llama", "qwen3", "qwen3_moe", "gemma3_text", "mistral", "deepseek_v3")
# Digests say which side holds other weights than the checkpoint. A function of the engine shows as
# a difference of two implementations, as one of the code that trainer and reference share does.
SIDES = {"engine": "engine", "trainer": "trainer", "shared": "trainer"}
HEAD = """# Planted faults on each side

One fault at a time was planted in memory: in the engine, in the trainer's passes, or in the model
code that trainer and float32 reference share. Each got a `mismatch check` at default size (one
rank, bf16). Cells: runs called BROKEN of runs with the fault. `deepseek_v3` ran in vLLM's
Transformers backend, see [families](families.md). Made by `benchmarks/sides.py`, {date}.

| family | clean | {places} | not planted: no |
| --- | --- |{columns} --- |"""
SAID = """
{n} of {all} blame what a check can know: the side, or either side for functions in engine or shared
code."""
GAPS = """
Each fault's smallest gap to the reference in float32, mean \\|delta\\| in nats: {gaps}."""
END = """
**Next:** [the smallest faults that are seen](smallest.md).
"""
WORLD = """
import os
import sys

located = "mismatch.features.locate.worker" in sys.orig_argv
if "RANK" in os.environ or located:
    import planted_sides

    planted_sides.plant_in_world()
if located or "mismatch.processes.workers.session" in sys.orig_argv:
    import planted_sides

    planted_sides.plant_in_engine()
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
    family: str = EMBEDDED

    @property
    def right_side(self) -> bool:
        """Whether the side named is what the run can know of it."""
        function = self.place != "trainer" and self.fault in FUNCTIONS
        return self.side == ("either" if function else SIDES[self.place])

    @property
    def passed(self) -> bool:
        return self.verdict in ("healthy", "tolerable")


def prepared(family: str, home: Path, seconds: float) -> tuple[Path, tuple[str, ...]]:
    """Return the directory for a family's checks and their flags; train its model if needed."""
    model = Path(resolve_model(EMBEDDED)) if family == EMBEDDED else home / "models" / family
    if family != EMBEDDED:
        trained(family, model, seconds)
    (home / family).mkdir(parents=True, exist_ok=True)
    which = family if family == EMBEDDED else str(model)
    flags = ("--model", which, "--nproc-per-node", "1", *ALONE, *FLAGS.get(family, ()))
    return home / family, flags


def lacked(fault: str, anatomy: str) -> str:
    """Return the word for what a model has not, so that it cannot have a fault; often empty."""
    word, pattern = NEEDS.get(fault, ("", ""))
    return "" if re.search(pattern, anatomy) else word


def anatomy(model: Path) -> str:
    """Return a checkpoint's config.json and the names of its tensors."""
    from safetensors import safe_open

    names: list[str] = []
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names += tensors.keys()
    return "\n".join([(model / "config.json").read_text(), *names])


def run(fault: str, place: str, home: Path, flags: tuple[str, ...]) -> Path:
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
        command.append("--trust-run")  # its engine arguments are ours
    print(f"{home.name} {target.name}: {' '.join(command[2:])}", flush=True)
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


def row_of(fault: str, place: str, run_dir: Path, family: str = EMBEDDED) -> Row:
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
        family,
    )


def page(rows: list[Row], without: dict[str, list[str]], made: str) -> str:
    """Write the page: what was passed and placed of each family, then each fault's smallest gap."""
    planted = [row for row in rows if row.fault != CLEAN]
    columns = " ---: |" * len(PLACES)
    lines = [HEAD.format(date=made, places=" | ".join(PLACES), columns=columns)]
    for clean in (row for row in rows if row.fault == CLEAN):
        of = [row for row in planted if row.family == clean.family]
        verdicts = [[row.verdict for row in of if row.place == place] for place in PLACES]
        counts = [f"{each.count('broken')}/{len(each)}" if each else "–" for each in verdicts]
        lacks = ", ".join(without.get(clean.family, ())) or "–"
        lines.append(
            f"| `{clean.family}` | {clean.verdict.upper()} | {' | '.join(counts)} | {lacks} |"
        )
    others = [row for row in planted if row.verdict != "broken"]
    lines += [""] * bool(others)
    for row in others:
        told = f"{row.verdict.upper()} (gap {number(gap(row))}, {number(row.nats)} bf16)"
        lines.append(f"- `{row.family}`, `{row.fault}`, {row.place}: {told}.")
    right = sum(row.right_side for row in planted)
    lines.append(SAID.format(n=right, all=len(planted)))
    smallest = {fault: [gap(row) for row in planted if row.fault == fault] for fault in FAULTS}
    of_each = (f"`{fault}` {number(min(gaps))}" for fault, gaps in smallest.items() if gaps)
    lines.append(GAPS.format(gaps=", ".join(of_each)))
    return "\n".join(lines) + "\n" + END


def gap(row: Row) -> float:
    """Return the larger of the two float32 gaps, nats."""
    return max(row.gaps.values(), default=0.0)


def number(value: float) -> str:
    return f"{value:.2g}"


def stored() -> tuple[dict[tuple[str, str, str], Row], dict[str, list[str]]]:
    """Return the rows of sides.json, and what families lack."""
    state = json.loads(STATE.read_text()) if STATE.is_file() else {"rows": [], "lacking": {}}
    rows = [Row(**row) for row in state["rows"]]
    return {(row.family, row.place, row.fault): row for row in rows}, state["lacking"]


def write(new: list[Row], lacking: dict[str, list[str]]) -> list[Row]:
    """Put rows into sides.json, write the page, and return all rows in their order."""
    rows, without = stored()
    rows |= {(row.family, row.place, row.fault): row for row in new}
    without |= lacking
    names = [CLEAN, *FAULTS]
    ordered = sorted(
        rows.values(),
        key=lambda row: (FAMILIES.index(row.family), names.index(row.fault), row.place),
    )
    made = date.today().isoformat()
    state = {"date": made, "lacking": without, "rows": [asdict(row) for row in ordered]}
    STATE.write_text(json.dumps(state, indent=1) + "\n")
    STATE.with_suffix(".md").write_text(page(ordered, without, made))
    return ordered


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("home", type=Path)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES)
    parser.add_argument("--seconds", type=float, default=75, help="of training")
    parser.add_argument(
        "--write", action="store_true", help="only write the page of what is in DIR"
    )
    asked = parser.parse_args()
    rows = write([], {})
    for family in asked.families:
        home, flags = prepared(family, asked.home, asked.seconds)
        about = anatomy(Path(resolve_model(flags[1])))
        lacks = {fault: lacked(fault, about) for fault in FAULTS}
        lacking = {family: list(dict.fromkeys(filter(None, lacks.values())))}
        cases = [(f, p) for p in asked.places for f in asked.faults if not lacks[f]]
        for fault, place in [(CLEAN, ""), *cases]:
            target = home / (fault if fault == CLEAN else f"{place}-{fault}")
            if asked.write and not (target / "report.json").is_file():
                continue
            row = row_of(fault, place, run(fault, place, home, flags), family)
            print(f"  {row.verdict}, exit {row.exit_code}, {row.nats:.3g} nats", flush=True)
            rows = write([row], lacking)
    passed = [row for row in rows if row.passed and row.fault != CLEAN]
    for row in passed:
        about = f"{row.fault} in the {row.place} of {row.family}"
        print(f"passed: {about} ({row.verdict}, {row.nats:.2g} nats)")
    clean = [row for row in rows if row.fault == CLEAN]
    return int(bool(passed) or any(row.verdict != "healthy" for row in clean))


if __name__ == "__main__":
    sys.exit(main())
