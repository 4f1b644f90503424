"""Which side is off: the distance of each side from float32."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from mismatch.analysis.levels import AS_LOADED as WEIGHTS
from mismatch.analysis.results import (
    Displaced,
    Finding,
    Gap,
    Leg,
    Side,
    Square,
    Standing,
    displacement,
    rounds_alike,
    shared,
)
from mismatch.analysis.square import LATER_LAYERS
from mismatch.reports.formatting import bound, count, interval, line, number, plural, text, times
from mismatch.reports.section import Cell, Column, Figure, Section, Table, Tone
from mismatch.reports.svg import ACCENT, INK, SECOND
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAD = (
    "Excess: how far a side is from float32, over how far a plain forward at its precision is. "
    "About 1 is rounding; a broken kernel, cache or setting is further off. Two implementations in "
    "float32 differ by next to nothing, unless weights or functions differ."
)
TONES: dict[Standing, Tone] = {
    "within": "healthy",
    "wide": "warn",
    "undecided": "warn",
    "beyond": "critical",
}
WORDS: dict[Standing, str] = {
    "within": "within",
    "wide": "within, but wide",
    "undecided": "undecided",
    "beyond": "beyond",
}
WHOSE: dict[Side, str] = {
    "engine": "The engine",
    "trainer": "The trainer",
    "other-engine": "The second engine",
    "either": "A side",
}
KINDS = {
    "rare": "largest token of a prompt",
    "shift": "mean of a prompt",
    "response": "median token of a response",
}


def section(result: Square, report: Report) -> Section:
    """Return both tables, and which side is off."""
    notes, tables = _notes(result), _tables(result)
    return Section(
        id="square",
        title="Rounding or fault",
        sentences=sentences(result, report),
        figures=(_figure(result),) if result.legs else (),
        parts=(Section("square-numbers", "Numbers", LEAD, tables=tables, notes=notes),),
        folded=False,
    )


def sentences(result: Square, report: Report | None = None) -> list[str]:
    """Return which side is off and by what evidence."""
    beyond = [finding for finding in result.findings if finding.standing == "beyond"]
    # Rounding as it was found, then differing functions, the larger difference first.
    beyond.sort(key=lambda each: -each.value.value if each.evidence == "gap" else -math.inf)
    first = {(finding.side, finding.evidence): finding for finding in reversed(beyond)}
    causes = report.result("causes") if report else None
    sides = {cause.side for cause in causes.ranked if cause.located} if causes else set()
    texts = [
        _off(result, finding, "engine" in sides) for finding in beyond if finding in first.values()
    ]
    displaced = [each for each in result.displaced if each.standing == "beyond"]
    texts += [
        f"{_whose(result, each)} is wrong: {line(displacement(each))}."
        for each in {each.side: each for each in reversed(displaced)}.values()
    ]
    if not texts:
        failed = [check.id for check in report.checks if check.status == "failed"] if report else []
        texts.append(_clean(result, WEIGHTS in failed))
    if result.declared is not None:
        texts.append(
            f"The trainer's declared settings cost {times(result.declared.value)} "
            "what its precision alone does, and are no fault: its yardstick has them too."
        )
    return texts


def _off(result: Square, finding: Finding, engines: bool) -> str:
    """Say how far a side is off.

    Args:
        engines: a module of the engine was found to be wrong, and not the trainer's model code.
    """
    name, value = line(finding.scoring), finding.value
    if finding.evidence == "excess":
        return (
            f"{_whose(result, finding)} is wrong: the error of {name} is {times(value.value)} what "
            f"its precision alone costs ({interval(value, times)})."
        )
    gap = next(gap for gap in result.gaps if gap.left == finding.scoring)
    times_floor = count(round(value.value / gap.floor)) if gap.floor else ""
    over = f", {times_floor} times the rounding that is expected" if times_floor else ""
    far = f"; {finding.far}" if finding.far else ""
    apart = f"{number(value.value)} nats apart in float32{over}{far}"
    if finding.side == "either":
        who = "the engine's implementation" + " or the trainer's model code" * (not engines)
        who += " is off"
        return f"{name} and the float32 reference compute different functions: {who}; {apart}."
    return f"{WHOSE[finding.side]} computes another function than the float32 reference: {apart}."


def _whose(result: Square, finding: Finding | Displaced) -> str:
    """Name the side; both where the finding rests on the trainer's model code."""
    if shared(result, finding):
        return f"{WHOSE[finding.side]} or the trainer's model code"
    return WHOSE[finding.side]


