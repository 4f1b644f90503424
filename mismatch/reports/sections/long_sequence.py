"""The long sequence: how far each side in float32 is from the reference, by position."""

from __future__ import annotations

from mismatch.analysis.results import LongGap, LongSequence, sentence
from mismatch.reports.formatting import bound, capital, line, number, text
from mismatch.reports.section import Cell, Column, Section, Table, Tone, Value
from mismatch.types import CheckStatus, Report

SECTION = "long-sequence"
LEAD = (
    "One sequence made of the run's own tokens, scored at once by both sides, in float32 and as "
    "they run, and by the float32 reference. In float32 rounding plays no part: what begins at "
    "some position is another function. The rows in float32 give the median |delta| in nats. The "
    "rows of a side as it runs give the mean without the worst tenth, as a multiple of a plain "
    "forward's."
)
TONES: dict[CheckStatus, Tone] = {
    "passed": "healthy",
    "inconclusive": "warn",
    "failed": "critical",
}


def section(result: LongSequence, report: Report | None = None) -> Section:
    """Return a row for each side: the run's own positions, then blocks beyond them.

    It is open where no other failed check says that a side is wrong.
    """
    off = [gap for gap in result.gaps if gap.status != "passed"]
    failed = [check.id for check in report.checks if check.status == "failed"] if report else []
    alone = all(name.startswith(SECTION) for name in failed)
    tokens = f"{result.tokens:,} tokens; the run's own sequences have up to {result.reached:,}"
    blocks = result.gaps[0].blocks
    columns = (
        Column("side", text),
        *(
            Column(f"{block.low}–{block.high - 1}", number, int(place > 0))
            for place, block in enumerate(blocks)
        ),
        Column("level", bound, 1),
        Column("", text),
    )
    return Section(
        SECTION,
        "One long sequence",
        LEAD,
        sentences=[f"{capital(line(sentence(result, gap)))}." for gap in result.gaps],
        tables=[Table(columns, [_row(gap) for gap in result.gaps])],
        folded=not (off and alone),
        short=capital(line(sentence(result, off[0]))) if off else tokens,
    )


def _row(gap: LongGap) -> tuple[Cell | Value, ...]:
    status = Cell(gap.status, TONES[gap.status])
    name = f"{gap.scoring.partition(':')[0]}, {'as it runs' if gap.rounded else 'float32'}"
    return (line(name), *(block.off for block in gap.blocks), gap.passed, status)
