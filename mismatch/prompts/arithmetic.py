"""Draw arithmetic word problems, whose answers can be verified: the built-in task.

Everything is drawn from `random.Random(seed).random()`, the one method whose sequence Python
promises never to change, so (n, seed) names the same problems on every machine and version.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Step = tuple[int, str, int, int]
"""One operation: (left, operator, right, result)."""


def word_list(text: str) -> tuple[str, ...]:
    """Return the words of `text`, in order."""
    return tuple(text.split())


NAMES = word_list(
    "Ada Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olga Peter Rosa Sam "
    "Tina Victor Wendy Zoe"
)
ITEMS = word_list(
    "apples books coins stamps pencils marbles shells cards buttons stones flowers cookies eggs "
    "keys balls candles toys plums lemons beads"
)
BOXES = word_list("boxes bags baskets jars drawers")
PLACES = ("in the garden", "at the market", "at school", "at home", "in the park", "on the beach")

# An answer counts only where nothing follows that would make it another number ("42.5", "4,200").
_ANSWER = re.compile(r"Answer:[ \t]*(-?[0-9]{1,9})(?![0-9]|[.,][0-9])")


@dataclass(frozen=True, slots=True)
class Story:
    """A word problem with its solution; the result of the last step is the answer.

    Example:
        >>> Story("Mia has 3 plums and finds 4.", "Mia", "plums", ((3, "+", 4, 7),)).messages
        [{'role': 'user', 'content': 'Mia has 3 plums and finds 4.'}]
    """

    prompt: str
    who: str
    item: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1][3]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The problem as the single user turn of a chat."""
        return [{"role": "user", "content": self.prompt}]


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """Draw one of `options`, uniformly."""
    return options[int(rng.random() * len(options))]


def between(rng: random.Random, low: int, high: int) -> int:
    """Draw an integer in [low, high], uniformly."""
    return low + int(rng.random() * (high - low + 1))


def story(rng: random.Random) -> Story:
    """Draw one word problem: one or two operations, every result below 400.

    A very small model learns the sums and few of the long products, so that it is right often and
    not always: rewards then vary.
    """
    kinds = (_gain_or_lose, _gain_or_lose, _gain_and_lose, _compare, _groups, _groups)
    return pick(rng, kinds)(rng)


def _move(rng: random.Random, who: str, item: str, have: int) -> tuple[str, Step]:
    """Draw a sentence that adds to or takes from `have` things, and its arithmetic step."""
    most = 9 if rng.random() < 0.8 else 30
    if have < 5 or rng.random() < 0.5:
        n = between(rng, 2, most)
        verb = pick(rng, ("finds", "buys", "gets", "wins", "collects"))
        return f"{who} {verb} {n} more {item} {pick(rng, PLACES)}.", (have, "+", n, have + n)
    n = between(rng, 2, min(most, have - 1))
    verb = pick(rng, ("loses", "sells", "gives away", "drops"))
    return f"{who} {verb} {n} {item} {pick(rng, PLACES)}.", (have, "-", n, have - n)


def _gain_or_lose(rng: random.Random) -> Story:
    who, item, have = pick(rng, NAMES), pick(rng, ITEMS), between(rng, 3, 20)
    text, step = _move(rng, who, item, have)
    question = pick(rng, ("does {w} have now?", "are left with {w}?", "does {w} end up with?"))
    prompt = f"{who} has {have} {item}. {text} How many {item} {question.format(w=who)}"
    return Story(prompt, who, item, (step,))


def _gain_and_lose(rng: random.Random) -> Story:
    who, item, have = pick(rng, NAMES), pick(rng, ITEMS), between(rng, 3, 20)
    first, step = _move(rng, who, item, have)
    second, last = _move(rng, who, item, step[3])
    prompt = f"{who} has {have} {item}. {first} Then {second} How many {item} does {who} have now?"
    return Story(prompt, who, item, (step, last))


def _compare(rng: random.Random) -> Story:
    who, other, item = pick(rng, NAMES), pick(rng, NAMES), pick(rng, ITEMS)
    a, b = between(rng, 3, 20), between(rng, 2, 12)
    if other == who:
        other = "a friend"
    if rng.random() < 0.5 or a <= b:
        step, question = (a, "+", b, a + b), f"How many {item} do they have together?"
    else:
        step, question = (a, "-", b, a - b), f"How many more {item} does {who} have?"
    return Story(f"{who} has {a} {item} and {other} has {b} {item}. {question}", who, item, (step,))


def _groups(rng: random.Random) -> Story:
    who, item, box = pick(rng, NAMES), pick(rng, ITEMS), pick(rng, BOXES)
    hard = rng.random() < 0.3
    a, b = between(rng, 2, 6), between(rng, 12, 33) if hard else between(rng, 2, 6)
    prompt = f"{who} has {a} {box} with {b} {item} in each of them."
    step = (a, "x", b, a * b)
    if rng.random() < 0.5:
        return Story(f"{prompt} How many {item} does {who} have?", who, item, (step,))
    text, last = _move(rng, who, item, a * b)
    prompt = f"{prompt} {text} How many {item} does {who} have now?"
    return Story(prompt, who, item, (step, last))


def long_story(rng: random.Random) -> Story:
    """Draw a problem of two or three steps, with numbers that are worth a calculator."""
    who, item, moves = pick(rng, NAMES), pick(rng, ITEMS), between(rng, 1, 2)
    steps: list[Step] = []
    if rng.random() < 0.5:
        a, b = between(rng, 2, 9), between(rng, 3, 30)
        sentences = [f"{who} has {a} {pick(rng, BOXES)} with {b} {item} in each of them."]
        steps.append((a, "x", b, a * b))
        have = a * b
    else:
        have, moves = between(rng, 10, 99), moves + 1
        sentences = [f"{who} has {have} {item}."]
    for _ in range(moves):
        text, step = _move(rng, who, item, have)
        sentences.append(text if len(sentences) == 1 else f"Then {text}")
        steps.append(step)
        have = step[3]
    prompt = f"{' '.join(sentences)} How many {item} does {who} have now?"
    return Story(prompt, who, item, tuple(steps))


def arithmetic_problems(
    n: int, seed: int, draw: Callable[[random.Random], Story] = story
) -> list[Story]:
    """Return `n` word problems, the same for the same (n, seed) everywhere.

    A shorter list is a prefix of a longer one. Problems are distinct: a repeated prompt is
    drawn again, up to 100 times.

    Raises:
        ValueError: n is negative.
    """
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    rng = random.Random(seed)
    problems: list[Story] = []
    seen: set[str] = set()
    for _ in range(n):
        for _attempt in range(100):
            drawn = draw(rng)
            if drawn.prompt not in seen:
                break
        seen.add(drawn.prompt)
        problems.append(drawn)
    return problems


def reward(response: str, answer: int) -> float:
    """Return 1.0 if the last "Answer: N" of the response is `answer`, else 0.0.

    A response without a readable last answer scores 0.0; nothing in it can raise.
    """
    tail = response.rfind("Answer:")
    match = _ANSWER.match(response, tail) if tail >= 0 else None
    return float(match is not None and int(match.group(1)) == answer)
