"""What answers a model between its turns: an environment, made anew for every sequence.

An environment is a class that is called with the :class:`Prompt` and has one method, ``reply``::

    class Echo:
        def __init__(self, prompt):
            self.prompt = prompt

        def reply(self, response: str) -> dict | None:
            return {"role": "user", "content": f"You said: {response}"}   # None: the sequence ends

A message of the role ``assistant`` goes on with the assistant's own message, without the template:
for environments with ``stop = ("</code>",)``, texts that end a response without an end token.
``before`` and ``after`` of a message stand around its content, and are not cut with it.

An environment that knows better than the prompt's answer has ``reward() -> float``; one that holds
something has ``close()``, which is called in the end whatever happened. Its output is data: a text
of a bounded length for the chat template, never run or imported.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, cast

import numpy as np

from mismatch.errors import MismatchError, named_line
from mismatch.models.resolved import special_texts
from mismatch.prompts.prompt import Prompt, grade
from mismatch.prompts.sandbox import run_code, unheld
from mismatch.prompts.tools import calculate, tool_call
from mismatch.types import Floats

Message = Mapping[str, Any]
REPLY_S = 60.0  # seconds that a reply may take
PATIENCE = 3  # replies that may take so long for nothing; then the others get less
LEAST_S = 1.0
INTERPRETER = {"before": "<interpreter>\n", "after": "\n</interpreter>"}
SEAM = "\ue000"  # of no script: private use
QUESTION, ANSWER = "a question", "mismatch-answer"


class Environment(Protocol):
    """One sequence's partner."""

    def __init__(self, prompt: Prompt) -> None: ...

    def reply(self, response: str) -> Message | None:
        """A message of the chat template after a response (with its special tokens), or None."""


class Retry:
    """Says that an answer is wrong until it is right; a prompt without an answer has one turn."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def reply(self, response: str) -> Message | None:
        """See the protocol."""
        if not self.prompt.gradable or grade(self.prompt, response, ()) == 1.0:
            return None
        return {"role": "user", "content": "That is not right. Try again."}


def function_tool(name: str, argument: str, description: str) -> dict[str, Any]:
    """A tool with one text argument, as chat templates take it."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class Tool:
    """Answers calls of one tool with one text argument; a response without a call ends it."""

    tool: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    argument: ClassVar[str]

    def __init__(self, prompt: Prompt) -> None: ...

    def reply(self, response: str) -> Message | None:
        """See the protocol. What is wrong with a call is said, as a tool would."""
        call = tool_call(response)
        if call is None:
            return None
        value = (call.arguments or {}).get(self.argument)
        if call.name != self.name:
            result = f"error: there is no tool {call.name[:40]!r}"
        elif not isinstance(value, str):
            result = f'error: the arguments are {{"{self.argument}": "..."}}'
        else:
            result = self.result(value)
        if call.form == "retool":
            return {"role": "user", "content": result.rstrip()} | INTERPRETER
        return {"role": "tool", "name": self.name, "content": result}

    def result(self, value: str) -> str:
        """What the tool gives for its argument."""
        raise NotImplementedError


class Calculator(Tool):
    """The tool ``calculator``, ``{"expression": "…"}``."""

    name, argument = "calculator", "expression"
    tool = function_tool(name, argument, "Work out a sum, such as 12 + 3 * 4.")

    def result(self, value: str) -> str:
        """The value, or what cannot be calculated."""
        return calculate(value)


class Python(Tool):
    """The tool ``python``, ``{"code": "…"}``; every call in a fresh process, see sandbox.py."""

    name, argument = "python", "code"
    tool = function_tool(name, argument, "Run Python code; the result is what it prints.")

    def result(self, value: str) -> str:
        """What the code writes, errors too, or what stopped it."""
        return run_code(value)

    @staticmethod
    def unheld() -> tuple[str, ...]:
        """What this machine does not keep from the code."""
        return unheld()


