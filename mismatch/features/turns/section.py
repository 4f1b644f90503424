"""The checks of a chat template as a section, and what to do where one fails."""

from __future__ import annotations

from mismatch.features.turns.template import TemplateCheck, TemplateReport
from mismatch.reports.formatting import line, plural, text, token_text
from mismatch.reports.section import Block, Cell, Column, Section, Table, status_cell

CHECKS = (
    Column("check", text, of="id"),
    Column("result", text, of=lambda check: _result(check)),
    Column("what was seen", text, of=lambda check: _seen(check)),
)
WRONG = {
    "append-only": "a later turn begins with other ids than were prompted and sampled",
    "generation-prompt": "asked for an answer, the template leaves out what comes before one",
    "end-of-turn": "an answer ends with another token than the engine stops at",
    "reasoning-kept": "the reasoning of an earlier turn is dropped",
    "white-space-kept": "spaces or line ends of a message change",
    "tool-call-kept": "the arguments of a call are written in another form",
    "tool-output-kept": "what a tool returned is cut or trimmed",
}
CURE = (
    "verl   multi_turn.tokenization_sanity_check_mode=strict, an agent loop",
    "TRL    trl.chat_template_utils.get_training_chat_template(tokenizer)",
    "SkyRL  generator.use_conversation_multi_turn=true, without a chat_template",
    "slime  --custom-generate-function-path: append ids, loss_mask 0 for tools",
)


def shown(report: TemplateReport) -> Section:
    """Return the checks of one template, and how frameworks keep ids where one fails."""
    failed = sorted({check.id for check in report.checks if check.status == "failed"})
    verdict = "Later turns keep the tokens of earlier turns in every check that could be made"
    if failed:
        verdict = f"{plural(len(failed), 'property')} of {len(WRONG)} not kept: {', '.join(failed)}"
    added = report.after_end and (
        f"After the end token the template adds {token_text(report.after_end)}: a loop that "
        "appends ids has to append it too, without loss"
    )
    return Section(
        "template",
        f"Chat template of {line(report.model)}",
        "A trainer that renders a conversation again scores what was sampled only where the "
        "template and the tokenizer give the same ids back.",
        sentences=[verdict, added],
        tables=[Table.of(CHECKS, report.checks)],
        blocks=[Block("Keep ids from turn to turn:", CURE)] if failed else (),
        short=verdict,
    )


def _result(check: TemplateCheck) -> Cell:
    return Cell("not tested") if check.status == "not_tested" else status_cell(check.status)


def _seen(check: TemplateCheck) -> str:
    where = f"{token_text(check.where)}: " if check.where else ""
    if check.status != "failed":
        return f"{where}{check.reason or 'kept'}"
    change, words = check.change, f"{where}{WRONG[check.id]}"
    if change is None:
        return words
    return (
        f"{words}. Turn {change.turn}, id {change.position}: "
        f"{change.expected} “{token_text(change.expected_text)}” became "
        f"{change.got} “{token_text(change.got_text)}”"
    )
