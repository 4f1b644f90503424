"""Write the measured part of docs/evidence/known-issues.md, from what known_issues.py kept."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.fault_blocks import BLOCK
from benchmarks.known_faults import FAULTS
from benchmarks.known_issue_runs import ENGINES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "known-issues.md"
MARK = "<!-- measured -->"
PLACES = {
    "recorded": "numbers",
    "trainer": "trainer's model",
    "weights": "trainer's weights",
    "packing": "trainer's packing",
    "template": "trainer's prompts",
    "engine": "engine",
}


def share(cells: list[dict[str, Any]], what: str) -> str:
    """Return "9/10" of the cells where it applies."""
    values = [cell[what] for cell in cells if cell.get(what) is not None]
    return f"{sum(values)}/{len(values)}" if values else "–"


def link(issue: str) -> str:
    """Return a Markdown link of owner/repo#number."""
    repository, _, number = issue.partition("#")
    return f"[{issue}](https://github.com/{repository}/issues/{number})"


def page(cells: list[dict[str, Any]]) -> str:
    """Return the measured part of the page."""
    faults = [cell for cell in cells if "fault" in cell]
    clean = [cell for cell in cells if "clean" in cell]
    pairs = [cell for cell in cells if "pair" in cell]
    lines = [
        f"Measured {date.today().isoformat()} on a CPU.", "",
        "| | exact cause first | cause or kind first | right side | pairs in the first three |",
        "| --- " * 5 + "|",
    ]  # fmt: skip
    for half in ("tuning", "reported"):
        own = [cell for cell in faults if cell["half"] == half]
        two = [cell for cell in pairs if cell["half"] == half]
        shares = [share(own, what) for what in ("exact", "first", "right side")]
        lines.append(f"| {half} half | {' | '.join(shares)} | {share(two, 'pair')} |")
    apart, drawn = (sum(cell["blocks"][n] for cell in clean) for n in (0, 1))
    alarms = sum(len(cell["alarms"]) for cell in clean)
    lines += ["", f"Clean blocks of {BLOCK} prompts: {apart} disjoint, {drawn} drawn from the same "
              f"{len(clean)} runs, each with and without declared settings; {alarms} false "
              "alarms.", "", "Named first and right side, in the reported half; "
              "(t): in the tuning half, for a fault that only this half has.", "",
              "| planted | issues | where | expected | first | side |",
              "| --- " * 6 + "|"]  # fmt: skip
    for fault in (*FAULTS, *ENGINES):
        own = [cell for cell in faults if cell["fault"] == fault.name]
        reported = [cell for cell in own if cell["half"] == "reported"]
        shares = [share(reported or own, what) for what in ("first", "right side")]
        where_planted = PLACES[getattr(fault, "place", "engine")]
        issues = ", ".join(map(link, fault.issues)) or "–"
        lines.append(
            f"| {fault.name} | {issues} | {where_planted} | {', '.join(fault.expected)} | "
            f"{shares[0]}{' (t)' if own and not reported else ''} | {shares[1]} |"
        )
    draws: dict[str, list[bool]] = {}
    for cell in pairs:
        names = " and ".join(cell.get("faults", [cell.get("fault", "")]))
        draws.setdefault(names, []).append(bool(cell["pair"]))
    both = [f"{names} ({sum(found)}/{len(found)})" for names, found in draws.items()]
    lines += ["", f"Two faults at once, both among the first three causes: {'; '.join(both)}."]
    return "\n".join([*lines, "", "**Next:** [all causes](../reference/causes.md).", ""])
