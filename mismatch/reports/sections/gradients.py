"""The policy gradient of one batch, beside that of the trainer in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mismatch.experiments.gradients.analysis import KINDS
from mismatch.experiments.gradients.sentences import (
    angle,
    better,
    degrees,
    error_of,
    joined,
    main_loss,
    quieter,
    share,
    silent,
    worse,
)
from mismatch.experiments.gradients.types import (
    LOSSES,
    REWARDS,
    GradientCheck,
    GradientRow,
    GroupError,
    Loss,
)
from mismatch.reports.formatting import (
    cosine,
    count,
    line,
    memory,
    number,
    plural,
    seconds,
    text,
    times,
)
from mismatch.reports.section import Cell, Cells, Column, Figure, Section, Table, Tone, not_tested
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, legend_above, rows_of
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAD = (
    "The policy gradient of one batch, taken by the trainer, its fixes and the corrections of the "
    "loss, beside that of the trainer in float32 on the same tokens. One batch, no training."
)
LOSS_WORDS: dict[Loss, tuple[str, str]] = {
    "token": ("Token-level loss", "Every action token of the batch weighs the same."),
    "sequence": ("Sequence-level loss", "Every sample weighs the same, its tokens share that."),
}
AIM = (
    "A correction aims at another gradient than the plain one of the reference: how far off it is "
    "says how much it changes, not how wrong it is."
)
JACKKNIFE = "Intervals: jackknife over prompts, 95 % each, not adjusted for how many there are."
LEGEND = (
    "Bias: what all prompts' differences from the reference share, their noise taken off, over the "
    "reference's size. Variance: how much the gradient of such a batch scatters with the prompts, "
    "over the reference's size squared."
)
COLUMNS = (
    Column("gradient", text),
    Column("beside the trainer's", text),
    Column("off", degrees, interval=7, detail="angle to the reference's"),
    Column("cosine", cosine, 6),
    Column("length", number, 1, interval=8, detail="of the reference's"),
    Column("error", share, interval=7, detail="relative to the reference's size"),
    Column("of the trainer's", times, 5, detail="relative error"),
    Column("bias", share, 2, interval=8),
    Column("variance", number, 4),
    Column("noise", times, 3, detail="variance over the trainer's"),
)


def section(result: GradientCheck, report: Report) -> Section:
    """Sentences, a table per loss (the one that the sentences speak of first), and each group."""
    losses = [loss for loss in LOSSES if any(row.loss == loss for row in result.rows)]
    parts = tuple(_part(result, loss, folded=bool(index)) for index, loss in enumerate(losses))
    return Section(
        id="gradients",
        title="Gradients",
        lead=f"{LEAD} {batch(result)}.",
        sentences=result.summary,
        figures=_figures(result),
        notes=(*notes(result), LEGEND, *not_tested(result.not_tested)),
        parts=parts,
        short=result.summary[0] if result.summary else "",
    )


def batch(check: GradientCheck) -> str:
    """What the gradients were taken of."""
    size = f"{plural(check.prompts, 'prompt')}, {plural(check.sequences, 'sample')}"
    given = check.advantages == REWARDS
    advantages = "rewards, normalised within each prompt" if given else check.advantages
    return f"{size}, {plural(check.tokens, 'action token')}; advantages: {advantages}"


def notes(check: GradientCheck) -> list[str]:
    """What has to be known before the table is believed."""
    texts = []
    if check.advantages != REWARDS:
        texts.append(
            "No task steered this gradient: the rewards cannot, so signs stand in for advantages. "
            "How kernels and dtypes bend a gradient shows all the same."
        )
    elif check.deciding < check.prompts:
        texts.append(
            f"{count(check.deciding)} of {plural(check.prompts, 'prompt')} have samples of "
            "different reward; the others have no gradient."
        )
    errors = [row.whole.relative_error for row in check.rows]
    flags = {flag for error in errors if error is not None for flag in error.flags}
    if "one-prompt" in flags:
        texts.append("One prompt only: nothing can be told from chance.")
    elif "few-prompts" in flags:
        texts.append("Few prompts: the intervals are rough. More: --gradient-prompts.")
    if any(row.kind == "correction" for row in check.rows):
        texts.append(AIM)
    return [*texts, JACKKNIFE]


def _part(check: GradientCheck, loss: Loss, folded: bool) -> Section:
    rows = [row for row in check.rows if row.loss == loss]
    baseline = check.row("baseline", loss)
    own = [row for row in rows if not row.same_as]
    # A trainer that is the reference itself keeps its line: it is what the check is about.
    lines = [_row(row, baseline) for row in rows if row is baseline or not row.same_as]
    columns = [Column(each.group, share) for each in (own[0].groups if own else ())]
    by_group: list[Cells] = [(row.id, *map(_group, row.groups)) for row in own]
    groups = Section(
        f"gradients-{loss}-groups",
        "By group of parameters",
        "Relative error, and the angle, of each group's part of the gradient.",
        tables=(Table((Column("gradient", text), *columns), by_group),),
        page_only=True,
    )
    same: dict[str, list[str]] = {}  # whose gradient is another's, by whose it is
    for row in rows:
        if row.same_as and row is not baseline:
            same.setdefault(row.same_as, []).append(row.id)
    title, lead = LOSS_WORDS[loss]
    return Section(
        f"gradients-{loss}",
        title,
        lead,
        tables=(Table(COLUMNS, lines),),
        notes=[
            f"{joined(ids)}: the reference's gradient, of the same settings."
            if source == "reference"
            else f"{joined(ids)}: the gradient of {source}, whose coefficients are the same here."
            for source, ids in same.items()
        ],
        parts=(groups,),
        folded=folded,
        page_only=folded,
    )


def _row(row: GradientRow, baseline: GradientRow | None) -> Cells:
    whole = row.whole
    parts = [f"{row.kind}: {row.label}"]
    if row.same_as == "reference":
        parts.append("the reference itself: the same settings")
    if row.seconds is not None:
        parts.append(seconds(row.seconds))
    if row.peak_bytes is not None:
        parts.append(memory(row.peak_bytes))
    tone, verdict = _verdict(row, baseline)
    arc = whole.cosine  # the wider the angle, the smaller its cosine
    off = None if arc is None else replace(arc, low=arc.high, high=arc.low)
    return (
        Cell(row.id, "code", "; ".join(parts)), Cell(verdict, tone), Cell(off, "strong"), arc,
        whole.norm_ratio, whole.relative_error, row.error_ratio, row.bias, row.variance,
        row.variance_ratio,
    )  # fmt: skip


def _verdict(row: GradientRow, baseline: GradientRow | None) -> tuple[Tone, str]:
    if baseline is None or row.id == baseline.id:
        return "", ""
    if better(row):
        return "healthy", "nearer"
    if worse(row):
        return ("critical" if row.kind == "fix" else "warn"), "further off"
    if row.kind == "correction" and quieter(row, baseline):
        return "healthy", "less noise"
    return "dim", "no clear change"


def _group(error: GroupError) -> Cell:
    if error.relative_error is None:
        return Cell(None)
    if silent(error):
        return Cell(error.relative_error, note="no gradient")
    off = "" if error.cosine is None else f"{degrees(error.cosine.value)} off"
    return Cell(error.relative_error, note=off)


# ---------------------------------------------------------------- figures


COLOURS = (ACCENT, SECOND, INK, FAINT)
MARKERS = ("o", "s", "D", "^")
MOST = 4  # gradients in the picture of groups
LEAST = 1e-3  # degrees: what is nearer is drawn there
TICKS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 90.0)


def _figures(check: GradientCheck) -> tuple[Figure, ...]:
    """Those that the rows of one loss allow."""
    loss = main_loss(check)
    rows = [row for row in check.rows if row.loss == loss and not row.same_as]
    if not rows:
        return ()
    return (
        Figure(
            "gradient-directions",
            "Direction, by group of parameters",
            "Further left is nearer to the reference; lines are 95 % intervals over prompts. At "
            "90° the two have nothing in common. A cross there: no gradient arrives where one "
            "should.",
            partial(_directions, chosen(rows)),
            (6.0, 1.3 + 0.42 * len(rows[0].groups)),
        ),
    )


def chosen(rows: Sequence[GradientRow]) -> list[GradientRow]:
    """As many as can be told apart: the trainer, its nearest fixes and correction, then others."""
    kinds = {kind: sorted((r for r in rows if r.kind == kind), key=error_of) for kind in KINDS}
    nearest = [*kinds["baseline"], *kinds["fix"][:2], *kinds["correction"][:1]]
    others = [row for kind in ("ratio", "fix", "correction") for row in kinds[kind]]
    return [*nearest, *(row for row in others if row not in nearest)][:MOST]


def _directions(rows: Sequence[GradientRow], axes: Axes) -> str:
    step, texts = 0.6 / max(1, len(rows)), []
    for index, row in enumerate(rows):
        shift = (index - (len(rows) - 1) / 2) * step
        colour, marker = COLOURS[index], MARKERS[index]
        placed = [(height + shift, each.cosine) for height, each in enumerate(row.groups)]
        angles = [(at, max(LEAST, angle(arc.value))) for at, arc in placed if arc is not None]
        for at, arc in placed:
            if arc is not None and arc.low is not None and arc.high is not None:
                ends = [max(LEAST, angle(end)) for end in (arc.high, arc.low)]
                axes.plot(ends, [at] * 2, color=colour, lw=1.2)
        x, y = [x for _, x in angles], [y for y, _ in angles]
        axes.plot(x, y, marker, color=colour, ms=5, label=line(row.id))
        named = zip(row.groups, placed, strict=True)
        degrees = [f"{g.group} {number(angle(a.value))}°" for g, (_, a) in named if a is not None]
        texts.append(f"{line(row.id)}: {', '.join(degrees)}")
        crossed = [height + shift for height, each in enumerate(row.groups) if silent(each)]
        axes.plot([90.0] * len(crossed), crossed, "x", color=colour, ms=8, mew=2.2)
    axes.set_xscale("log")
    axes.set_xlim(LEAST * 0.7, 260.0)
    axes.set_xticks(TICKS, ["≤ 0.001°", "0.01°", "0.1°", "1°", "10°", "90°"])
    axes.minorticks_off()
    rows_of(axes, [each.group for each in rows[0].groups])
    axes.set_xlabel("angle to the float32 reference's gradient (log)")
    legend_above(axes, 2, 0.4)
    return f"Angle to the reference's gradient. {'; '.join(texts)}"
