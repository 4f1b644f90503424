"""The task `instructions`: requests with constraints that a program can check.

The idea is that of VerifyIf (arXiv 2507.02833); every text here is our own. A response's reward is
the share of its prompt's constraints that it fulfils.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mismatch.prompts.arithmetic import between, pick, word_list

Values = Mapping[str, Any]
WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
KEYWORDS = word_list(
    "river mountain window garden winter paper bridge island mirror market silver evening engine "
    "doctor music planet letter family kitchen shadow"
)
TOPICS = (
    "a walk in the rain", "how bread is baked", "why leaves change colour", "a small harbour town",
    "learning to swim", "the first day at school", "how a bicycle works", "an old library",
    "why people keep bees", "a train journey at night", "how to water plants", "the life of a cat",
    "cooking for a friend", "what makes a good map", "a visit to the dentist", "how snow forms",
    "repairing a chair", "a market in the morning", "why the sky is blue", "a lost umbrella",
)  # fmt: skip
REQUESTS = (
    "Write a short text about {topic}.",
    "Tell a friend about {topic}.",
    "Explain to a child what you know about {topic}.",
    "Write the beginning of a story about {topic}.",
)


def words(text: str) -> list[str]:
    """The words of a text, numbers not among them."""
    return WORD.findall(text)


def lines(text: str) -> list[str]:
    """Lines that are not blank, without the space around them."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def sentences(text: str) -> int:
    """Full stops, question and exclamation marks before space or the end; runs count once."""
    return len(re.findall(r"[.!?]+[\"'”’)]*(?=\s|$)", text))


def occurrences(text: str, word: str) -> int:
    """How often a word stands in a text as a whole word, in upper or lower case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def marked(text: str, opening: str, closing: str) -> int:
    """Non-empty stretches of a line between two marks."""
    inside = rf"(?:(?!{re.escape(opening)}|{re.escape(closing)}).)+"
    return len(re.findall(f"{re.escape(opening)}{inside}{re.escape(closing)}", text))


def starting_with(text: str, pattern: str) -> int:
    """Lines that a pattern begins."""
    return sum(re.match(pattern, line) is not None for line in lines(text))


def numbered(text: str, n: int) -> bool:
    """Whether the numbered lines are 1. to n., in order."""
    numbers = [int(match[1]) for line in lines(text) if (match := re.match(r"(\d{1,4})\. ", line))]
    return numbers == list(range(1, n + 1))


def json_object(text: str, key: str) -> bool:
    """Whether a text is one JSON object with that key, alone or in a fenced block."""
    text = re.sub(r"^```(?:json)?\n(.*)\n```$", r"\1", text.strip(), flags=re.DOTALL)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and key in value


def cased(text: str, upper: bool) -> bool:
    """Whether a text has letters, and all are in that case."""
    return text.isupper() if upper else text.islower()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of constraint.

    Attributes:
        aspect: of a text; a prompt has at most one constraint of each, so that none contradict.
        text: the instruction, a template of the values.
        draw: values for a prompt.
        fulfilled: whether a response (stripped) fulfils it with these values.
    """

    aspect: str
    text: str
    draw: Callable[[random.Random], dict[str, Any]]
    fulfilled: Callable[[str, Values], bool]


def _n(low: int, high: int) -> Callable[[random.Random], dict[str, Any]]:
    return lambda rng: {"n": between(rng, low, high)}


def _word(rng: random.Random) -> dict[str, Any]:
    return {"word": pick(rng, KEYWORDS)}


def _word_n(rng: random.Random) -> dict[str, Any]:
    return {"word": pick(rng, KEYWORDS), "n": between(rng, 2, 4)}


def _nothing(_: random.Random) -> dict[str, Any]:
    return {}


