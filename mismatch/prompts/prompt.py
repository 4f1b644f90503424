"""One prompt, as every source gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, in exactly one of three forms.

    Example:
        >>> Prompt("prompts.jsonl:3", text="Once upon a time").text
        'Once upon a time'

    Attributes:
        origin: where it comes from, for messages: file and line, or task and number.
        answer: the right one, a whole number, where it is known.
        grader: how a response is read: "arithmetic" (the built-in task's format) or "number" (the
            final number, in the usual ways of writing it).
    """

    origin: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    answer: int | None = None
    grader: Literal["arithmetic", "number"] = "arithmetic"
