"""The measured part of docs/known-issues.md, from the cells of benchmarks/known_issues.py."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from benchmarks.fault_blocks import BLOCK
from benchmarks.known_faults import FAULTS
from benchmarks.known_issue_runs import ENGINES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "known-issues.md"
MARK = "<!-- measured -->"
PLACES = {
    "recorded": "in the numbers of a run of vLLM and FSDP2",
    "trainer": "in the model that FSDP2 loaded",
    "weights": "in the weights that FSDP2 loaded, both dtypes: the engine's are older",
    "packing": "in the packing of FSDP2's pass",
    "template": "in the prompts that FSDP2 scored",
    "engine": "in the engine (vLLM; SGLang where named)",
}


def share(cells: list[dict], what: str) -> str:
    """ "9 of 10 (90 %)" of the cells where it applies."""
    values = [one[what] for one in cells if one.get(what) is not None]
    return f"{sum(values)} of {len(values)} ({sum(values) / len(values):.0%})" if values else "–"


def link(issue: str) -> str:
    """A Markdown link of owner/repo#number."""
    repository, _, number = issue.partition("#")
    return f"[{issue}](https://github.com/{repository}/issues/{number})"


def page(cells: list[dict]) -> str:
    """The measured part of the page."""
    faults = [one for one in cells if "fault" in one]
    clean = [one for one in cells if "clean" in one]
    pairs = [one for one in cells if "pair" in one]
    lines = [
        f"Measured {date.today().isoformat()} on a CPU.", "",
        "| | named first | right side | pairs in the first three |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for half in ("tuning", "reported"):
        mine = [one for one in faults if one["half"] == half]
        two = [one for one in pairs if one["half"] == half]
        lines.append(f"| {half} half | {share(mine, 'first')} | {share(mine, 'right side')} | "
                     f"{share(two, 'pair')} |")  # fmt: skip
    apart, drawn = (sum(one["blocks"][n] for one in clean) for n in (0, 1))
    alarms = sum(len(one["alarms"]) for one in clean)
    where = ", ".join(f"{one['clean']} ({one['engine']}, {one['dtype']})" for one in clean)
    lines += ["", f"Clean blocks of {BLOCK} prompts: {apart} disjoint, {drawn} drawn from the same "
              f"runs, each with and without what the sides state; {alarms} false alarms. "
              f"Runs: {where}.", "",
              "| planted | issues | where | expected | reported: first | side | "
              "tuning: first | named instead |", "| --- " * 8 + "|"]  # fmt: skip
    for fault in (*FAULTS, *ENGINES):
        mine = [one for one in faults if one["fault"] == fault.name]
        halves = {h: [one for one in mine if one["half"] == h] for h in ("reported", "tuning")}
        instead = sorted({(one["named"] or ["nothing"])[0] for one in mine if not one["first"]})
        place = PLACES[getattr(fault, "place", "engine")]
        issues = ", ".join(map(link, fault.issues)) or "–"
        lines.append(
            f"| {fault.name} | {issues} | {place} | {', '.join(fault.expected)} | "
            f"{share(halves['reported'], 'first')} | {share(halves['reported'], 'right side')} | "
            f"{share(halves['tuning'], 'first')} | {', '.join(instead) or '–'} |"
        )
    lines += ["", "| two at once | strength | named | both in the first three |",
              "| --- | --- | --- | --- |"]  # fmt: skip
    for one in pairs:
        names = " and ".join(one.get("faults", [one.get("fault", "")]))
        strong = one["key"].rpartition("/")[2] if "faults" in one else "–"
        yes = "yes" if one["pair"] else "no"
        lines.append(f"| {names} | {strong} | {', '.join(one['named'][:3]) or 'nothing'} | {yes} |")
    return "\n".join([*lines, ""])
