"""Families that people train: each trained for a minute, checked clean and with planted faults.

    python benchmarks/families.py DIR [--families NAME …] [--seconds 75]

Every family is a tiny model of four layers (benchmarks/family_models.py). It gets one `mismatch
check` of default size, and two more with what the MLP of layer 1 gives multiplied by 1.05: in the
engine (16 prompts) and in the trainer's passes (the clean run's tokens). A check whose report is in
DIR is not run again, so the command goes on where it was stopped; docs/evidence/families.json and
the page next to it are written after each family. `--clean` makes the clean checks alone and keeps
what the others said; `--write` only writes.

Goal: clean runs HEALTHY, or a reason that the report names; faults BROKEN, with side, layer and
module. Exit code 1 if a fault passes or a clean run is BROKEN without a note in NOTES. About four
minutes for each family on two cores.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.family_models import FAMILIES, FLAGS, trained  # noqa: E402
from benchmarks.planted_sides import MLP  # noqa: E402
from benchmarks.sides import CLEAN, run  # noqa: E402
from mismatch.codec import from_json  # noqa: E402
from mismatch.pipeline.build import build_report  # noqa: E402
from mismatch.pipeline.document import headline_of  # noqa: E402
from mismatch.run.directory import load_spec  # noqa: E402

STATE = ROOT / "docs" / "evidence" / "families.json"
PLACES = ("engine", "trainer")
SMALL = ("--num-prompts", "16")
NOTES = {
    "gemma2": "sdpa, transformers' default, leaves out the soft cap of attention; with "
    "`--attention eager` both sides agree in float32",
    "deepseek_v3": "in vLLM's Transformers backend; vLLM's own MLA is wrong on a CPU",
    "deepseek_v32": "in the transformers engine; vLLM has no sparse attention for CPUs. An exact "
    "tie between two keys makes most of its float32 gap",
    "nemotron_h": "in the transformers engine",
    "qwen3_next": "its engine has no float32 on a CPU, so a small fault there passes as TOLERABLE",
}
HEAD = """# Families of models

Tiny models, trained for 75 seconds, checked in bf16 at default size (vLLM, CPU). Then half
of an MLP's channels were multiplied by 1.05 in one side. Numbers:
mean \\|delta\\| in 0.001 nats (tokens with another expert in some layer). Made by
`benchmarks/families.py`, 2026-11-27 to {date}; its JSON has the rest. Clean on the last day:
{last}.

