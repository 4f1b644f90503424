"""The environment that replies to a model between its turns: one object for every sequence.

An environment is a class that is called with the :class:`Prompt` and has one method, ``reply``::

    class Echo:
        def __init__(self, prompt):
            self.prompt = prompt

        def reply(self, response: str) -> dict | None:
            return {"role": "user", "content": f"You said: {response}"}   # None: the sequence ends

Optional members of the class:

- ``stop = ("</code>",)``: texts that end a response without an end token. A reply of the role
  ``assistant`` then continues the same message, without the template. Its texts ``before`` and
  ``after`` surround the content and are not cut with it.
- ``prepare(prompt) -> Prompt`` (static): the prompt as the model sees it, for example with tools.
- ``reward(self) -> float``: replaces the reward by the prompt's answer.
- ``close(self)``: called at the end of the rollout, whatever happened.

What an environment returns is data: text of a bounded length for the chat template, never run.
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

from mismatch.errors import MismatchError, did_you_mean, named_line
from mismatch.models.tokenizers import special_texts
from mismatch.prompts.prompt import Prompt, grade
from mismatch.prompts.tools import calculate, tool_call
from mismatch.types import Floats

Message = Mapping[str, Any]
REPLY_S = 60.0  # seconds that one reply may take
# After this many replies that hung, a reply gets twice the time of the slowest one that came, and
# at least LEAST_S: an environment that always hangs must not cost a minute for every sequence.
PATIENCE = 3
LEAST_S = 1.0
SEAM = "\ue000"  # private use: no script and no template contains it
QUESTION, ANSWER = "a question", "mismatch-answer"


class Environment(Protocol):
    """The protocol of an environment; one object answers one sequence."""

    def __init__(self, prompt: Prompt) -> None: ...

    def reply(self, response: str) -> Message | None:
        """Return the message after a response (given with its special tokens), or None."""


class Retry:
    """Say that an answer is wrong until it is right; a prompt without an answer has one turn."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def reply(self, response: str) -> Message | None:
        """See :class:`Environment`."""
        if not self.prompt.gradable or grade(self.prompt, response, ()) == 1.0:
            return None
        return {"role": "user", "content": "That is not right. Try again."}


def function_tool(name: str, argument: str, description: str) -> dict[str, Any]:
    """Return the declaration of a tool with one text argument, as chat templates take it."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class Tool:
    """Answer calls of one tool with one text argument; a response without a call ends it."""

    tool: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    argument: ClassVar[str]

    def __init__(self, prompt: Prompt) -> None: ...

    @classmethod
    def prepare(cls, prompt: Prompt) -> Prompt:
        """Offer the tool in a conversation."""
        return prompt if prompt.messages is None else replace(prompt, tools=[cls.tool])

    def reply(self, response: str) -> Message | None:
        """See :class:`Environment`. The reply to a wrong call says what is wrong with it."""
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
        return {"role": "tool", "name": self.name, "content": result}

    def result(self, value: str) -> str:
        """Return what the tool answers to its argument."""
        raise NotImplementedError


class Calculator(Tool):
    """The tool ``calculator``, ``{"expression": "…"}``."""

    name, argument = "calculator", "expression"
    tool = function_tool(name, argument, "Work out a sum, such as 12 + 3 * 4.")

    def result(self, value: str) -> str:
        """Return the value, or what cannot be calculated."""
        return calculate(value)


BUILT_IN: dict[str, type[Environment]] = {"retry": Retry, "calculator": Calculator}


def built_in(name: str) -> type[Environment] | None:
    """Return a built-in environment; None: the name is ``package.module:Class``.

    Raises:
        MismatchError: neither.
    """
    if ":" in name:
        return None
    if name not in BUILT_IN:
        raise MismatchError(
            f"--environment {name}: there is no built-in environment of this name",
            f"{did_you_mean(name, BUILT_IN)}use {', '.join(BUILT_IN)}, or your own class: "
            "package.module:Class (docs/how-to/multi-turn.md; examples/environments)",
        )
    return BUILT_IN[name]


def prepared(kind: object, prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts as the environment wants the model to see them: its ``prepare``, if any.

    Raises:
        MismatchError: the environment's own ``prepare`` failed.
    """
    prepare = getattr(kind, "prepare", None)
    if prepare is None:
        return prompts
    try:
        return [prepare(prompt) for prompt in prompts]
    except Exception as error:  # whatever a user's class raises
        fault = f"the environment's prepare(prompt) failed: {named_line(error)}"
        fix = "return a mismatch.prompts.prompt.Prompt from it; docs/how-to/multi-turn.md"
        raise MismatchError(fault, fix) from error