class Retool(Python):
    """ReTool's loop: a response ends at ``</code>`` and goes on behind what the code writes, in the
    form of slime's ``examples/retool`` (``execute_predictions``)."""

    stop = ("</code>",)
    instructions = (
        "You may write Python code between <code> and </code>. It is run, what it prints comes "
        "back between <interpreter> and </interpreter>, and you go on."
    )

    def reply(self, response: str) -> Message | None:
        """See the protocol."""
        message = super().reply(response)
        if message is None or not response.rstrip().endswith(self.stop):
            return message
        around = {"before": f"\n\n{INTERPRETER['before']}", "after": f"{INTERPRETER['after']}\n\n"}
        return {**message, "role": "assistant"} | around


BUILT_IN: dict[str, type[Environment]] = {
    "retry": Retry,
    "calculator": Calculator,
    "python": Python,
    "retool": Retool,
}


def built_in(name: str) -> type[Environment] | None:
    """A shipped environment; None: the name is ``package.module:Class``.

    Raises:
        MismatchError: neither.
    """
    if ":" in name:
        return None
    if name not in BUILT_IN:
        raise MismatchError(
            f"--environment {name}: there is none of that name",
            f"one of {', '.join(BUILT_IN)}, or your own: package.module:Class",
        )
    return BUILT_IN[name]


def offered(name: str | None, prompt: Prompt) -> Prompt:
    """A conversation with what a shipped environment offers: its tool, or how it is told of."""
    kind = BUILT_IN.get(name or "")
    if prompt.messages is None or kind is None or not issubclass(kind, Tool):
        return prompt
    if not issubclass(kind, Retool):
        return replace(prompt, tools=[kind.tool])
    first, *rest = prompt.messages
    if any("<code>" in str(message.get("content")) for message in prompt.messages):
        return prompt
    return replace(
        prompt, messages=[{**first, "content": f"{kind.instructions}\n\n{first['content']}"}, *rest]
    )


