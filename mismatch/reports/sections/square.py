"""Which side is off: each one's distance from float32, and two engines beside the trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mismatch.analysis.displaced import Displaced, Standing
from mismatch.analysis.square import Finding, Gap, Leg, Square, shared
from mismatch.analysis.square_checks import displacement
from mismatch.experiments.engine_pair import FLOOR_TEXT, TRAINER, Edge, Triangle
from mismatch.reports.formatting import (
    MARKS,
    bound,
    capital,
    count,
    interval,
    line,
    number,
    percent,
    plural,
    signed,
    text,
    times,
)
from mismatch.reports.formatting import TONES as STATUS_TONES
from mismatch.reports.section import Cell, Cells, Column, Figure, Section, Table, Tone
from mismatch.reports.svg import ACCENT, INK, SECOND
from mismatch.types import Estimate, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAD = (
    "Excess: how far a side is from float32, over how far a plain forward at its precision is. "
    "About 1 is rounding; a broken kernel, cache or setting rounds more. Two implementations in "
    "float32 differ by next to nothing, unless weights or functions differ."
)
SHARED = (
    "The float32 reference is the trainer's model code: a fault that both share would look like "
    "the engine's."
)
TONES: dict[Standing, Tone] = {
    "within": "healthy",
    "wide": "warn",
    "undecided": "warn",
    "uncalibrated": "dim",
    "beyond": "critical",
}
WORDS: dict[Standing, str] = {
    "within": "within",
    "wide": "within, but wide",
    "undecided": "undecided",
    "uncalibrated": "not calibrated",
    "beyond": "beyond",
}
WHOSE = {"engine": "The engine", "other-engine": "The second engine"}
KINDS = {
    "rare": "largest token of a prompt",
    "shift": "mean of a prompt",
    "response": "median token of a response",
}


def section(result: Square, report: Report) -> Section:
    """Both tables, and which side is off."""
    notes, tables = _notes(result), _tables(result)
    return Section(
        id="square",
        title="Rounding or fault",
        sentences=sentences(result),
        figures=(_figure(result),) if result.legs else (),
        parts=(Section("square-numbers", "Numbers", LEAD, tables=tables, notes=notes),),
        folded=False,
    )


def sentences(result: Square) -> list[str]:
    """Which side is off and by what evidence; whether the two sides round alike."""
    beyond = [finding for finding in result.findings if finding.standing == "beyond"]
    first = {(finding.side, finding.evidence): finding for finding in reversed(beyond)}
    texts = [_off(result, finding) for finding in beyond if finding in first.values()]
    displaced = [each for each in result.displaced if each.standing == "beyond"]
    texts += [
        _displaced(each) for each in {each.side: each for each in reversed(displaced)}.values()
    ]
    if not texts:
        texts.append(_clean(result))
    elif any(shared(result, each) for each in beyond) or any(
        shared(result, each) for each in displaced
    ):
        texts.append(SHARED)
    if result.correlation is not None:
        texts.append(
            f"The roundings of the two sides correlate by {number(result.correlation.value, 2)} "
            f"({interval(result.correlation)}): where they round at the same places they cancel."
        )
    return texts


def _off(result: Square, finding: Finding) -> str:
    name, value = line(finding.scoring), finding.value
    if finding.evidence == "excess":
        whose = WHOSE.get(finding.side, "The trainer")
        return (
            f"{whose} is off: {name} is {times(value.value)} as far from its own float32 as a "
            f"plain forward at its precision ({interval(value, times)})."
        )
    gap = next(gap for gap in result.gaps if gap.left == finding.scoring)
    times_floor = count(round(value.value / gap.floor)) if gap.floor else ""
    over = f", {times_floor} times the rounding that is expected" if times_floor else ""
    subject = {
        "engine": "The engine computes another function than the float32 reference",
        "trainer": "The trainer computes another function than the float32 reference",
        "either": "The two sides compute different functions; which of them is off cannot be told",
    }[str(finding.side)]
    return f"{subject}: mean |delta| {number(value.value)} nats in float32{over}."


def _displaced(moved: Displaced) -> str:
    return (
        f"{WHOSE.get(moved.side, 'The trainer')} is off: {line(displacement(moved))}, more than "
        f"{times(moved.factor)} as far as in a plain forward."
    )


def _clean(result: Square) -> str:
    if not result.findings:
        return "Neither side could be told from a faulty one: see what was not tested."
    standings = {each.standing for each in result.findings}
    if "undecided" in standings | {each.standing for each in result.displaced}:
        return "A value lies beyond its level, but its interval does not decide."
    if "wide" in standings:
        return "What was measured is within its level, but an interval reaches beyond it."
    if result.unmeasured:
        return (
            f"What was measured is within its level, but {', '.join(result.unmeasured)} is missing."
        )
    excess = any(finding.evidence == "excess" for finding in result.findings)
    rounds = "Each side rounds as a plain forward at its precision does and the"
    sentence = f"{rounds if excess else 'The'} implementations agree in float32"
    if not result.calibrated:
        return f"{sentence}, as far as levels go: none is calibrated on {line(result.device)}."
    return f"{sentence}: what is measured here is rounding."


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
    """A number against its level, as a badge."""
    return Cell(WORDS[standing], TONES[standing])


def _figure(result: Square) -> Figure:
    worst = max(result.legs, key=lambda leg: leg.excess.value)
    return Figure(
        "square-excess",
        f"{line(worst.scoring)} rounds {times(worst.excess.value)} as much as a plain forward",
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


# ---------------------------------------------------------------- two engines and the trainer

ENGINES_LEAD = (
    "Both engines sampled from the same prompts, and each scored what the other had sampled, by "
    "prefill. On one set of tokens the three parties are the corners of a triangle and mean "
    "|delta| is the length of its edges. Both scored what is “given”; of what is “sampled”, the "
    "left side is as it sampled: there k3 estimates a KL, elsewhere it is a divergence score."
)
CONTRASTS = (
    "Mean |delta| of the first edge minus that of the second, paired on the same tokens. A party "
    "is odd where both its edges are longer than the third on every set of tokens, by more than "
    "chance and by a tenth. Where every edge is shorter than {floor} nats, all three agree and "
    "none is odd."
)
SCORED = {"prefill": "given", "decode": "sampled"}
COMPARED = (
    Column("first edge", text),
    Column("second edge", text),
    Column("tokens of", text),
    Column("difference", signed, interval=1),
)


def _metric(name: str) -> Callable[[Edge], Estimate | None]:
    def value(edge: Edge) -> Estimate | None:
        comparison = edge.comparison
        return None if comparison is None else (comparison.metrics | comparison.routing).get(name)

    return value


def _pair(edge: Edge) -> Cell:
    pair = " / ".join(map(party, edge.parties))
    return Cell(pair, note=f"not tested: {edge.reason}" if edge.reason else "")


EDGES = (
    Column("left / right", text, of=_pair),
    Column("tokens of", text, of="tokens"),
    Column("left", text, of=lambda edge: SCORED[edge.kind]),
    Column("mean |delta|", interval=1, detail="nats", of=_metric("logprob_abs_diff_mean")),
    Column("k3", number, 2, detail="nats per token", of=_metric("k3_kl")),
    Column("largest |delta|", number, 4, of=_metric("logprob_abs_diff_max")),
    Column(
        "routing flips",
        percent,
        3,
        detail="of (token, layer)",
        of=_metric("routing_disagree_layer"),
    ),
)


def engines(result: Triangle, report: Report) -> Section:
    """Every edge, those between three parties that scored alike first; always in full."""
    decided = Section(
        "engines-contrasts",
        "What the odd one out is decided by",
        CONTRASTS.format(floor=FLOOR_TEXT),
        tables=[Table(COMPARED, _contrasts(result))],
        page_only=True,
    )
    edges = sorted(result.edges, key=lambda edge: edge.kind != "prefill")
    return Section(
        "engines",
        "Engines",
        ENGINES_LEAD,
        sentences=engines_sentences(result, report),
        tables=[Table.of(EDGES, edges)],
        notes=[f"not tested: {missing}" for missing in result.not_tested],
        parts=[decided],
        folded=False,
    )


def engines_sentences(result: Triangle, report: Report) -> list[str]:
    """What follows, most useful first."""
    reason = f"{line(result.reason)}."
    if reason.startswith(("all ", "none", "not", "the ")):  # names of engines keep their own case
        reason = capital(reason)
    texts = [reason]
    for side in result.sides:
        name = f"{line(side.engine)} {line(side.version)}".strip()
        facts = report.fingerprints.get(f"{side.engine}:decode", {})
        if facts.get("attention"):
            name += f", attention {line(facts['attention'])},"
        level = "no level applies"
        if side.verdict is not None:
            mark = MARKS[STATUS_TONES[side.verdict.status]]
            level = f"{mark} {side.verdict.status}, {line(side.verdict.reason)}"
        texts.append(f"{name} against the trainer, on its own tokens: {level}.")
    return [
        *texts,
        "The verdict is that of the worse engine; all other parts of this report are of "
        f"{line(result.sides[0].engine)}.",
    ]


def _contrasts(result: Triangle) -> list[Cells]:
    """One edge at a party beside the edge that the party has no part in; each pair once."""
    rows: dict[object, Cells] = {}
    for contrast in result.contrasts:
        (third,) = set(result.parties) - {contrast.party, contrast.edge}
        edges = (contrast.party, contrast.edge), (contrast.edge, third)
        names = (" / ".join(map(party, edge)) for edge in edges)
        key = contrast.tokens, frozenset(map(frozenset, edges))
        rows.setdefault(key, (*names, contrast.tokens, contrast.difference))
    return [*rows.values()]


def party(name: str) -> str:
    """An engine by its name, or the trainer."""
    return "trainer" if name == TRAINER else line(name)
