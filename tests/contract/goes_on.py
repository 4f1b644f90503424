"""An environment for the engines' contract: a response that reaches a text goes on behind an
insertion, and one that ended gets a user's message."""

from __future__ import annotations

from typing import Any

from mismatch.prompts.prompt import Prompt

TEXT, INSERTED, MESSAGE = "Answer", " (wait)", "And then?"


class GoesOn:
    """See above."""

    stop = (TEXT,)

    def __init__(self, prompt: Prompt) -> None: ...

    def reply(self, response: str) -> dict[str, Any]:
        """See :class:`mismatch.prompts.environments.Environment`."""
        if response.endswith(TEXT):
            return {"role": "assistant", "content": INSERTED}
        return {"role": "user", "content": MESSAGE}
