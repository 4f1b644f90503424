"""The report on a terminal: calm, aligned, and the last line is the verdict.

Nothing but text where the output is no terminal: no colour, no boxes, 80 columns.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mismatch.metrics.corrections import NONE
from mismatch.reports import (
    budget,
    corrections,
    exact,
    forecast,
    normal,
    quantities,
    routing,
    sides,
    summary,
    two_passes,
)
from mismatch.reports.text import line
from mismatch.reports.words import MARKS
from mismatch.types import Report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mismatch.corrections.types import Corrections
    from mismatch.reports.elsewhere import Elsewhere

STYLES = {"healthy": "green", "warn": "yellow", "critical": "bold red", "": "dim"}


def print_report(
    report: Report,
    console: Console,
    run_dir: Path | str | None = None,
    elsewhere: Elsewhere | None = None,
) -> None:
    """Print the report; the last line is ``verdict: STATUS – reason``.

    Args:
        console: where to; its width and colours are respected.
        run_dir: where the artefacts lie, None where nothing was saved.
        elsewhere: a framework's names, for a table of their own.
    """
    _title(report, console)
    _metrics(report, console)
    _names(report, console, elsewhere)
    _normal(report, console)
    _routing(report, console)
    _noise(report, console)
    _budget(report, console)
    _two_passes(report, console)
    _forecast(report, console)
    _exact(report, console)
    _corrections(report, console)
    _what_ran(report, console)
    _checks(report, console)
    _next(report, console)
    if run_dir is not None:
        _say(console, "")
        _say(console, f"Everything is in {line(run_dir)} (open report.html)")
    _say(console, "")
    status = report.verdict.status
    _say(console, summary.verdict_line(report), STYLES[status] + (" bold" * (status != "critical")))


def _say(console: Console, text: str, style: str = "") -> None:
    """One line as it is: no markup in foreign text, no wrapping that breaks a path."""
    console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _heading(console: Console, title: str, remark: str = "") -> None:
    from rich.text import Text

    _say(console, "")
    text = Text(title, "bold")
    text.append(f"  {remark}" if remark else "", "dim")
    console.print(text, highlight=False)


def _paragraph(console: Console, text: str, indent: int = 2, style: str = "") -> None:
    """Wrapped text; a list's mark ("- ") stays left of the following lines."""
    mark = text[:2] if text[:2] in {"- ", "✕ ", "! "} else ""
    wrapped = textwrap.fill(
        text,
        width=console.width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + len(mark)),
        break_long_words=False,
        break_on_hyphens=False,
    )
    _say(console, wrapped, style)


def _title(report: Report, console: Console) -> None:
    from rich.text import Text

    comparison = summary.headline(report)
    _say(console, "")
    title = Text(summary.model_name(report), "bold")
    title.append(f"  {line(comparison.rollout)} against {line(comparison.train)}")
    console.print(title, highlight=False)
    remark = f"{summary.size(report)}; levels for {line(report.verdict.levels)}"
    _say(console, remark, "dim")
    _say(console, "")
    _paragraph(console, summary.in_plain_words(report), indent=0)