def between_turns(tokenizer: Any, message: Message, stop_ids: Sequence[int]) -> list[int]:
    """Return the ids from the end of an assistant's turn to the start of its next one.

    The message is rendered as text after a known answer (after a call, if it is a tool's message)
    and encoded alone, so that no id before it can change. The ids include what the template writes
    after the token that ends a turn (a line break). The message's text is data: where it spells a
    control token, its characters are encoded.

    Raises:
        MismatchError: the template refuses the message, or drops the answer before it.
    """
    answer: dict[str, Any] = {"role": "assistant", "content": ANSWER}
    if message.get("role") == "tool":  # templates refuse a tool's message that follows no call
        function = {"name": message.get("name", "calculator"), "arguments": {"expression": ANSWER}}
        answer |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}
    messages = [
        {"role": "user", "content": QUESTION},
        answer,
        {**message, "content": with_seams(tokenizer, message["content"])},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template raises whatever it likes
        fault = f"the chat template refuses the environment's message: {named_line(error)}"
        fix = "see which roles it knows: mismatch template --model MODEL"
        raise MismatchError(fault, fix) from error
    _, mark, tail = text.rpartition(ANSWER)
    if not mark:
        fault = "the chat template drops the answer before an observation"
        raise MismatchError(fault, "see what it keeps: mismatch template --model MODEL")
    ends = [tokenizer.decode([token]) for token in stop_ids]
    places = [(tail.index(end), end) for end in ends if end and end in tail]
    if places:
        start, end = min(places)
        tail = tail[start + len(end) :]
    return encoded(tokenizer, tail)


def with_seams(tokenizer: Any, text: str) -> str:
    """Return a text with a seam inside whatever the tokenizer would read as a control token."""
    text = text.replace(SEAM, "")
    for mark in special_texts(tokenizer):
        text = text.replace(mark, mark[0] + SEAM + mark[1:])
    return text


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text, whose pieces between seams are encoded separately."""
    pieces = (tokenizer(piece, add_special_tokens=False) for piece in text.split(SEAM) if piece)
    return [int(token) for piece in pieces for token in piece["input_ids"]]


@dataclass
class Replies:
    """The replies to all sequences of a rollout, as ids."""

    kind: Callable[[Prompt], Environment]
    prompts: Sequence[Prompt]
    """Prompt of every sequence, [N]."""
    tokenizer: Any
    stop_ids: Sequence[int]
    vocab_size: int
    max_tokens: int
    """Tokens kept of a reply's content; the rest is cut off."""
    ended: Counter[str] = field(default_factory=Counter)
    """Reason -> number of sequences that a failure of the environment ended."""
    cut: int = 0
    """Replies that were longer than ``max_tokens``."""
    no_rewards: str = ""
    """Why the environments gave no rewards; "": they did, or they have no ``reward``."""
    slowest: float = 0.0
    """Seconds of the slowest reply that came."""
    _hung: int = 0
    _partners: dict[int, Environment] = field(default_factory=dict)

    def __call__(self, sequence: int, response: Sequence[int]) -> list[int] | None:
        """Return the ids between this response and the next; None: the sequence ends here.

        An environment that raises, hangs or returns no message ends only that sequence.
        """
        text = self.tokenizer.decode(list(response), skip_special_tokens=False)
        try:
            message = self._in_time(lambda: self._partner(sequence).reply(text))
            return None if message is None else self._encoded(message, response)
        except Exception as error:  # whatever a user's class raises
            self.ended[named_line(error)] += 1
            return None

    def _in_time(self, function: Callable[[], Any]) -> Any:
        """Return the function's result; a thread that takes too long is left behind.

        Raises:
            TimeoutError: it took too long, see ``PATIENCE``. Otherwise whatever it raises.
        """
        seconds = REPLY_S
        if self._hung >= PATIENCE:
            seconds = min(REPLY_S, max(LEAST_S, 2 * self.slowest))
        results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                results.put((function(), None))
            except BaseException as error:
                results.put((None, error))

        start = time.monotonic()
        threading.Thread(target=work, daemon=True).start()
        try:
            value, error = results.get(timeout=seconds)
        except queue.Empty:
            self._hung += 1
            raise TimeoutError(f"no reply within {seconds:.0f} s") from None
        if error is not None:
            raise error
        self.slowest = max(self.slowest, time.monotonic() - start)
        return value

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
        """Return the environments' own rewards, [N]; None: they have none, or one of them failed.

        ``no_rewards`` says how it failed.
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
        """Call ``close`` of every environment that was begun, also of those that failed.

        A failure to close is written to the log.
        """
        for partner in self._partners.values():
            try:
                self._in_time(getattr(partner, "close", lambda: None))
            except Exception as error:  # whatever a user's class raises
                print(f"an environment was not closed: {named_line(error)}", file=sys.stderr)
        self._partners.clear()
