"""The built-in tasks by name: their prompts, and the environment that replies in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from mismatch.errors import MismatchError
from mismatch.prompts.arithmetic import Story, arithmetic_problems, long_story, story
from mismatch.prompts.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Task:
    """A built-in task."""

    name: str
    draw: Callable[[random.Random], Story]
    environment: str | None = None
    """The environment that replies, unless ``--environment`` names another."""

    def prompts(self, n: int, seed: int) -> list[Prompt]:
        """Return n prompts; a shorter list is a prefix of a longer one."""
        problems = arithmetic_problems(n, seed, self.draw)
        return [
            Prompt(f"{self.name} prompt {index}", messages=problem.messages, answer=problem.answer)
            for index, problem in enumerate(problems)
        ]


TASKS = (Task("arithmetic", story), Task("calculator", long_story, "calculator"))


def find_task(name: str) -> Task:
    """Return the task of that name.

    Raises:
        MismatchError: there is none.
    """
    for task in TASKS:
        if task.name == name:
            return task
    fault = f"unknown task {name!r}"
    fix = f"use {', '.join(task.name for task in TASKS)}, or a file of prompts: --prompts FILE"
    raise MismatchError(fault, fix)