def between_turns(tokenizer: Any, message: Message, stop_ids: Sequence[int]) -> list[int]:
    """Ids from the end of an assistant's turn to the start of its next one, with a message.

    Rendered as text after a known answer (a call, before a tool's message) and encoded alone, so
    that no id before it can change.
    What the template puts after the token that ends a turn (a line break) is part of it. The
    message's text is data: where it spells a control token, its characters are encoded.

    Raises:
        MismatchError: the template refuses the message, or drops the answer before it.
    """
    messages = [
        {"role": "user", "content": QUESTION},
        _answer_before(message),
        {**message, "content": with_seams(tokenizer, message["content"])},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template raises whatever it likes
        raise MismatchError(
            f"the chat template refuses the environment's message: {named_line(error)}",
            "see which roles it knows: mismatch template --model MODEL",
        ) from error
    _, mark, tail = text.rpartition(ANSWER)
    if not mark:
        raise MismatchError(
            "the chat template drops the answer before an observation",
            "see what it keeps: mismatch template --model MODEL",
        )
    ends = [tokenizer.decode([token]) for token in stop_ids]
    places = [(tail.index(end), end) for end in ends if end and end in tail]
    if places:
        start, end = min(places)
        tail = tail[start + len(end) :]
    return encoded(tokenizer, tail)


def _answer_before(message: Message) -> Message:
    """What a message replies to: the call of a tool, before its message, else an answer."""
    if message.get("role") != "tool":
        return {"role": "assistant", "content": ANSWER}
    function = {"name": message.get("name", "calculator"), "arguments": {"expression": ANSWER}}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def with_seams(tokenizer: Any, text: str) -> str:
    """A text with a seam inside whatever the tokenizer would read as a control token."""
    text = text.replace(SEAM, "")
    for mark in special_texts(tokenizer):
        text = text.replace(mark, mark[0] + SEAM + mark[1:])
    return text


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text whose pieces between seams are encoded alone."""
    pieces = (tokenizer(piece, add_special_tokens=False) for piece in text.split(SEAM) if piece)
    return [int(token) for piece in pieces for token in piece["input_ids"]]


@dataclass
class Replies:
    """Replies to all sequences of a rollout, as ids.

    Attributes:
        prompts: of every sequence, N.
        max_tokens: of an observation's content; the rest is cut off.
        ended: reason -> sequences that an environment's failure ended.
        cut: observations that were longer than ``max_tokens``.
        no_rewards: why the environments gave none; "": they did, or have none.
        slowest: seconds of the slowest reply that came.
    """

    kind: Callable[[Prompt], Environment]
    prompts: Sequence[Prompt]
    tokenizer: Any
    stop_ids: Sequence[int]
    vocab_size: int
    max_tokens: int
    ended: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    no_rewards: str = ""
    slowest: float = 0.0
    _hung: int = 0
    _partners: dict[int, Environment] = field(default_factory=dict)

    def __call__(self, sequence: int, response: Sequence[int]) -> list[int] | None:
        """Ids between this response and the next; None: the sequence ends here.

        An environment that raises, hangs or gives no message ends its own sequence alone.
        """
        text = self.tokenizer.decode(list(response), skip_special_tokens=False)
        try:
            message = self._in_time(lambda: self._partner(sequence).reply(text))
            return None if message is None else self._encoded(message, response)
        except Exception as error:  # whatever a user's class raises
            self.ended[named_line(error)] += 1
            return None

    def _in_time(self, function: Callable[[], Any]) -> Any:
        """The function's result. Where ``PATIENCE`` calls hung, a call gets twice as long as the
        slowest one took, so that an environment that always hangs does not take hours."""
        patient = self._hung < PATIENCE
        seconds = REPLY_S if patient else min(REPLY_S, max(LEAST_S, 2 * self.slowest))
        start = time.monotonic()
        try:
            result = _in_time(function, seconds)
        except Hung:
            self._hung += 1
            raise
        self.slowest = max(self.slowest, time.monotonic() - start)
        return result

    def _partner(self, sequence: int) -> Environment:
        if sequence not in self._partners:
            self._partners[sequence] = self.kind(self.prompts[sequence])
        return self._partners[sequence]

    def _encoded(self, message: Message, response: Sequence[int]) -> list[int]:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise TypeError(f"a reply is a message with a text, not {type(message).__name__}")
        text = message["content"]
        content = encoded(self.tokenizer, with_seams(self.tokenizer, text))
        if len(content) > self.max_tokens:
            self.cut += 1
            text = self.tokenizer.decode(content[: self.max_tokens])
        text = f"{message.get('before', '')}{text}{message.get('after', '')}"
        if message.get("role") == "assistant":
            if response[-1] in self.stop_ids:
                raise ValueError("the assistant's message has ended: a reply cannot go on with it")
            ids = encoded(self.tokenizer, with_seams(self.tokenizer, text))
        else:
            ids = between_turns(self.tokenizer, {**message, "content": text}, self.stop_ids)
        if max(ids, default=0) >= self.vocab_size:
            raise ValueError(f"id {max(ids)} is outside the vocabulary of {self.vocab_size}")
        return ids

    def rewards(self) -> Floats | None:
        """What the environments themselves say, [N]; None: they say nothing, or one of them fails.

        A failure is kept in ``no_rewards``.
        """
        if not hasattr(self.kind, "reward"):
            return None
        try:
            rewards = [
                float(self._in_time(cast(Any, self._partner(sequence)).reward))
                for sequence in range(len(self.prompts))
            ]
        except Exception as error:  # whatever a user's class raises
            self.no_rewards = named_line(error)
            return None
        return np.asarray(rewards, np.float64)

    def close(self) -> None:
        """Let every environment that was begun close what it holds, also those that failed.

        What cannot be closed is said in the log.
        """
        for partner in (*self._partners.values(), self.kind):
            name = "close_all" if partner is self.kind else "close"
            try:
                self._in_time(getattr(partner, name, lambda: None))
            except Exception as error:  # whatever a user's class raises
                print(f"an environment was not closed: {named_line(error)}", file=sys.stderr)
        self._partners.clear()


class Hung(TimeoutError):
    """A call did not return in its time."""


def _in_time(function: Callable[[], Any], seconds: float) -> Any:
    """The function's result; its thread is left behind where it takes longer.

    Raises:
        Hung: it took longer; else whatever it raises.
    """
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        value, error = results.get(timeout=seconds)
    except queue.Empty:
        raise Hung(f"no reply within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return value
