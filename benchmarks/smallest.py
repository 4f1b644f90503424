"""Smallest faults that a check of default size does not call healthy, by side and family.

    python benchmarks/smallest.py DIR [--families NAME …] [--faults NAME …] [--places NAME …]

Two kinds of faults get smaller until a check calls them healthy. "half-PART": half of the channels
that a part of the model gives are multiplied by 1 + s, after loading, so that no digest shows it.
The faults of benchmarks/sides.py: a share s of what the fault changes, in weights or numbers. s
goes along STRENGTHS from where docs/evidence/sides.json lets one expect it, until one is healthy
and the next is not; a share that changes no weight in bf16 is not run, for it is no fault.

The families are those of benchmarks/sides.py, and of benchmarks/families.py; a model in DIR/models
is not trained again, nor is a check repeated whose report is in DIR. docs/evidence/smallest.json
and the page next to it are written after each fault; `--write` only writes. A fault takes about two
checks: a minute in the trainer, three in the engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.family_models import FAMILIES  # noqa: E402
from benchmarks.planted_sides import FAULTS, PARTS, WEIGHTS, change  # noqa: E402
from benchmarks.sides import CLEAN, EMBEDDED, gap, prepared, row_of, run, stored  # noqa: E402
from benchmarks.sides import FAMILIES as USUAL  # noqa: E402

STATE = ROOT / "docs" / "evidence" / "smallest.json"
PLACES = ("trainer", "engine")
STRENGTHS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
START = 0.003
SEEN = 1e-5  # nats: a float32 gap of tiny-gpt-oss that is beyond its level
INDIVISIBLE = ("window+1",)
HALF = "half-"
HALVES = tuple(HALF + part for part in PARTS)
HEAD = """# Smallest faults

These are the smallest faults of each kind that a check of default size did not call HEALTHY. In
{same} of {all} of them mean \\|delta\\| grows by less than 5 %: float32 and digests show these.
Made by `benchmarks/smallest.py`, {date}.
"""
SHARES = """
Of the [planted faults](sides.md), in one side of `tiny-gpt-oss`: the smallest share of 1, 0.3, 0.1,
0.03, … (0.1 of `expert-1.1` is an expert times 1.01; star: less changes no weight in bf16):
{shares}.
"""
PARTLY = """
The smallest s, where half of the channels that one part of a model gives are multiplied by 1 + s in
one side, after loading:

| family | side | {parts} |
| --- | --- |{columns}"""
END = """
**Next:** [how the levels were chosen](calibration.md).
"""


@dataclass(frozen=True)
class Found:
    """The smallest strength of a fault that is not healthy; None: all are."""

    family: str
    fault: str
    place: str
    clean_nats: float
    """mean |delta| of the run without a fault."""
    tokens: int
    strength: float | None = None
    verdict: str = ""
    nats: float = 0.0
    gap: float = 0.0
    """The larger float32 gap, nats."""
    least: bool = False
    """A smaller one is none: it changes no weight in bf16, or the fault has one size."""


def smallest(broken: Callable[[float], bool], start: float, least: float) -> float | None:
    """Return the last strength, from start downwards or upwards, that is not healthy."""
    tried = STRENGTHS[: STRENGTHS.index(least) + 1]
    at = tried.index(start)
    if broken(tried[at]):
        while at + 1 < len(tried) and broken(tried[at + 1]):
            at += 1
        return tried[at]
    return next((strength for strength in reversed(tried[:at]) if broken(strength)), None)


def bounds(fault: str, place: str, model: Path) -> tuple[float, float]:
    """Return where a search begins, and the smallest strength that is a fault at all."""
    if fault in HALVES:
        return START, STRENGTHS[-1]
    if fault in INDIVISIBLE:
        return STRENGTHS[0], STRENGTHS[0]
    whole = stored()[0][EMBEDDED, place, fault]
    expected = min((s for s in STRENGTHS if s * gap(whole) > SEEN), default=0.1)
    if fault not in WEIGHTS:
        return expected, STRENGTHS[-1]
    least = min(s for s in STRENGTHS if changes_bf16(f"{fault}~{s:g}", model))
    return max(expected, least), least


def changes_bf16(name: str, model: Path) -> bool:
    """Return whether a fault changes any weight of a checkpoint, in the checkpoint's dtype."""
    import torch
    from safetensors.torch import load_file

    state = {
        key: value for file in model.glob("*.safetensors") for key, value in load_file(file).items()
    }
    before = {key: tensor.clone() for key, tensor in state.items()}
    change(state, name)
    return any(not torch.equal(state[key], before[key]) for key in state)