ALONE = "whole"  # the aspect of a form that allows no other constraint
KINDS = {
    "words_at_least": Kind(
        "length", "Use at least {n} words.", _n(20, 80), lambda t, v: len(words(t)) >= v["n"]
    ),
    "words_at_most": Kind(
        "length", "Use at most {n} words.", _n(40, 80), lambda t, v: 0 < len(words(t)) <= v["n"]
    ),
    "sentences": Kind(
        "form", "Write exactly {n} sentences.", _n(2, 6), lambda t, v: sentences(t) == v["n"]
    ),
    "paragraphs": Kind(
        "form",
        "Write exactly {n} paragraphs, with an empty line between them.",
        _n(2, 4),
        lambda t, v: len([p for p in re.split(r"\n[ \t]*\n", t) if p.strip()]) == v["n"],
    ),
    "bullets": Kind(
        "form",
        'Have exactly {n} lines that begin with "- ".',
        _n(2, 5),
        lambda t, v: starting_with(t, r"- \S") == v["n"],
    ),
    "numbered": Kind(
        "form",
        'Number {n} lines from "1. " on.',
        _n(2, 5),
        lambda t, v: numbered(t, v["n"]),
    ),
    "two_parts": Kind(
        "form",
        "Write two parts, with a line of three stars (***) between them.",
        _nothing,
        lambda t, v: [bool(p.strip()) for p in re.split(r"(?m)^\*\*\*[ \t]*$", t)] == [True, True],
    ),
    "title": Kind(
        "form",
        "Put a title in double square brackets, [[like this]], on the first line.",
        _nothing,
        lambda t, v: re.match(r"\[\[[^\[\]\n]+\]\][ \t]*(\n|$)", t) is not None,
    ),
    "keyword": Kind(
        "word", 'Use the word "{word}".', _word, lambda t, v: occurrences(t, v["word"]) > 0
    ),
    "keyword_times": Kind(
        "word",
        'Use the word "{word}" exactly {n} times.',
        _word_n,
        lambda t, v: occurrences(t, v["word"]) == v["n"],
    ),
    "forbidden": Kind(
        "word",
        'Do not use the word "{word}".',
        _word,
        lambda t, v: bool(words(t)) and not occurrences(t, v["word"]),
    ),
    "letter_times": Kind(
        "word",
        'Use the letter "{letter}" at least {n} times.',
        lambda rng: {"letter": pick(rng, "bcfgkmpvw"), "n": between(rng, 3, 8)},
        lambda t, v: t.lower().count(v["letter"]) >= v["n"],
    ),
    "short_words": Kind(
        "spelling",
        "Use no word of more than {n} letters.",
        _n(7, 10),
        lambda t, v: 0 < max(map(len, words(t)), default=0) <= v["n"],
    ),
    "lower_case": Kind(
        "spelling", "Write in lower case only.", _nothing, lambda t, v: cased(t, upper=False)
    ),
    "upper_case": Kind(
        "spelling", "WRITE IN UPPER CASE ONLY.", _nothing, lambda t, v: cased(t, upper=True)
    ),
    "no_commas": Kind(
        "marks", "Use no commas.", _nothing, lambda t, v: bool(words(t)) and "," not in t
    ),
    "question": Kind(
        "marks", "Ask exactly {n} questions.", _n(1, 2), lambda t, v: t.count("?") == v["n"]
    ),
    "emphasis": Kind(
        "marks",
        "Put exactly {n} words or phrases between underscores, _like this_.",
        _n(1, 3),
        lambda t, v: marked(t, "_", "_") == v["n"],
    ),
    "placeholders": Kind(
        "marks",
        "Leave exactly {n} gaps to fill in, in angle brackets, <name> for example.",
        _n(1, 3),
        lambda t, v: marked(t, "<", ">") == v["n"],
    ),
    "starts_with": Kind(
        "edges",
        'Let the first word be "{word}".',
        _word,
        lambda t, v: [w.lower() for w in words(t)[:1]] == [v["word"]],
    ),
    "ends_with": Kind(
        "edges",
        'Let the last word be "{word}".',
        _word,
        lambda t, v: [w.lower() for w in words(t)[-1:]] == [v["word"]],
    ),
    "quoted": Kind(
        "edges",
        "Put the whole answer in double quotation marks.",
        _nothing,
        lambda t, v: len(t) > 2 and t[0] == t[-1] == '"' and bool(t[1:-1].strip()),
    ),
    "json": Kind(
        ALONE,
        'Answer with one JSON object that has the key "{word}", and nothing else.',
        _word,
        lambda t, v: json_object(t, v["word"]),
    ),
}  # fmt: skip
# Two that no answer, or hardly one, could fulfil together.
CONTRADICTIONS = frozenset(
    {
        frozenset(("title", "quoted")),
        frozenset(("title", "starts_with")),
        frozenset(("bullets", "quoted")),
        frozenset(("numbered", "quoted")),
    }
)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint of one prompt.

    >>> Constraint("words_at_least", {"n": 3}).text
    'Use at least 3 words.'
    """

    kind: str
    values: Values

    @property
    def text(self) -> str:
        """The instruction."""
        return KINDS[self.kind].text.format(**self.values)

    def fulfilled_by(self, response: str) -> bool:
        """Whether a response fulfils it."""
        return KINDS[self.kind].fulfilled(response.strip(), self.values)


def share_fulfilled(response: str, constraints: tuple[Constraint, ...]) -> float:
    """How many of the constraints a response fulfils, 0 to 1.

    >>> share_fulfilled("a b", (Constraint("lower_case", {}), Constraint("json", {"word": "k"})))
    0.5
    """
    return sum(c.fulfilled_by(response) for c in constraints) / len(constraints)


@dataclass(frozen=True, slots=True)
class Instruction:
    """A prompt with its constraints."""

    prompt: str
    constraints: tuple[Constraint, ...]


def instructions(n: int, seed: int) -> list[Instruction]:
    """`n` requests with one to three constraints, the same for the same (n, seed) everywhere."""
    rng = random.Random(seed)
    return [_instruction(rng) for _ in range(n)]


def _instruction(rng: random.Random) -> Instruction:
    chosen = [pick(rng, tuple(KINDS))]
    for _ in range(between(rng, 0, 2)):
        free = [kind for kind in KINDS if all(_together(kind, other) for other in chosen)]
        if free:
            chosen.append(pick(rng, tuple(free)))
    constraints = tuple(Constraint(kind, KINDS[kind].draw(rng)) for kind in chosen)
    request = pick(rng, REQUESTS).format(topic=pick(rng, TOPICS))
    return Instruction(" ".join([request, *(c.text for c in constraints)]), constraints)


def _together(kind: str, other: str) -> bool:
    """Whether an answer can fulfil both."""
    aspects = {KINDS[kind].aspect, KINDS[other].aspect}
    fits = len(aspects) == 2 and ALONE not in aspects
    return fits and frozenset((kind, other)) not in CONTRADICTIONS