def _columns(*specs: tuple[str, bool, int]) -> Table:
    """A table of (title, right-aligned, minimum width); only the first column may wrap."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for index, (title, right, width) in enumerate(specs):
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(title, justify=justify, min_width=width, no_wrap=index > 0)
    return table


def _metrics(report: Report, console: Console) -> None:
    from rich.text import Text

    rows, others = summary.judged_rows(report), summary.other_rows(report)
    if not rows and not others:
        return
    _heading(console, "How far apart", "delta = train - rollout, in nats; 95 % intervals by prompt")
    table = _columns(
        ("", False, 0), ("value", True, 0), ("95 % interval", True, 0),
        ("healthy", True, 0), ("critical", True, 0), ("", False, 0),
    )  # fmt: skip
    for row in [*rows, *others]:
        mark = f"{MARKS[row.status]} {row.status}" if row.status else ""
        table.add_row(
            Text(f"  {row.words.label}", "" if row.judgement else "dim"),
            row.value, row.interval, row.healthy, row.critical,
            Text(mark, STYLES[row.status]),
        )  # fmt: skip
    console.print(table, highlight=False, markup=False)
    for caution in summary.cautions(rows):
        _paragraph(console, f"! {caution}", style="yellow")


def _names(report: Report, console: Console, elsewhere: Elsewhere | None) -> None:
    """A framework's own names beside ours; the remarks below, each once."""
    if elsewhere is None:
        return
    rows = elsewhere.rows(report)
    _heading(console, f"In {elsewhere.called}", "value there, where its convention differs")
    if not rows:
        _paragraph(console, "none of these metrics is known to have a name there")
        return
    table = _columns(("", False, 0), ("ours", True, 0), ("name there", False, 0), ("", True, 0))
    for row, other in rows:
        table.add_row(f"  {row.metric}", row.value, other.name, other.value)
    console.print(table, highlight=False, markup=False)
    remarks: dict[str, list[str]] = {}
    for _, other in rows:
        if other.remark:
            remarks.setdefault(other.remark, []).append(other.name)
    for remark, concerned in remarks.items():
        _paragraph(console, f"- {', '.join(concerned)}: {remark}", style="dim")


def _normal(report: Report, console: Console) -> None:
    from rich.text import Text

    said = normal.sentences(report)
    if not said:
        return
    _heading(console, "Is this normal?", f"measured elsewhere on {line(report.verdict.levels)}")
    table = _columns(("", True, 11), ("", False, 40))
    table.columns[1].no_wrap = False
    for ladder in normal.ladders(report)[:1]:
        for rung in ladder.rungs:
            style = "bold" if rung.ours else "dim"
            table.add_row(Text(rung.value, style), Text(_rung(rung), style))
        table.show_header = False
        console.print(table, highlight=False)
    for sentence in said:
        _paragraph(console, sentence)


def _rung(rung: normal.Rung) -> str:
    source = rung.detail.rpartition("; ")[2]
    return f"{rung.who} ({source})" if source else rung.who


def _routing(report: Report, console: Console) -> None:
    rows = routing.core_rows(report)
    if not rows:
        return
    _heading(console, "Experts chosen", "does the trainer's router pick the engine's experts?")
    table = _columns(("", False, 26), ("value", True, 7), ("95 % interval", True, 17))
    for row in rows:
        table.add_row(f"  {row.words.label}", row.value, row.interval)
    console.print(table, highlight=False, markup=False)
    for sentence in routing.sentences(summary.headline(report)):
        _paragraph(console, sentence, style="dim")


def _noise(report: Report, console: Console) -> None:
    rows = summary.noise_rows(report)
    if not rows:
        return
    _heading(console, "How much of this is noise", "passes that should agree with each other")
    table = _columns(
        ("", False, 26), ("mean |delta|", True, 7), ("largest", True, 7), ("of headline", True, 7)
    )
    for row in rows:
        table.add_row(f"  {row.words.label}", row.mean, row.largest, row.share)
    console.print(table, highlight=False, markup=False)
    _paragraph(console, "The parts are no shares: mean |delta| does not add up.", style="dim")


def _exact(report: Report, console: Console) -> None:
    said = exact.sentences(report)
    if said:
        _heading(console, "Exact KL", "over all tokens that could have come, not the sampled one")
    for sentence in said:
        _paragraph(console, f"- {sentence}")


def _corrections(report: Report, console: Console) -> None:
    """Short: what the data favour, beside what no correction does."""
    made = report.corrections
    if made is None:
        return
    _heading(console, "Corrections, previewed", "weights in the loss; no delta changes")
    rows = [row for row in corrections.correction_rows(made) if made.named(row.id).same_as is None]
    shown = [row for place, row in enumerate(rows) if place < 3 or row.id == NONE]
    console.print(_correction_table(shown), highlight=False, markup=False)
    _paragraph(console, corrections.headline(made))


