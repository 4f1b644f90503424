"""The built-in tasks by name: their prompts, and the environment that replies where one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mismatch.errors import MismatchError
from mismatch.prompts.arithmetic import arithmetic_problems, long_story
from mismatch.prompts.prompt import Prompt


def _problems(name: str, long: bool, n: int, seed: int) -> list[Prompt]:
    problems = arithmetic_problems(n, seed, long_story) if long else arithmetic_problems(n, seed)
    return [
        Prompt(f"{name} prompt {index}", messages=problem.messages, answer=problem.answer)
        for index, problem in enumerate(problems)
    ]


@dataclass(frozen=True, slots=True)
class Task:
    """A built-in task.

    Attributes:
        prompts: (n, seed) -> n prompts, a shorter list a prefix of a longer one.
        environment: that replies, unless ``--environment`` names another.
    """

    prompts: Callable[[int, int], list[Prompt]]
    environment: str | None = None


TASKS = {
    "arithmetic": Task(partial(_problems, "arithmetic", False)),
    "calculator": Task(partial(_problems, "calculator", True), "calculator"),
}


def find_task(name: str) -> Task:
    """The task of that name.

    Raises:
        MismatchError: there is none.
    """
    if name not in TASKS:
        raise MismatchError(
            f"unknown task {name!r}",
            f"use {', '.join(TASKS)}, or a file of prompts: --prompts FILE",
        )
    return TASKS[name]