| clean run; faults | families |
| --- | --- |"""
END = """
**Next:** [families whose routing is captured](moe-families.md).
"""


@dataclass(frozen=True)
class Result:
    """What one check of a family said.

    Attributes:
        error: why there is no report; the rest is empty then.
        nats: mean |delta|.
        gap: the larger of the two float32 gaps, nats; None: not measured.
        routing: share of tokens with another expert in some layer; None: not captured.
        keys: share of the selections of sparse attention that differ; None: none were made.
        located: "side site [layers]" of the sources that `locate` named.
        cannot: why it could not.
        made: the day.
    """

    verdict: str = ""
    exit_code: int = 0
    tokens: int = 0
    nats: float = 0.0
    gap: float | None = None
    routing: float | None = None
    keys: float | None = None
    side: str = ""
    failed: tuple[str, ...] = ()
    located: tuple[str, ...] = ()
    cannot: str = ""
    reason: str = ""
    error: str = ""
    made: str = "2026-11-27"


@dataclass(frozen=True)
class Row:
    """A family: nats per token of its training text, and its checks by the place of the fault."""

    family: str
    text_nats: float
    checks: dict[str, Result] = field(default_factory=dict)


def result(fault: str, place: str, home: Path, flags: tuple[str, ...]) -> Result:
    """Run a check and read it."""
    try:
        run_dir = run(fault, place, home, flags)
    except SystemExit as failed:
        lines = str(failed).splitlines()
        told = next((line for line in lines if "error:" in line), lines[-1])
        return Result(error=re.sub(r"\S*/", "", told)[:300])
    built, _ = build_report(run_dir, load_spec(run_dir))
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    headline = asdict(headline_of(built))
    square = report.get("square") or {}
    gaps = [gap["size"]["value"] for gap in square.get("gaps", ())]
    keys = report["comparisons"][0]["routing"].get("keys_disagree_layer")
    return Result(
        made=date.today().isoformat(),
        verdict=report["verdict"]["status"],
        exit_code=headline["exit_code"],
        tokens=headline["n_tokens"],
        nats=headline["logprob_abs_diff_mean"],
        gap=max(gaps, default=None),
        routing=headline["routing_disagree_any"],
        keys=keys["value"] if keys else None,
        side=headline.get("side_at_fault") or "",
        failed=tuple(check["id"] for check in report["checks"] if check["status"] == "failed"),
        located=located(run_dir),
        reason=re.sub(r" /\S*/", " ", report["verdict"]["reason"]),
        cannot=next((n["reason"] for n in report["not_tested"] if n["what"] == "locate"), ""),
    )


def located(run_dir: Path) -> tuple[str, ...]:
    """Return the sources that ``locate`` named."""
    file = run_dir / "locate.json"
    if not file.is_file():
        return ()
    location = json.loads(file.read_text())
    return tuple(
        f"{side['name']} {group['site']} {group['layers']}"
        for side in location["sides"]
        for group in side["groups"]
    )


def outcome(row: Row) -> str:
    """Say what the clean run and those with a fault said; *located*: side, module and layer."""
    clean, *planted = row.checks.values()
    if clean.error:
        return "did not run"
    sides = zip((r"\w+:prefill", "fsdp"), planted, strict=True)
    located = sum(
        any(re.fullmatch(rf"{side} (mlp|mixer) \[1\]", each) for each in found.located)
        for side, found in sides
    )
    faults = " and ".join(dict.fromkeys(found.verdict.upper() for found in planted))
    how = {0: "not located", 1: "one located", 2: "located"}[located]
    return f"{clean.verdict.upper()}; {faults}, {how}"


def entry(row: Row) -> str:
    """Name a family with its numbers."""
    clean = row.checks[CLEAN]
    routing = "" if clean.routing is None else f" ({clean.routing:.1%})"
    return f"`{row.family}`" + ("" if clean.error else f" {1000 * clean.nats:.1f}{routing}")


def page(rows: list[Row], made: str) -> str:
    """Write the families by outcome, and why some did not run or are not healthy."""
    last = [f"`{row.family}`" for row in rows if row.checks[CLEAN].made == made]
    lines = [HEAD.format(date=made, last=", ".join(last) or "none")]
    for kind in dict.fromkeys(map(outcome, rows)):
        lines.append(f"| {kind} | {', '.join(entry(r) for r in rows if outcome(r) == kind)} |")
    return "\n".join([*lines, "", *filter(None, map(note, rows)), END])


def note(row: Row) -> str:
    """Say why a family did not run or is not healthy, or what is known of it."""
    clean = row.checks[CLEAN]
    reason = re.sub(r"^error: |the engine failed: |vLLM cannot load \S+: ", "", clean.error)
    if not reason and clean.verdict != "healthy":
        reason = ", ".join(f"`{check}`" for check in clean.failed) or clean.reason
    text = NOTES.get(row.family) or reason
    if clean.keys is not None:
        text += f"; {clean.keys:.2%} of the selections of sparse attention differ"
    return text and f"- `{row.family}`: {text.rstrip('.')}."


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("home", type=Path)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--seconds", type=float, default=75, help="of training")
    parser.add_argument("--clean", action="store_true", help="plant no fault")
    parser.add_argument("--write", action="store_true", help="only write of what was measured")
    asked = parser.parse_args()
    rows, made = stored()
    for family in () if asked.write else asked.families:
        model = asked.home / "models" / family
        nats, home = trained(family, model, asked.seconds), asked.home / family
        home.mkdir(parents=True, exist_ok=True)
        flags = ("--model", str(model), "--nproc-per-node", "1", *FLAGS.get(family, ()))
        checks = {CLEAN: result(CLEAN, "", home, flags)}
        if asked.clean and family in rows:
            checks = rows[family].checks | checks
        elif not checks[CLEAN].error:
            checks["engine"] = result(MLP, "engine", home, flags + SMALL)
            checks["trainer"] = result(MLP, "trainer", home, flags)
        rows, _ = stored()
        rows[family], made = Row(family, nats, checks), date.today().isoformat()
        for place, found in checks.items():
            print(f"{family} {place}: {found}", flush=True)
        ordered = [rows[name] for name in FAMILIES if name in rows]
        state = {"date": made, "rows": [asdict(row) for row in ordered]}
        STATE.write_text(json.dumps(state, indent=1) + "\n")
    ordered = [rows[name] for name in FAMILIES if name in rows]
    STATE.with_suffix(".md").write_text(page(ordered, made))
    return int(any(wrong(row) for row in ordered))


def stored() -> tuple[dict[str, Row], str]:
    """Return the rows of families.json by their family, and its date."""
    if not STATE.is_file():
        return {}, ""
    state = json.loads(STATE.read_text())
    return {row["family"]: from_json(Row, row) for row in state["rows"]}, state["date"]


def wrong(row: Row) -> bool:
    """Whether a clean run is BROKEN without a known reason, or a fault passes."""
    clean, *planted = row.checks.values()
    passed = any(found.verdict in ("healthy", "tolerable") for found in planted)
    return row.family not in NOTES and (passed or clean.verdict == "broken")


if __name__ == "__main__":
    sys.exit(main())
