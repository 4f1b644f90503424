"""What a chat template does to the tokens of earlier turns, and what avoids it."""

from __future__ import annotations

from mismatch.prompts.template import Status, TemplateCheck, TemplateReport
from mismatch.reports.formatting import count, line, percent, plural, text, token_text, wording
from mismatch.reports.section import Block, Cell, Column, Section, Table, status_cell

CHECKS = (
    Column("check", text, of="id"),
    Column("result", text, of=lambda check: _result(check.status)),
    Column("what was seen", text, of=lambda check: _seen(check)),
)
TURNS = (
    Column("turn", count),
    Column("prompt", count),
    Column("sampled", count, detail="in the loss"),
    Column("added after", count, detail="by the template, not in the loss"),
    Column("text of these", text),
)


def shown(report: TemplateReport) -> Section:
    """The checks of one template, its turns, and what to do where one fails."""
    failed = sorted({check.id for check in report.checks if check.status == "failed"})
    verdict = "Later turns keep the tokens of earlier ones in every check that could be made"
    if failed:
        of = len({check.id for check in report.checks})
        verdict = f"{plural(len(failed), 'property')} of {of} not kept: {', '.join(failed)}"
    turns = [
        (number, turn.prompt, turn.sampled, turn.boundary, token_text(turn.boundary_text))
        for number, turn in enumerate(report.turns, 1)
    ]
    added = next((turn.boundary_text for turn in report.turns if turn.boundary), "")
    changed = percent(report.pairs_changed / report.pairs) if report.pairs else ""
    cure = Block("Keep ids from turn to turn:", wording("cure")["lines"])
    return Section(
        "template",
        f"Chat template of {line(report.model)}",
        "A trainer that renders a conversation again scores what was sampled only where the "
        "template and the tokenizer give the same ids back.",
        sentences=[
            verdict,
            added
            and f"After the end token the template adds {token_text(added)}: a loop that "
            "appends ids has to append it too, without loss",
            f"Of {count(report.pairs)} random pairs of tokens {changed} are other tokens after "
            "decode and encode: ids that were sampled are kept, never made again from text",
        ],
        tables=[Table.of(CHECKS, report.checks), Table(TURNS, turns)],
        blocks=[cure] if failed else (),
        short=verdict,
    )


def _result(status: Status) -> Cell:
    return Cell("not tested") if status == "not_tested" else status_cell(status)


def _seen(check: TemplateCheck) -> str:
    if check.status == "not_tested":
        return check.reason
    where = f"{token_text(check.where)}: " if check.where else ""
    words = f"{where}{wording('template')[check.id][check.status == 'passed']}"
    change = check.change
    if change is None:
        return words
    return (
        f"{words}. Turn {change.turn}, id {change.position}: "
        f"{change.expected} “{token_text(change.expected_text)}” became "
        f"{change.got} “{token_text(change.got_text)}”"
    )
