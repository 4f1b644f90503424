"""Smallest faults that a check of default size does not call healthy, by side and family.

    python benchmarks/smallest.py DIR [--families NAME …] [--parts NAME …] [--places NAME …]

Half of the channels that a part of the model gives are multiplied by 1 + s, after loading, so that
no digest shows it. s goes along STRENGTHS from START until one is healthy and the next is not. The
families are those of benchmarks/families.py, and tiny-gpt-oss; a model in DIR/models is not trained
again, nor is a check repeated whose report is in DIR. docs/evidence/smallest.json and the page next
to it are written after each fault; `--write` only writes. A fault takes about two checks: a minute
in the trainer, three in the engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.family_models import FAMILIES  # noqa: E402
from benchmarks.planted_sides import PARTS  # noqa: E402
from benchmarks.sides import CLEAN, EMBEDDED, prepared, row_of, run  # noqa: E402
from benchmarks.sides import FAMILIES as USUAL  # noqa: E402

STATE = ROOT / "docs" / "evidence" / "smallest.json"
PLACES = ("trainer", "engine")
STRENGTHS = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
START = 0.003
HEAD = """# Smallest faults

Half of the channels that one part of a model gives were multiplied by 1 + s, in one side. The table
has the smallest s of 0.3, 0.1, 0.03, … that a check of default size did not call HEALTHY. Mean
\\|delta\\| is then at most {more:.0%} larger than without a fault: float32 shows these faults.
Made by `benchmarks/smallest.py`, {date}.

| family | side | {parts} |
| --- | --- |{columns}"""
END = """
**Next:** [how the levels were chosen](calibration.md).
"""


@dataclass(frozen=True)
class Found:
    """The smallest strength of a fault that is not healthy; None: all are."""

    family: str
    part: str
    place: str
    clean_nats: float
    """mean |delta| of the run without a fault."""
    tokens: int
    strength: float | None = None
    verdict: str = ""
    nats: float = 0.0
    gap: float = 0.0
    """The larger float32 gap, nats."""


def smallest(broken: Callable[[float], bool]) -> float | None:
    """Return the last strength, from START downwards or upwards, that is not healthy."""
    at = STRENGTHS.index(START)
    if broken(STRENGTHS[at]):
        while at + 1 < len(STRENGTHS) and broken(STRENGTHS[at + 1]):
            at += 1
        return STRENGTHS[at]
    return next((strength for strength in reversed(STRENGTHS[:at]) if broken(strength)), None)


def measured(family: str, part: str, place: str, home: Path, flags: tuple[str, ...]) -> Found:
    """Search the smallest strength of one fault."""
    clean = row_of(CLEAN, "", run(CLEAN, "", home, flags))
    rows = {}

    def broken(strength: float) -> bool:
        fault = f"half-{part}-{1 + strength:g}"
        rows[strength] = row = row_of(fault, place, run(fault, place, home, flags))
        print(f"  {row.verdict}, {row.nats:.3g} nats, gaps {row.gaps}", flush=True)
        return row.verdict != "healthy"

    about = (family, part, place, clean.nats, clean.tokens)
    strength = smallest(broken)
    if strength is None:
        return Found(*about)
    row = rows[strength]
    return Found(*about, strength, row.verdict, row.nats, max(row.gaps.values(), default=0.0))


def page(rows: list[Found], made: str) -> str:
    """Write the table: a line for each family and side, a column for each part."""
    parts = [part for part in PARTS if any(row.part == part for row in rows)]
    seen = [row for row in rows if row.strength is not None]
    more = max((row.nats / row.clean_nats - 1 for row in seen), default=0.0)
    columns = " ---: |" * len(parts)
    lines = [HEAD.format(date=made, more=more, parts=" | ".join(parts), columns=columns)]
    for family, place in dict.fromkeys((row.family, row.place) for row in rows):
        of = {row.part: row for row in rows if (row.family, row.place) == (family, place)}
        cells = " | ".join(cell(of.get(part)) for part in parts)
        lines.append(f"| `{family}` | {place} | {cells} |")
    others = [row for row in seen if row.verdict != "broken"]
    lines += [""] * bool(others)
    for row in others:
        lines.append(f"- `{row.family}`, {row.part} in the {row.place}: {row.verdict.upper()}.")
    return "\n".join(lines) + "\n" + END


def cell(row: Found | None) -> str:
    """Write a strength."""
    if row is None:
        return "–"
    return f"> {STRENGTHS[0]}" if row.strength is None else f"{row.strength:g}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("home", type=Path)
    names = [EMBEDDED, *FAMILIES]
    parser.add_argument("--families", nargs="+", default=list(USUAL), choices=names)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES)
    parser.add_argument("--seconds", type=float, default=75, help="of training")
    parser.add_argument("--write", action="store_true", help="only write of what was measured")
    asked = parser.parse_args()
    state: dict[str, Any] = {"date": "", "rows": []}
    if STATE.is_file():
        state = json.loads(STATE.read_text())
    rows = {(row["family"], row["place"], row["part"]): Found(**row) for row in state["rows"]}
    made = state["date"]
    cases = [
        (f, place, part) for place in asked.places for f in asked.families for part in asked.parts
    ]
    for family, place, part in () if asked.write else cases:
        home, flags = prepared(family, asked.home, asked.seconds)
        rows[family, place, part] = found = measured(family, part, place, home, flags)
        made = date.today().isoformat()
        print(found, flush=True)
        ordered = sorted(rows.values(), key=lambda row: (names.index(row.family), row.place))
        STATE.write_text(
            json.dumps({"date": made, "rows": [asdict(row) for row in ordered]}, indent=1) + "\n"
        )
    ordered = sorted(rows.values(), key=lambda row: (names.index(row.family), row.place))
    STATE.with_suffix(".md").write_text(page(ordered, made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
