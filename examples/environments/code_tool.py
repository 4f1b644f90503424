"""A Python tool as environment: the model's code runs in a process of its own, see sandbox.py.

    PYTHONPATH=examples/environments mismatch check --model MODEL --environment code_tool:Python

``Python`` answers calls of the tool ``python``. ``Retool`` is ReTool's loop: a response ends at
``</code>`` and continues after what the code writes, in the form of slime's ``examples/retool``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from sandbox import run_code, unheld

from mismatch.prompts.environments import Tool, function_tool
from mismatch.prompts.prompt import Prompt

# Code between tags at the end of a response; only end tokens may follow.
CODE = re.compile(
    r"<code>\s*(?:```\w*\n)?(?P<code>(?:(?!</?code>).)*?)\n?(?:```)?\s*</code>"
    r"\s*(?:<[^<>\s]+>\s*)*\Z",
    re.DOTALL,
)


@cache
def warn_once() -> None:
    """Write to stderr what the sandbox cannot keep from the code on this machine."""
    for what in unheld():
        print(f"code_tool: nothing here keeps {what} from the code", file=sys.stderr)


class Python(Tool):
    """The tool ``python``, ``{"code": "…"}``; every call runs in a fresh process."""

    name, argument = "python", "code"
    tool = function_tool(name, argument, "Run Python code; the result is what it prints.")

    @classmethod
    def prepare(cls, prompt: Prompt) -> Prompt:
        """Offer the tool, and write to the engine's log what this machine does not contain."""
        warn_once()
        return super().prepare(prompt)

    def result(self, value: str) -> str:
        """Return what the code writes, errors too, or what stopped it."""
        return run_code(value)


class Retool(Python):
    """ReTool's loop: code between tags, its output in the middle of the same message."""

    stop = ("</code>",)
    instructions = (
        "You may write Python code between <code> and </code>. It is run, what it prints comes "
        "back between <interpreter> and </interpreter>, and you go on."
    )

    @classmethod
    def prepare(cls, prompt: Prompt) -> Prompt:
        """Say in the first message how to call the tool, unless a message names the tags."""
        prompt = replace(super().prepare(prompt), tools=None)
        if not prompt.messages or any("<code>" in str(m.get("content")) for m in prompt.messages):
            return prompt
        first, *rest = prompt.messages
        told = {**first, "content": f"{cls.instructions}\n\n{first['content']}"}
        return replace(prompt, messages=[told, *rest])

    def reply(self, response: str) -> Mapping[str, Any] | None:
        """Return the output as part of the same message; as a user's message after an end token."""
        call = CODE.search(response)
        if call is None:
            return super().reply(response)
        output = self.result(call["code"]).rstrip()
        if response.rstrip().endswith(self.stop):
            around = {"before": "\n\n<interpreter>\n", "after": "\n</interpreter>\n\n"}
            return {"role": "assistant", "content": output, **around}
        around = {"before": "<interpreter>\n", "after": "\n</interpreter>"}
        return {"role": "user", "content": output, **around}
