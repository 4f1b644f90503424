"""One prompt, as every source returns it, and the reward of a response to it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mismatch.prompts.arithmetic import reward


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, in exactly one of three forms.

    Example:
        >>> Prompt("prompts.jsonl:3", text="Once upon a time").text
        'Once upon a time'
    """

    origin: str
    """Where it comes from, for errors: file and line, or task and number."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    answer: int | None = None
    """The right answer, a whole number, where it is known."""
    grader: Literal["arithmetic", "number"] = "arithmetic"
    """How a response is read: as the built-in task asks, or by its final number."""
    tools: list[dict[str, Any]] | None = None
    """On offer with ``messages``, as chat templates take them."""

    @property
    def gradable(self) -> bool:
        """Whether a response can be right or wrong."""
        return self.answer is not None


# Where a text puts its final answer, the strongest mark first.
_MARKED = (re.compile(r"####[ \t]*([^\n]+)"), re.compile(r"\\boxed\{([^{}]*)\}"))
_SAID = re.compile(r"[Aa]nswer(?:\s+is)?\s*[:=]?\s*([^\n]+)")
_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?")
_MOST_DIGITS = 18


def numeric_answer(value: Any) -> int | None:
    """Return the whole number that an answer means, or None.

    A text is read after its last ``####`` or inside its last ``\\boxed{}``, else as a whole.

    >>> numeric_answer("18 - 3 = 15 <<15*2=30>>\\n#### 1,030"), numeric_answer("blue")
    (1030, None)
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return int(value) if math.isfinite(value) and value == int(value) else None
    text = str(value)
    for pattern in _MARKED:
        if numbers := pattern.findall(text):
            return _whole(numbers[-1])
    return _whole(text) if _NUMBER.fullmatch(text.strip()) else None


def numeric_reward(response: str, answer: int) -> float:
    """Return 1.0 if the response's final number is ``answer``, else 0.0; nothing in it can raise.

    The number is read after the last ``####``, inside the last ``\\boxed{}``, after the last
    "answer"; otherwise it is the last number of all.

    >>> numeric_reward("so she has 42.", 42), numeric_reward("42 apples, 5 pears", 42)
    (1.0, 0.0)
    """
    for pattern in (*_MARKED, _SAID):
        if numbers := pattern.findall(response):
            return float(_whole(numbers[-1]) == answer)
    numbers = _NUMBER.findall(response)
    return float(bool(numbers) and _whole(numbers[-1]) == answer)


def _whole(text: str) -> int | None:
    """Return the first number of a text, if it is whole and has at most 18 digits."""
    match = _NUMBER.search(text)
    if match is None:
        return None
    digits, _, decimals = match[0].replace(",", "").replace("$", "").partition(".")
    if decimals.strip("0") or len(digits) > _MOST_DIGITS:
        return None
    return int(digits)


def grade(prompt: Prompt, response: str, special: Sequence[str]) -> float:
    """Return the reward, 0 or 1, of a response (with its special tokens) to a gradable prompt."""
    assert prompt.answer is not None
    for token in special:
        response = response.replace(token, "")
    return (reward if prompt.grader == "arithmetic" else numeric_reward)(response, prompt.answer)
