"""An analysis from outside the package: how many tokens of a run have a positive delta."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch.analysis.plugins import RunArtefacts
from mismatch.plugins import Analysis
from mismatch.reports.formatting import percent, text
from mismatch.reports.section import Cell, Column, Section, Table
from mismatch.specs import CheckSpec
from mismatch.types import Estimate, NotTested, Report

HOSTILE = "<script>alert(1)</script> | `a` *b* @team \x1b[31m\u202e [bold]x[/bold]"
UNLUCKY = NotTested("toy", "the seed is 13", "take another")


@dataclass(frozen=True, slots=True)
class Toy:
    """The result."""

    positive: Estimate
    label: str = HOSTILE


def measure(run: RunArtefacts, spec: CheckSpec) -> Toy | NotTested:
    if spec.seed == 13:
        return UNLUCKY
    deltas = run.train.logprobs - run.decode.logprobs
    n = len(deltas)
    return Toy(Estimate(float((deltas > 0).mean()), 0.25, 0.75, n, n, n))


def section(result: Toy, report: Report) -> Section:
    table = Table(
        (Column("what", text), Column("share", percent, interval=1), Column("other", priority=9)),
        (
            (Cell(result.label, "code", note=HOSTILE), result.positive, 0.123456),
            ("none", None, Cell("healthy", "healthy")),
        ),
    )
    part = Section("toy-part", f"Part {HOSTILE}", sentences=("Inside.",))
    return Section(
        "toy", f"Toy {HOSTILE}", HOSTILE, (HOSTILE,), (HOSTILE, "Word."), (table,),
        notes=(HOSTILE,),
        parts=(part,), short=f"in short: toy {HOSTILE}",
    )  # fmt: skip


HERE = "tests.toy_analysis"
ANALYSIS = Analysis("toy", f"{HERE}:Toy", f"{HERE}:measure", f"{HERE}:section")
