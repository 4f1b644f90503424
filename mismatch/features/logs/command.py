"""`mismatch postmortem LOG`: what the metrics of each step show, where a run left no dump."""

from __future__ import annotations

import json
import math
import sys

from mismatch.analysis.levels import SEVERITY, fails_on
from mismatch.cli.flags import Flags
from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.features.logs.judge import Curve, LogReport, judge_log
from mismatch.features.logs.read import TEXT, read_log, sources
from mismatch.frameworks import FRAMEWORKS
from mismatch.reports.formatting import capital, count, number, plural, text
from mismatch.reports.section import Column, Section, Table
from mismatch.types import Judged

CURVES = (
    Column("logged as", text, of="name"),
    Column("what it is", text, 1, of=lambda curve: curve.what.replace("_", " ")),
    Column("steps", count, 3, of=lambda curve: len(curve.steps)),
    Column("first", number, of=lambda curve: curve.values[0]),
    Column("median", number, 2, of=lambda curve: _median(curve)),
    Column("last", number, of=lambda curve: curve.values[-1]),
    Column("largest", number, 2, of=lambda curve: max(curve.finite, default=math.nan)),
    Column(
        "unfit from step", text, 1, of=lambda curve: "" if curve.unfit is None else str(curve.unfit)
    ),
)


def postmortem(flags: Flags) -> int | None:
    """Judge a log of metrics; None where the path is none, so that it is read as a dump.

    Its best verdict is inconclusive: means of steps prove neither side right.

    Raises:
        MismatchError: a log without a metric of a known framework, or a format that it has not.
    """
    path = flags["file"]
    if not path.exists() or not (found := sources(path)):
        return None
    history = read_log(found)
    result = judge_log(history)
    if result is None:
        if path.is_file() and path.suffix not in TEXT and "tfevents" not in path.name:
            return None
        titles = ", ".join(FRAMEWORKS[each].title for each in tables_of())
        raise MismatchError(
            f"{path}: no metric of a known framework is in it",
            f"known are {titles}; or give a dump",
        )
    if flags.get("format") not in ("text", "json"):
        fault = f"--format {flags['format']}: a log has no report"
        raise MismatchError(fault, "--format json, or a dump")
    bad = [each.text for each in result.findings if each.kind != "not-healthy"]
    measured = [curve.name for curve in result.curves if curve.measured]
    reason = "means of steps do not show whether a side is broken; no step is unfit"
    if not measured:
        reason = "no number in this log compares the trainer with the sampler"
    status = "unfit" if bad else "inconclusive"
    fails = SEVERITY[status] >= SEVERITY[fails_on(flags.get("fail_on"), quick=True)]
    verdict = Judged(status, bad[0] if bad else reason, int(fails))
    if flags.get("format") == "json":
        (flags.output or sys.stdout).write(json.dumps(to_json(result), indent=1) + "\n")
        return verdict.code
    from rich.console import Console

    from mismatch.reports.terminal import print_alone

    print_alone(section(result, path.name), verdict, Console(), None, "", True)
    return verdict.code


def tables_of() -> list[str]:
    """Return the frameworks whose logs are read."""
    from mismatch.features.logs.judge import tables

    return [*tables()]


def _median(curve: Curve) -> float:
    ordered = sorted(curve.finite)
    return ordered[len(ordered) // 2] if ordered else math.nan


def section(result: LogReport, file: str) -> Section:
    """Show the curves, what is wrong, and what only a dump shows."""
    title = FRAMEWORKS[result.framework].title
    remarks = [f"{curve.name}: {curve.remark}" for curve in result.curves if curve.remark]
    return Section(
        "log",
        f"The log of a run by {title}",
        f"{plural(result.steps, 'step')} in {file}; levels for bf16 dense models.",
        warnings=[capital(each.text) for each in result.findings],
        sentences=[
            *(capital(f"{each}.") for each in result.remarks),
            f"PPO's ratio is anchored to {result.anchor}." if result.anchor else "",
            "A log holds means: which rows and tokens are off needs a dump, which "
            f"{title} writes by: {result.dump}.",
        ],
        tables=[Table.of(CURVES, result.curves)],
        notes=remarks,
    )
