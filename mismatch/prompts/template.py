"""Whether a chat template and its tokenizer keep the tokens of a conversation as it grows.

An engine samples turn n from the ids of the turns before. A trainer that renders the conversation
again scores those ids only where rendering and tokenising give them back. Every check renders
small conversations through the tokenizer itself; no model, engine or GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from mismatch.errors import MismatchError, first_line

Message = dict[str, Any]
Status = Literal["passed", "failed", "not_tested"]

SHOWN = 8  # ids of a change on each side
PAIRS = 2000  # random pairs of tokens that are decoded and encoded again
LONG = 20_000  # characters of a tool's output
QUESTIONS = ("What is 12 + 30?", "And times 2?", "Thank you. And minus 4?")
ANSWERS = ("It is 42.", "That gives 84.")
THOUGHT = "First I add 12 and 30"
SPACED = "  two spaces, a tab\there\n\n  and a line of its own \n"
ARGUMENTS = '{"expression":  "12+ 30"}'  # two spaces: what a model may well write
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
THINKING: dict[str, Message] = {
    "reasoning_content": {"reasoning_content": THOUGHT, "content": ANSWERS[0]},
    "thinking": {"thinking": THOUGHT, "content": ANSWERS[0]},
    "<think> in the text": {"content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWERS[0]}"},
}
TEXTS = (
    "Plain words, and a number: 1234567.",
    " a leading space\n\n\ttabs and lines \n",
    "def f(x):\n    return x ** 2  # code",
    "naïve café, 数学 и 🙂👩‍👩‍👧",
    "don 't , do n't . ' s",
)


@dataclass(frozen=True)
class Change:
    """Where rendered ids part from those that they should begin with.

    Attributes:
        turn: from 1.
        position: of the first id that differs.
        expected: some ids from there on, as they were sampled or rendered before.
        got: the ids that stand there now.
    """

    turn: int
    position: int
    expected: list[int]
    got: list[int]
    expected_text: str
    got_text: str


@dataclass(frozen=True)
class TemplateCheck:
    """One property of a template.

    Attributes:
        id: a key of :data:`CHECKS`.
        where: the part of a conversation in which it fails: a role, or the form of the reasoning.
        reason: why it was not tested.
        change: the ids that differ, where ids are compared.
    """

    id: str
    status: Status
    where: str = ""
    reason: str = ""
    change: Change | None = None


@dataclass(frozen=True)
class Turn:
    """Tokens of one turn.

    Attributes:
        sampled: that the engine samples, its end token among them: those in the loss.
        boundary: that the template adds after them, before the next message: not in the loss.
    """

    prompt: int
    sampled: int
    boundary: int
    boundary_text: str


@dataclass(frozen=True)
class TemplateReport:
    """What a model's template and tokenizer do.

    Attributes:
        pairs_changed: of ``pairs`` random pairs of tokens, how many are other tokens after decode
            and encode. Every tokenizer of subwords has some.
        example: the ids of one such pair, and what they became.
    """

    model: str
    stop_ids: list[int]
    checks: list[TemplateCheck]
    turns: list[Turn]
    pairs: int = 0
    pairs_changed: int = 0
    example: list[list[int]] = field(default_factory=list)

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
        """Rendered messages; ``ask``: with what stands before an answer.

        Raises:
            Refused: the template raises.
        """
        try:
            return list(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    add_generation_prompt=ask,
                    tokenize=True,
                    return_dict=False,
                    **more,
                )
            )
        except Exception as error:  # a template raises whatever it likes
            raise Refused(first_line(error)) from error

    def text(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def change(self, turn: int, expected: Sequence[int], got: Sequence[int]) -> Change | None:
        """None where ``got`` begins with ``expected``."""
        pairs = zip(expected, got, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same == len(expected):
            return None
        old, new = (list(ids[same : same + SHOWN]) for ids in (expected, got))
        return Change(turn, same, old, new, self.text(old), self.text(new))

    def sampled(self, prompt: Sequence[int], answered: Sequence[int]) -> list[int]:
        """What the engine samples of a rendered answer: up to the id at which it stops."""
        answer = list(answered[len(prompt) :])
        ends = [index for index, token in enumerate(answer) if token in self.stop_ids]
        return answer[: ends[0] + 1] if ends else answer


# ---------------------------------------------------------------- checks


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _dialogue(turns: int) -> list[Message]:
    """Questions and answers, ending with the question of turn ``turns``."""
    pairs = zip(QUESTIONS, ANSWERS, strict=False)
    messages = [message for q, a in pairs for message in (_user(q), _assistant(a))]
    return [*messages, _user(QUESTIONS[2])][: 2 * turns - 1]


def append_only(render: Renderer) -> Iterator[TemplateCheck]:
    """Rendering turn n + 1 keeps the ids of turn n, those that were sampled among them."""
    for turn in (1, 2):
        asked, grown = _dialogue(turn), _dialogue(turn + 1)
        prompt = render.ids(asked, ask=True)
        answered = render.ids(grown[: 2 * turn])
        change = render.change(turn, prompt, answered)
        if change is None:
            kept = prompt + render.sampled(prompt, answered)
            change = render.change(turn, kept, render.ids(grown, ask=True))
        if change is not None:
            yield TemplateCheck("append-only", "failed", change=change)
            return
    yield TemplateCheck("append-only", "passed")


def generation_prompt(render: Renderer) -> Iterator[TemplateCheck]:
    """Asked for an answer, a template adds something, unless nothing stands before one."""
    prompt = render.ids(_dialogue(1), ask=True)
    between = render.ids(_dialogue(2)[:2])[len(prompt) :]
    header = render.text(between).partition(ANSWERS[0])[0]
    if prompt != render.ids(_dialogue(1)) or not header.strip():
        yield TemplateCheck("generation-prompt", "passed")
        return
    ids = between[:SHOWN]
    change = Change(1, len(prompt), ids, [], render.text(ids), "")
    yield TemplateCheck("generation-prompt", "failed", change=change)


def end_of_turn(render: Renderer) -> Iterator[TemplateCheck]:
    """An answer is closed by a token at which the engine stops."""
    asked = _dialogue(1)
    prompt = render.ids(asked, ask=True)
    answer = render.ids(_dialogue(2)[:2])[len(prompt) :]
    if not render.stop_ids:
        yield TemplateCheck("end-of-turn", "not_tested", reason="the model names no end token")
    elif render.stop_ids.isdisjoint(answer):
        stop = sorted(render.stop_ids)[:SHOWN]
        last = answer[-2:]
        change = Change(1, len(prompt), stop, last, render.text(stop), render.text(last))
        yield TemplateCheck("end-of-turn", "failed", change=change)
    else:
        yield TemplateCheck("end-of-turn", "passed")


def reasoning_kept(render: Renderer) -> Iterator[TemplateCheck]:
    """What the model thought in an earlier turn is still there in a later one."""
    understood = False
    for form, fields in THINKING.items():
        answer = {"role": "assistant", **fields}
        now = render.text(render.ids([_user(QUESTIONS[0]), answer]))
        later = render.text(render.ids([_user(QUESTIONS[0]), answer, _user(QUESTIONS[1])]))
        if THOUGHT in now or THOUGHT in later:
            understood = True
            kept = THOUGHT in now and THOUGHT in later
            yield TemplateCheck("reasoning-kept", "passed" if kept else "failed", where=form)
    if not understood:
        why = "the template shows no reasoning in any of the usual forms"
        yield TemplateCheck("reasoning-kept", "not_tested", reason=why)


def white_space_kept(render: Renderer) -> Iterator[TemplateCheck]:
    """Messages keep their spaces and line ends."""
    answered = [_user(QUESTIONS[0]), _assistant(SPACED)]
    for role, messages in (
        ("assistant", answered),
        ("assistant, earlier turn", [*answered, _user(QUESTIONS[1])]),
        ("user", [_user(SPACED)]),
    ):
        kept = SPACED in render.text(render.ids(messages))
        yield TemplateCheck("white-space-kept", "passed" if kept else "failed", where=role)


def _called() -> list[Message]:
    function = {"name": "calculator", "arguments": ARGUMENTS}
    call = {"id": "call00001", "type": "function", "function": function}
    return [_user(QUESTIONS[0]), {"role": "assistant", "content": "", "tool_calls": [call]}]


def tool_call_kept(render: Renderer) -> Iterator[TemplateCheck]:
    """The arguments of a call stand as the model wrote them."""
    text = render.text(render.ids(_called(), tools=[TOOL]))
    if "calculator" not in text.replace(render.text(render.ids(_called()[:1], tools=[TOOL])), ""):
        why = "the template does not show calls of tools"
        yield TemplateCheck("tool-call-kept", "not_tested", reason=why)
        return
    yield TemplateCheck("tool-call-kept", "passed" if ARGUMENTS in text else "failed")


def tool_output_kept(render: Renderer) -> Iterator[TemplateCheck]:
    """What a tool returns is neither cut nor trimmed."""
    for where, output in (("long", "0123456789" * (LONG // 10)), ("spaces", SPACED)):
        answer = {"role": "tool", "tool_call_id": "call00001", "content": output}
        text = render.text(render.ids([*_called(), answer], tools=[TOOL], ask=True))
        status: Status = "passed" if output in text else "failed"
        yield TemplateCheck("tool-output-kept", status, where=where)


def text_round_trip(render: Renderer) -> Iterator[TemplateCheck]:
    """Text that is encoded and decoded is the same text, and then the same ids."""
    for text in TEXTS:
        ids = render.encode(text)
        again = render.encode(render.text(ids))
        if render.text(ids) != text:
            yield TemplateCheck("text-round-trip", "failed", where=text)
            return
        if again != ids:
            change = render.change(1, ids, again)
            yield TemplateCheck("text-round-trip", "failed", where=text, change=change)
            return
    yield TemplateCheck("text-round-trip", "passed")


def loss_mask(render: Renderer) -> Iterator[TemplateCheck]:
    """``{% generation %}`` marks exactly what is sampled, its end token among it."""
    if "generation %}" not in str(render.tokenizer.chat_template).replace("-%}", " %}"):
        why = "the template has no {% generation %} marks"
        yield TemplateCheck("loss-mask", "not_tested", reason=why)
        return
    asked, messages = _dialogue(1), _dialogue(2)[:2]
    encoded = render.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    prompt = render.ids(asked, ask=True)
    sampled = len(render.sampled(prompt, encoded["input_ids"]))
    wanted = [
        len(prompt) <= index < len(prompt) + sampled for index in range(len(encoded["input_ids"]))
    ]
    marked = [bool(each) for each in encoded["assistant_masks"]]
    if marked == wanted:
        yield TemplateCheck("loss-mask", "passed")
        return
    ids = np.asarray(encoded["input_ids"])
    old, new = (ids[mask].tolist() for mask in (wanted, marked))
    first = next(n for n, pair in enumerate(zip(wanted, marked, strict=True)) if len({*pair}) > 1)
    change = Change(1, first, old, new, render.text(old), render.text(new))
    yield TemplateCheck("loss-mask", "failed", change=change)


CHECKS: dict[str, Callable[[Renderer], Iterator[TemplateCheck]]] = {
    "append-only": append_only,
    "generation-prompt": generation_prompt,
    "end-of-turn": end_of_turn,
    "reasoning-kept": reasoning_kept,
    "white-space-kept": white_space_kept,
    "tool-call-kept": tool_call_kept,
    "tool-output-kept": tool_output_kept,
    "text-round-trip": text_round_trip,
    "loss-mask": loss_mask,
}


# ---------------------------------------------------------------- all of them


def examine(model: str, tokenizer: Any, stop_ids: Sequence[int] = ()) -> TemplateReport:
    """Every check of one tokenizer.

    Args:
        model: its name in the report.
        stop_ids: at which the engine ends an answer.

    Raises:
        MismatchError: no template, or one that refuses a question and its answer.
    """
    if not tokenizer.chat_template:
        raise MismatchError(
            f"{model}: the tokenizer has no chat template",
            "give a chat model, or --chat-template FILE",
        )
    render = Renderer(tokenizer, frozenset(stop_ids))
    try:
        turns = list(_turns(render))
    except Refused as error:
        raise MismatchError(
            f"{model}: the chat template refuses a question and its answer: {error}",
            "look at its roles; --chat-template FILE tries another",
        ) from error
    checks = [check for name in CHECKS for check in _checked(name, render)]
    changed, example = _pairs(render)
    return TemplateReport(model, sorted(stop_ids), checks, turns, PAIRS, changed, example)


def _checked(name: str, render: Renderer) -> list[TemplateCheck]:
    try:
        return list(CHECKS[name](render))
    except Refused as error:
        return [TemplateCheck(name, "not_tested", reason=f"the template refuses it: {error}")]


def _turns(render: Renderer) -> Iterator[Turn]:
    for turn in (1, 2):
        prompt = render.ids(_dialogue(turn), ask=True)
        answered = render.ids(_dialogue(turn + 1)[: 2 * turn])
        sampled = render.sampled(prompt, answered)
        rest = answered[len(prompt) + len(sampled) :]
        yield Turn(len(prompt), len(sampled), len(rest), render.text(rest))


def _pairs(render: Renderer) -> tuple[int, list[list[int]]]:
    """How many random pairs of ordinary tokens change by decode and encode, and the first."""
    special = set(render.tokenizer.all_special_ids)
    ordinary = [token for token in range(len(render.tokenizer)) if token not in special]
    draws = np.random.default_rng(0).choice(ordinary, (PAIRS, 2)).tolist()
    changed = [
        [pair, again] for pair in draws if (again := render.encode(render.text(pair))) != pair
    ]
    return len(changed), changed[0] if changed else []
