"""Which side is off: the distance of each side from float32."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from mismatch.analysis.levels import AS_LOADED as WEIGHTS
from mismatch.analysis.results import (
    LATER_LAYERS,
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
from mismatch.keys import REFERENCE
from mismatch.reports.formatting import (
    alike,
    bound,
    count,
    interval,
    line,
    number,
    plural,
    text,
    times,
)
from mismatch.reports.section import Cell, Column, Figure, Section, Table, Tone
from mismatch.reports.summary import HEADLINE
from mismatch.reports.svg import ACCENT, FAINT, INK, rows_of
from mismatch.types import Estimate, Report

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


EVIDENCE = {"excess": "error, over what precision costs", "gap": "nats off in float32"}
FOUND = (
    Column("side", text, of=lambda it: Cell(it.scoring, note=EVIDENCE[it.evidence])),
    Column(
        "value",
        interval=1,
        of=lambda it: Cell(it.value, format=times if it.evidence == "excess" else _nats),
    ),
    Column(
        "limit", of=lambda it: Cell(it.level, format=times if it.evidence == "excess" else bound)
    ),
    Column("", text, of=lambda it: standing_cell(it.standing)),
)


def _nats(value: float) -> str:  # by its size: a column of `number` writes all alike
    return number(value)


def section(result: Square, report: Report) -> Section:
    """Return both tables, and which side is off."""
    notes, tables = _notes(result), _tables(result)
    return Section(
        id="square",
        title="Rounding or fault",
        sentences=sentences(result, report),
        tables=[Table.of(FOUND, result.findings)],
        figures=_figures(result, report),
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
    over = f", where rounding costs {number(gap.floor, 1)}" if gap.floor else ""
    far = f"; {finding.far}" if finding.far else ""
    apart = f"{number(value.value)} nats off in float32{over}{far}"
    if finding.side == "either":
        who = "the engine's implementation" + " or the trainer's model code" * (not engines)
        who += " is off"
        return f"{name} and the float32 reference compute different functions: {who}; {apart}."
    return f"{WHOSE[finding.side]} computes the wrong function: {apart}."


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
        notes.append(f"Time of these passes: {took}; --depth quick leaves out all but one.")
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


def _figures(result: Square, report: Report) -> tuple[Figure, ...]:
    """Draw how far each side, and a plain forward, are from the float32 reference."""
    away = {
        pair.left: pair.metrics[HEADLINE]
        for pair in report.noise_floor
        if pair.right == REFERENCE and HEADLINE in pair.metrics
    }
    leg = next((leg for leg in result.legs if leg.side in ("engine", "trainer")), None)
    if leg is None or not away or not leg.excess_size.value:
        return ()
    plain = leg.size.value / leg.excess_size.value
    worst = max(away, key=lambda name: away[name].value)
    rows: dict[str, Estimate | float] = {**away, leg.plain: plain}
    if not plain > 0 or not all(each.value > 0 for each in away.values()):
        return ()
    return (
        Figure(
            "square-distance",
            f"{line(worst)} is {times(away[worst].value / plain)} as far from the reference as "
            "a plain forward",
            f"mean |delta| from the float32 reference, nats, {plural(leg.size.n_tokens, 'token')}, "
            f"with 95 % intervals; log axis. {line(leg.plain)}: what precision alone costs.",
            partial(_bars, rows),
            (6.0, 1.2 + 0.33 * len(rows)),
        ),
    )


def _bars(rows: dict[str, Estimate | float], axes: Axes) -> str:
    values = [each if isinstance(each, float) else each.value for each in rows.values()]
    least = min(values) / 10  # where bars begin on a log axis
    colours = [FAINT if isinstance(each, float) else ACCENT for each in rows.values()]
    widths = [value - least for value in values]
    axes.barh(range(len(rows)), widths, left=least, color=colours, height=0.5)
    for y, each in enumerate(rows.values()):
        if not isinstance(each, float) and each.low and each.high:
            axes.plot([each.low, each.high], [y, y], color=INK, lw=1.4)
    axes.set(xscale="log", xlim=(least, None), xlabel="nats from the float32 reference (log)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    rows_of(axes, [line(name) for name in rows])
    write = alike(values)
    shown = (f"{line(name)} {write(value)}" for name, value in zip(rows, values, strict=True))
    return f"Nats from the float32 reference: {', '.join(shown)}"
