"""Check that a chat template keeps the tokens of a conversation as it grows.

An engine samples turn n from the ids of the turns before. A trainer that renders the conversation
again scores those ids only where rendering and tokenising give them back. Every check renders
small conversations through the tokenizer itself; no model, engine or GPU is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from mismatch.errors import MismatchError, first_line
from mismatch.prompts.environments import function_tool

Message = dict[str, Any]
Status = Literal["passed", "failed", "not_tested"]

SHOWN = 8  # ids of a change on each side
LONG = 20_000  # characters of a tool's output: more than templates cut to (4,000 was seen)
THOUGHT = "First I add 12 and 30"
SPACED = "  two spaces, a tab\there\n\n  and a separate line \n"
ARGUMENTS = '{"expression":  "12+ 30"}'  # two spaces: what a model may well write
TOOL = function_tool("calculator", "expression", "Evaluates an expression.")
CALL = {"name": "calculator", "arguments": ARGUMENTS}
OUTPUT = {"role": "tool", "tool_call_id": "call00001"}
ANSWER = "It is 42."
DIALOGUE = (
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "And times 2?"},
    {"role": "assistant", "content": "That gives 84."},
    {"role": "user", "content": "Thank you. And minus 4?"},
)
QUESTION, NEXT_QUESTION = DIALOGUE[0], DIALOGUE[2]


def answered(content: str, **more: Any) -> tuple[Message, Message]:
    """Return the first question with this answer."""
    return QUESTION, {"role": "assistant", "content": content, **more}


CALLED = answered("", tool_calls=[{"id": "call00001", "type": "function", "function": CALL}])


@dataclass(frozen=True)
class Change:
    """Where rendered ids differ from those that they should begin with: some ids from there on."""

    turn: int
    position: int
    expected: list[int]
    got: list[int]
    expected_text: str
    got_text: str


@dataclass(frozen=True)
class TemplateCheck:
    """One property of a template."""

    id: str
    status: Status
    where: str = ""
    """The part of a conversation: a role, or the form of the reasoning."""
    reason: str = ""
    """Why it was not tested."""
    change: Change | None = None
    """The ids that differ, where ids are compared."""


@dataclass(frozen=True)
class TemplateReport:
    """What a model's template does."""

    model: str
    stop_ids: list[int]
    checks: list[TemplateCheck]
    after_end: str
    """What the template adds after the end token of an answer; it is not sampled."""

    @property
    def failed(self) -> bool:
        return any(check.status == "failed" for check in self.checks)


