"""What a chat template does to the tokens of earlier turns, and what avoids it."""

from __future__ import annotations

from mismatch.prompts.template import Change, TemplateCheck, TemplateReport
from mismatch.reports.formatting import count, line, percent, plural, text, token_text
from mismatch.reports.section import Block, Cell, Column, Section, Table

COLUMNS = (Column("check", text), Column("result", text), Column("what was seen", text))
TURNS = (
    Column("turn", count),
    Column("prompt", count),
    Column("sampled", count, detail="in the loss"),
    Column("added after", count, detail="by the template, not in the loss"),
    Column("text of these", text),
)
MEANING = {
    "append-only": "rendering a later turn begins with other ids than were sampled and prompted",
    "generation-prompt": "asked for an answer, the template leaves out what stands before one",
    "end-of-turn": "an answer ends with another token than the engine stops at",
    "reasoning-kept": "the reasoning of an earlier turn is dropped",
    "white-space-kept": "spaces or line ends of a message change",
    "tool-call-kept": "the arguments of a call are written anew",
    "tool-output-kept": "what a tool returned is cut or trimmed",
    "text-round-trip": "text is other text, or other ids, after encode and decode",
    "loss-mask": "{% generation %} marks other tokens than are sampled",
}
PASSED = {
    "append-only": "every turn begins with the ids of the turn before",
    "generation-prompt": "what stands before an answer is there when one is asked for",
    "end-of-turn": "the end token is one at which the engine stops",
    "reasoning-kept": "still there in the next turn",
    "white-space-kept": "as it was given",
    "tool-call-kept": "as the model wrote it",
    "tool-output-kept": "as the tool returned it",
    "text-round-trip": "the same text, the same ids",
    "loss-mask": "exactly the sampled tokens",
}
CURE = (
    "verl   multi_turn.tokenization_sanity_check_mode=strict, an agent loop",
    "TRL    trl.chat_template_utils.get_training_chat_template(tokenizer)",
    "SkyRL  generator.use_conversation_multi_turn=true, without a chat_template",
    "slime  --custom-generate-function-path: append ids, loss_mask 0 for tools",
)
TONES = {"passed": "healthy", "failed": "critical", "not_tested": ""}


def shown(report: TemplateReport) -> Section:
    """The checks of one template, its turns, and what to do where one fails."""
    failed = [check for check in report.checks if check.status == "failed"]
    names = sorted({check.id for check in failed})
    verdict = (
        f"{plural(len(names), 'property')} of {len({c.id for c in report.checks})} not kept: "
        f"{', '.join(names)}"
        if names
        else "Later turns keep the tokens of earlier ones in every check that could be made"
    )
    rows = tuple(
        (check.id, Cell(check.status.replace("_", " "), TONES[check.status]), _seen(check))  # type: ignore[arg-type]
        for check in report.checks
    )
    turns = tuple(
        (number, turn.prompt, turn.sampled, turn.boundary, token_text(turn.boundary_text))
        for number, turn in enumerate(report.turns, 1)
    )
    added = next((turn.boundary_text for turn in report.turns if turn.boundary), "")
    changed = percent(report.pairs_changed / report.pairs) if report.pairs else ""
    return Section(
        id="template",
        title=f"Chat template of {line(report.model)}",
        lead="A trainer that renders a conversation again scores what was sampled only where the "
        "template and the tokenizer give the same ids back.",
        sentences=(
            verdict,
            f"After the end token the template adds {token_text(added)}: a loop that appends ids "
            "has to append it too, without loss"
            if added
            else "",
            f"Of {count(report.pairs)} random pairs of tokens {changed} are other tokens after "
            "decode and encode: ids that were sampled are kept, never made again from text",
        ),
        tables=(Table(COLUMNS, rows), Table(TURNS, turns)),
        blocks=(Block("Keep ids from turn to turn:", CURE),) if failed else (),
        short=verdict,
    )


def _seen(check: TemplateCheck) -> str:
    if check.status == "not_tested":
        return check.reason
    words = MEANING[check.id] if check.status == "failed" else PASSED[check.id]
    where = f"{token_text(check.where)}: " if check.where else ""
    return f"{where}{words}{_change(check.change)}"


def _change(change: Change | None) -> str:
    if change is None:
        return ""
    return (
        f". Turn {change.turn}, id {change.position}: "
        f"{change.expected} “{token_text(change.expected_text)}” became "
        f"{change.got} “{token_text(change.got_text)}”"
    )