def print_corrections(made: Corrections, console: Console) -> None:
    """All of it: every correction, what to know, and each framework's setting."""
    from rich.text import Text

    title = Text("Corrections, previewed", "bold")
    title.append(f"  {line(made.rollout)} against {line(made.train)}")
    console.print(title, highlight=False)
    _paragraph(console, corrections.LEAD, indent=0)
    _say(console, "")
    rows = corrections.correction_rows(made)
    console.print(_correction_table(rows), highlight=False, markup=False)
    _say(console, "")
    _paragraph(console, corrections.headline(made), indent=0, style="bold")
    for remark in corrections.remarks(made):
        _paragraph(console, f"- {remark}")
    _heading(console, "What each does")
    for row in rows:
        if row.setting:
            _paragraph(console, f"- {row.label}: {row.setting}; weights {row.weights}")
    recipes = corrections.setting_recipes(made)
    if recipes:
        _heading(console, "How to switch it on", corrections.setting_title(made))
    for recipe in recipes:
        remark = f" ({recipe.remark})" if recipe.remark else ""
        _paragraph(console, f"- {recipe.framework}{remark}; {recipe.source}")
        for text in recipe.lines:
            _say(console, f"      {text}")


def _correction_table(rows: list[corrections.CorrectionRow]) -> Table:
    table = _columns(
        ("", False, 0), ("rank", True, 0), ("error", True, 0), ("kept", True, 0),
        ("ESS", True, 0), ("bias, 95 % interval", True, 0), ("cosine", True, 0),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"  {row.label}", row.rank, row.error, row.kept, row.ess, row.interval, row.cosine
        )
    return table


def _budget(report: Report, console: Console) -> None:
    rows = budget.steps(report)
    if len(rows) < 3:  # a chain of one step is the headline itself
        return
    _heading(console, "Error budget", "engine to trainer; mean delta and shares add up")
    table = _columns(
        ("", False, 26), ("mean delta", True, 8), ("of the spread", True, 8), ("interval", True, 8)
    )
    for row in rows:
        table.add_row(f"  {row.label}", row.mean, row.share, row.share_interval)
    console.print(table, highlight=False, markup=False)


def _two_passes(report: Report, console: Console) -> None:
    made = report.two_passes
    if made is None:
        return
    _heading(console, two_passes.TITLE, "PPO's ratio with the same weights; on-policy it is 1")
    if injected := two_passes.injected(made):
        _paragraph(console, f"! {injected}", style="yellow")
    for sentence in two_passes.sentences(made):
        _paragraph(console, f"- {sentence}")


def _forecast(report: Report, console: Console) -> None:
    said = forecast.sentences(report)
    if not said:
        return
    _heading(console, "At a longer response", "importance weights, extrapolated from these tokens")
    for sentence in said:
        _paragraph(console, sentence)


def _what_ran(report: Report, console: Console) -> None:
    from rich.table import Table

    comparison = summary.headline(report)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("What ran", line(comparison.rollout), line(comparison.train)):
        table.add_column(title)
    for aspect, left, right in sides.what_ran(report):
        table.add_row(f"  {aspect}", left, right)
    _say(console, "")
    console.print(table, highlight=False, markup=False)


def _checks(report: Report, console: Console) -> None:
    if summary.checks(report, "failed", "warning", "passed"):
        _heading(console, "Checks", "do both sides speak of the same thing?")
    for check in summary.checks(report, "failed", "warning"):
        mark, style = ("✕", "bold red") if check.status == "failed" else ("!", "yellow")
        _paragraph(console, f"{mark} {line(check.id)}: {line(check.detail)}", style=style)
        if check.fix:
            _paragraph(console, f"fix: {line(check.fix)}", indent=4)
    passed = summary.checks(report, "passed")
    if passed:
        names = ", ".join(line(check.id) for check in passed)
        _paragraph(console, f"{quantities.count(len(passed))} passed: {names}")
    reasons = summary.untested(report)
    if reasons:
        _heading(console, "Not tested")
    for reason in reasons:
        _paragraph(console, f"- {reason}", style="dim")


def _next(report: Report, console: Console) -> None:
    _heading(console, "Next")
    for step in summary.next_steps(report):
        _paragraph(console, f"- {step}")