class Refused(Exception):
    """The template does not take these messages."""


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with its template, and the ids at which the engine stops."""

    tokenizer: Any
    stop_ids: frozenset[int]

    def ids(self, messages: Sequence[Message], *, ask: bool = False, **more: Any) -> list[int]:
        """Return rendered messages; with ``ask`` also what comes before an answer.

        Raises:
            Refused: the template raises.
        """
        given = {"tokenize": True, "return_dict": False, "add_generation_prompt": ask}
        try:
            return list(self.tokenizer.apply_chat_template(list(messages), **given, **more))
        except Exception as error:  # a template raises whatever it likes
            raise Refused(first_line(error)) from error

    def text(self, ids: Sequence[int]) -> str:
        given = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **given))

    def sampled(self, prompt: Sequence[int], answered: Sequence[int]) -> list[int]:
        """Return what the engine samples of a rendered answer: up to the id at which it stops."""
        answer = list(answered[len(prompt) :])
        ends = [index for index, token in enumerate(answer) if token in self.stop_ids]
        return answer[: ends[0] + 1] if ends else answer

    def change(self, turn: int, expected: Sequence[int], got: Sequence[int]) -> Change | None:
        """Return where ``got`` does not begin with ``expected``; None where it does."""
        pairs = zip(expected, got, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same == len(expected):
            return None
        old, new = (list(ids[same : same + SHOWN]) for ids in (expected, got))
        return Change(turn, same, old, new, self.text(old), self.text(new))


def examine(model: str, tokenizer: Any, stop_ids: Sequence[int] = ()) -> TemplateReport:
    """Run every check with one tokenizer.

    Args:
        model: its name in the report.
        stop_ids: at which the engine ends an answer.

    Raises:
        MismatchError: no template, or one that refuses a question and its answer.
    """
    if not tokenizer.chat_template:
        fault = f"{model}: the tokenizer has no chat template"
        raise MismatchError(fault, "give a chat model, or --chat-template FILE")
    render = Renderer(tokenizer, frozenset(stop_ids))
    try:
        prompt, answered = render.ids(DIALOGUE[:1], ask=True), render.ids(DIALOGUE[:2])
    except Refused as error:
        fault = f"{model}: the chat template refuses a question and its answer: {error}"
        fix = "look at its roles; --chat-template FILE tries another"
        raise MismatchError(fault, fix) from error
    checks = [append_only(render), generation_prompt(render), end_of_turn(render)]
    for wanted in KEPT:
        try:
            checks.append(kept(wanted, render))
        except Refused as error:
            reason = f"the template refuses it: {error}"
            checks.append(TemplateCheck(wanted.id, "not_tested", wanted.where, reason))
    sampled = render.sampled(prompt, answered)
    after_end = render.text(answered[len(prompt) + len(sampled) :])
    return TemplateReport(model, sorted(stop_ids), checks, after_end)


# ---------------------------------------------------------------- checks


def append_only(render: Renderer) -> TemplateCheck:
    """Turn n + 1 must begin with the ids of turn n, those that were sampled among them."""
    for turn in (1, 2):
        prompt = render.ids(DIALOGUE[: 2 * turn - 1], ask=True)
        answered = render.ids(DIALOGUE[: 2 * turn])
        kept = prompt + render.sampled(prompt, answered)
        grown = render.ids(DIALOGUE[: 2 * turn + 1], ask=True)
        change = render.change(turn, prompt, answered) or render.change(turn, kept, grown)
        if change is not None:
            return TemplateCheck("append-only", "failed", change=change)
    return TemplateCheck("append-only", "passed")


def generation_prompt(render: Renderer) -> TemplateCheck:
    """Asked for an answer, the template must write what comes before one, if anything does."""
    prompt = render.ids(DIALOGUE[:1], ask=True)
    between = render.ids(DIALOGUE[:2])[len(prompt) :]
    header = render.text(between).partition(ANSWER)[0]
    if prompt != render.ids(DIALOGUE[:1]) or not header.strip():
        return TemplateCheck("generation-prompt", "passed")
    ids = between[:SHOWN]
    change = Change(1, len(prompt), ids, [], render.text(ids), "")
    return TemplateCheck("generation-prompt", "failed", change=change)


def end_of_turn(render: Renderer) -> TemplateCheck:
    """Check that an answer holds a token at which the engine stops."""
    prompt = render.ids(DIALOGUE[:1], ask=True)
    answer = render.ids(DIALOGUE[:2])[len(prompt) :]
    if not render.stop_ids:
        reason = "the model names no end token"
        return TemplateCheck("end-of-turn", "not_tested", reason=reason)
    if not render.stop_ids.isdisjoint(answer):
        return TemplateCheck("end-of-turn", "passed")
    stop, last = sorted(render.stop_ids)[:SHOWN], answer[-2:]
    change = Change(1, len(prompt), stop, last, render.text(stop), render.text(last))
    return TemplateCheck("end-of-turn", "failed", change=change)


@dataclass(frozen=True)
class Kept:
    """A text of a message that the rendered conversation must show as it was given."""

    id: str
    where: str
    text: str
    conversation: tuple[Message, ...]
    """Where it ends with an answer, it is also rendered with another question after it."""
    sign: str = ""
    """A text without which the template does not show this kind of message at all."""


KEPT = (
    *(
        Kept("reasoning-kept", form, THOUGHT, answered(content, **field), sign=THOUGHT)
        for form, content, field in (
            ("reasoning_content", ANSWER, {"reasoning_content": THOUGHT}),
            ("thinking", ANSWER, {"thinking": THOUGHT}),
            ("<think> in the text", f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}", {}),
        )
    ),
    Kept("white-space-kept", "assistant", SPACED, answered(SPACED)),
    Kept("white-space-kept", "user", SPACED, ({"role": "user", "content": SPACED},)),
    Kept("tool-call-kept", "", ARGUMENTS, CALLED, sign="calculator"),
    *(
        Kept("tool-output-kept", where, output, (*CALLED, {**OUTPUT, "content": output}))
        for where, output in (("long", "0123456789" * (LONG // 10)), ("spaces", SPACED))
    ),
)


def kept(wanted: Kept, render: Renderer) -> TemplateCheck:
    """Look for the text in the rendered conversation."""
    tools = [TOOL] if wanted.id.startswith("tool-") else None
    conversation = wanted.conversation
    shown = [render.text(render.ids(conversation, tools=tools))]
    last = conversation[-1]
    if last["role"] == "assistant" and "tool_calls" not in last:  # a call awaits its output
        shown.append(render.text(render.ids((*conversation, NEXT_QUESTION), tools=tools)))
    if wanted.sign:
        without = render.text(render.ids(conversation[:1], tools=tools))
        if all(text.count(wanted.sign) <= without.count(wanted.sign) for text in shown):
            reason = "the template does not show it"
            return TemplateCheck(wanted.id, "not_tested", wanted.where, reason)
    status: Status = "passed" if all(wanted.text in text for text in shown) else "failed"
    return TemplateCheck(wanted.id, status, wanted.where)
