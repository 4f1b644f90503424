"""A new run against an old one, in words and rows, and as HTML and Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mismatch.experiments.regression.types import Against, AgainstRow, Changed, RunSide
from mismatch.reports import formatting
from mismatch.reports.formatting import MARKS, interval, line, signed
from mismatch.reports.summary import Row
from mismatch.reports.words import words_for

WORDS = {
    "worse": "Worse",
    "better": "Better",
    "mixed": "Mixed",
    "none": "No significant difference",
}
RESULTS = {"worse": "worse", "better": "better", "none": "not significant", None: ""}
SIGNS = {"worse": "✕", "better": "✓", "none": "~", None: ""}
LEAD = (
    "Each run compares its own engine with its own trainer. The change is new minus old, in nats "
    "unless it is a share. For the metrics that decide, below 0 is better."
)


@dataclass(frozen=True, slots=True)
class Line:
    """One metric as a line of a table; all texts.

    Attributes:
        tone: class of the badge, "" where the metric does not decide.
    """

    metric: str
    label: str
    meaning: str
    old: str
    new: str
    change: str
    interval: str
    p: str
    result: str
    mark: str
    tone: str


def verdict_line(made: Against) -> str:
    """The last line of the terminal."""
    return f"verdict: {WORDS[made.outcome].upper()} – {line(made.reason)}"


def status(made: Against) -> str:
    """The tone of the whole: what fails is critical, what only moved is a warning."""
    if made.fails:
        return "critical"
    return "warn" if made.outcome in ("worse", "mixed") else "healthy"


def lines(made: Against) -> list[Line]:
    """Deciding metrics first."""
    ordered = sorted(made.rows, key=lambda row: row.p_value is None)
    return [_line(row) for row in ordered]


def _line(row: AgainstRow) -> Line:
    words = words_for(row.metric)
    before, after = (Row(row.metric, words, side) for side in (row.old, row.new))
    tones = {"worse": "critical" if row.beyond else "warn", "better": "healthy", "none": "none"}
    result = RESULTS[row.outcome]
    if row.outcome == "worse":
        result += "" if row.beyond else ", within the margin"
    return Line(
        metric=row.metric,
        label=words.label,
        meaning=words.meaning,
        old=before.value,
        new=after.value,
        change=signed(row.change.value, 2),
        interval=interval(row.change, partial(signed, digits=2)),
        p=_p_value(row.p_value),
        result=result,
        mark=SIGNS[row.outcome],
        tone=tones.get(row.outcome or "", ""),
    )


def _p_value(value: float | None) -> str:
    if value is None:
        return ""
    return "< 0.001" if value < 0.001 else formatting.number(value, 2)


def side(one: RunSide) -> str:
    """A run in one line."""
    tokens = formatting.plural(one.tokens, "token")
    size = f"{tokens}, {formatting.plural(one.sequences, 'sequence')}"
    own = f"{MARKS[one.verdict.status]} {one.verdict.status}" if one.verdict else "not judged"
    engine = f"{line(one.engine)} {line(one.version)}".strip()
    return f"{line(one.run)}: {engine}, {size}, by itself {own}"


def sentences(made: Against) -> list[str]:
    """What the numbers rest on."""
    if made.same_tokens:
        tokens = "Both runs hold the same tokens: every change is of the same tokens."
    else:
        tokens = (
            f"{formatting.count(made.same_sequences)} of "
            f"{formatting.plural(made.old.sequences, 'sequence')} are the same in both runs; the "
            "engines sampled tokens of their own, so changes are by prompt."
        )
    notes = [f"{line(note)}." for note in made.notes]
    return [tokens, *engines(made), *(note[0].upper() + note[1:] for note in notes)]


def engines(made: Against) -> list[str]:
    """The two engines on the same tokens, in one sentence."""
    if made.engines is None:
        return []
    known = made.engines.metrics
    mean, most = known["logprob_abs_diff_mean"].value, known["logprob_abs_diff_max"].value
    return [
        f"New engine against old engine on these tokens: mean |delta| {formatting.number(mean)}, "
        f"largest {formatting.number(most)}."
    ]


def changes(made: Against) -> list[Changed]:
    """What has changed, safe to show."""
    return [
        Changed(one.where, line(one.name), line(one.old), line(one.new)) for one in made.changed
    ]


def to_html(made: Against) -> str:
    """One self-contained page. The same input gives the same bytes."""
    from mismatch.reports.html import packaged, template

    text: str = template("against.html").render(
        made=made,
        status=status(made),
        word=WORDS[made.outcome],
        marks=MARKS,
        lead=LEAD,
        rows=lines(made),
        sides=[("old", side(made.old)), ("new", side(made.new))],
        sentences=sentences(made),
        changed=changes(made),
        line=line,
        css=packaged("report.css"),
    )
    return text


def to_markdown(made: Against) -> str:
    """GitHub-flavoured Markdown, for a job's summary or a comment."""
    from mismatch.reports.markdown import plain, table

    rows = [
        [f"{plain(row.label)} (`{row.metric}`)", row.old, row.new,
         f"{row.change} ({row.interval})", row.p, plain(f"{row.mark} {row.result}".strip())]
        for row in lines(made)
    ]  # fmt: skip
    facts = [[one.where, plain(one.name), plain(one.old), plain(one.new)] for one in changes(made)]
    parts = [
        f"### {MARKS[status(made)]} {WORDS[made.outcome]}: {plain(made.reason)}",
        f"**{plain(made.new.model)}** · new: {plain(side(made.new))} · "
        f"old: {plain(side(made.old))}",
        table(["", "old:", "new:", "change, 95 % interval:", "p:", ""], rows),
        "\n".join(f"- {plain(text)}" for text in sentences(made)),
        "**What changed**" if facts else "",
        table(["", "", "old", "new"], facts),
        f"<sub>{plain(LEAD)} {plain(made.method)}</sub>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