def measured(family: str, fault: str, place: str, home: Path, flags: tuple[str, ...]) -> Found:
    """Search the smallest strength of one fault."""
    from mismatch.models import resolve_model

    clean = row_of(CLEAN, "", run(CLEAN, "", home, flags))
    start, least = bounds(fault, place, Path(resolve_model(flags[1])))
    rows = {}

    def broken(strength: float) -> bool:
        name = f"{fault}-{1 + strength:g}" if fault in HALVES else f"{fault}~{strength:g}"
        name = name.removesuffix("~1")
        rows[strength] = row = row_of(name, place, run(name, place, home, flags))
        print(f"  {row.verdict}, {row.nats:.3g} nats, gaps {row.gaps}", flush=True)
        return row.verdict != "healthy"

    strength = smallest(broken, start, least)
    least_of_all = strength == least > STRENGTHS[-1] or fault in INDIVISIBLE
    found = Found(family, fault, place, clean.nats, clean.tokens, least=least_of_all)
    if strength is None:
        return found
    row = rows[strength]
    return replace(found, strength=strength, verdict=row.verdict, nats=row.nats, gap=gap(row))


def page(rows: list[Found], made: str) -> str:
    """Write both tables."""
    seen = [row for row in rows if row.strength is not None]
    same = sum(row.nats < 1.05 * row.clean_nats for row in seen)
    lines = [HEAD.format(date=made, same=same, all=len(seen))]
    shares = []
    for fault in FAULTS:
        told = {row.place: cell(row) for row in rows if row.fault == fault}
        if told:
            alike = len(told) == len(PLACES) and len(set(told.values())) == 1
            each = ", ".join(f"{text} ({place})" for place, text in told.items())
            shares.append(f"`{fault}` {next(iter(told.values())) if alike else each}")
    lines.append(SHARES.format(shares="; ".join(shares)).strip("\n"))
    halves = [row for row in rows if row.fault in HALVES]
    parts = [part for part in HALVES if any(row.fault == part for row in halves)]
    columns = " ---: |" * len(parts)
    names = " | ".join(part.removeprefix(HALF) for part in parts)
    lines.append(PARTLY.format(parts=names, columns=columns))
    for family, place in dict.fromkeys((row.family, row.place) for row in halves):
        of = {row.fault: row for row in halves if (row.family, row.place) == (family, place)}
        cells = " | ".join(cell(of.get(part)) for part in parts)
        lines.append(f"| `{family}` | {place} | {cells} |")
    for verdict in dict.fromkeys(row.verdict for row in seen if row.verdict != "broken"):
        of_it = [row for row in seen if row.verdict == verdict]
        named = (f"`{row.fault}` ({row.family}, {row.place})" for row in of_it)
        lines += ["", f"{verdict.upper()}, not BROKEN: {'; '.join(named)}."]
    return "\n".join(lines) + "\n" + END


def cell(row: Found | None) -> str:
    """Write a strength."""
    if row is None:
        return "–"
    if row.strength is None:
        return f"> {STRENGTHS[0]:g}"
    return "≤ " * (row.strength == STRENGTHS[-1]) + f"{row.strength:g}" + "\\*" * row.least


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("home", type=Path)
    names = [EMBEDDED, *FAMILIES]
    faults = [*FAULTS, *HALVES]
    parser.add_argument("--families", nargs="+", default=list(USUAL), choices=names)
    parser.add_argument("--faults", nargs="+", default=faults, choices=faults)
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES)
    parser.add_argument("--seconds", type=float, default=75, help="of training")
    parser.add_argument("--write", action="store_true", help="only write of what was measured")
    asked = parser.parse_args()
    rows, made = read()
    cases = [
        (family, place, fault)
        for place in asked.places
        for family in asked.families
        for fault in asked.faults
        if fault in HALVES or family == EMBEDDED
    ]
    for family, place, fault in () if asked.write else cases:
        home, flags = prepared(family, asked.home, asked.seconds)
        found = measured(family, fault, place, home, flags)
        print(found, flush=True)
        rows, made = read()  # another process may have written
        rows[family, place, fault] = found
        made = date.today().isoformat()
        write(rows, made)
    write(rows, made)
    return 0


def read() -> tuple[dict[tuple[str, str, str], Found], str]:
    """Return the rows of smallest.json and its date."""
    state: dict[str, Any] = {"date": "", "rows": []}
    if STATE.is_file():
        state = json.loads(STATE.read_text())
    rows = [Found(**row) for row in state["rows"]]
    return {(row.family, row.place, row.fault): row for row in rows}, state["date"]


def write(rows: dict[tuple[str, str, str], Found], made: str) -> None:
    """Write smallest.json and the page."""
    names = [EMBEDDED, *FAMILIES]
    ordered = sorted(rows.values(), key=lambda row: (names.index(row.family), row.place))
    state = {"date": made, "rows": [asdict(row) for row in ordered]}
    STATE.write_text(json.dumps(state, indent=1) + "\n")
    STATE.with_suffix(".md").write_text(page(ordered, made))


if __name__ == "__main__":
    sys.exit(main())