def _clean(result: Square, other_weights: bool) -> str:
    if not result.findings:
        return "Neither side could be shown to be free of faults: see what was not tested."
    standings = {each.standing for each in result.findings}
    if "undecided" in standings | {each.standing for each in result.displaced}:
        return "A value lies beyond its level, but its interval does not decide."
    if "wide" in standings:
        return "What was measured is within its level, but an interval reaches beyond it."
    if result.unmeasured:
        return (
            f"What was measured is within its level, but {', '.join(result.unmeasured)} is missing."
        )
    sentence = "The implementations agree in float32"
    if any(finding.evidence == "excess" for finding in result.findings):
        sentence = "Each is as accurate as its precision allows; they agree in float32"
        if rounds_alike(result) is False:
            sentence += ", and do not round alike"
    part = [f" ({line(each.reason)})" for each in result.not_judged if each.what == LATER_LAYERS]
    sentence += "".join(part)
    if other_weights:
        sentence = "In float32 the tokens of this run do not show which weights differ"
    if not result.calibrated:
        general = f"the levels are general, not calibrated on {line(result.device)}"
        return f"{sentence}; {general}."
    return f"{sentence}."


def _notes(result: Square) -> list[str]:
    notes = [line(str(entry)) for entry in result.not_judged]
    if result.seconds:
        took = ", ".join(f"{line(name)} {number(s, 2)} s" for name, s in result.seconds.items())
        notes.append(f"Time of these passes: {took} (--quick leaves all but the reference out).")
    return notes


def _tables(result: Square) -> tuple[Table, Table, Table]:
    judged = {(f.evidence, f.scoring): f for f in result.findings}

    def excess(leg: Leg) -> Finding:
        return judged["excess", leg.scoring]

    def apart(gap: Gap) -> Finding:
        return judged["gap", gap.left]

    sides = (
        Column("side", text, of=lambda leg: Cell(
            leg.scoring, note=f"from {leg.exact}; yardstick {leg.plain}"
        )),
        Column("from float32", number, 2, detail="root mean square, nats", of="rms"),
        Column("excess", interval=1, detail="root mean square", of="excess", tone="strong"),
        Column("of mean |delta|", number, 3, of="excess_size"),
        Column("level", bound, 2, of=lambda leg: excess(leg).level),
        Column("", text, of=lambda leg: standing_cell(excess(leg).standing)),
    )  # fmt: skip
    displaced = (
        Column("prompts displaced", text, of=lambda it: Cell(it.scoring, note=KINDS[it.kind])),
        Column("by more than", number, detail="nats", of="nats"),
        Column("prompts", count, 1, of="beyond"),
        Column(
            "plain", count, 2, detail="of a plain forward, by its part of that", of="plain_beyond"
        ),
        Column("chance", number, 3, detail="sign test", of="chance"),
        Column("", text, of=lambda it: standing_cell(it.standing)),
    )
    gaps = (
        Column("in float32", text, of=lambda gap: Cell(gap.left, note=f"against {gap.right}")),
        Column("mean |delta|", interval=2, detail="nats", of="size", tone="strong"),
        Column("rounding", number, 1, detail="expected of float32", of="floor"),
        Column("k3", number, 3, of="k3"),
        Column("largest", number, 4, of="largest"),
        Column("level", bound, 2, of=lambda gap: apart(gap).level),
        Column("", text, of=lambda gap: standing_cell(apart(gap).standing)),
    )
    return (
        Table.of(sides, result.legs),
        Table.of(displaced, result.displaced),
        Table.of(gaps, result.gaps),
    )


def standing_cell(standing: Standing) -> Cell:
    """Return a number against its level, as a badge."""
    return Cell(WORDS[standing], TONES[standing])


def _figure(result: Square) -> Figure:
    # The two sides themselves: other passes of a side may be drawn, and are nobody's finding.
    sides = {leg.side: leg for leg in reversed(result.legs)}.values()
    worst = max(sides, key=lambda leg: leg.excess.value)
    return Figure(
        "square-excess",
        f"The error of {line(worst.scoring)} is {times(worst.excess.value)} what precision costs",
        f"Distance from float32 over that of a plain forward at the same precision, "
        f"{plural(worst.excess.n_tokens, 'token')}, with 95 % intervals. Line: 1, pure rounding; "
        "dashed: the level that clean runs stay below.",
        partial(_bars, result),
        (6.0, 1.2 + 0.33 * len(result.legs)),
    )


def _bars(result: Square, axes: Axes) -> str:
    levels = {f.level for f in result.findings if f.evidence == "excess" and f.level is not None}
    places = range(len(result.legs))
    axes.barh(places, [leg.excess.value for leg in result.legs], color=ACCENT, height=0.5)
    for y, leg in enumerate(result.legs):
        if leg.excess.low is not None and leg.excess.high is not None:
            axes.plot([leg.excess.low, leg.excess.high], [y, y], color=INK, lw=1.4)
    axes.axvline(1.0, color=INK, lw=0.8)
    for level in levels:
        axes.axvline(level, color=SECOND, lw=1.2, dashes=(4, 3))
    axes.set_yticks(places, [line(leg.scoring) for leg in result.legs])
    axes.invert_yaxis()
    axes.set_xlabel("excess over a plain forward")
    values = (f"{line(leg.scoring)} {times(leg.excess.value)}" for leg in result.legs)
    return f"Excess over rounding: {', '.join(values)}"
