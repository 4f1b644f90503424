"""The text that tiny-gpt-oss is trained on: chats, all generated here, free of any licence.

Three kinds of conversation: arithmetic word problems with worked answers, small instructions, and
tool use over several turns. Wording is varied on purpose: a model that has one way to say a thing
has no entropy, and without entropy there is nothing to measure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from mismatch.prompts.arithmetic import ITEMS, NAMES, Story, between, pick, story, word_list

Chat = dict[str, Any]
"""{"messages": [...], "tools": [...] or None}, as `apply_chat_template` takes them."""

WORDS = word_list(
    "river mountain window orange silver garden winter summer yellow table chair paper cloud "
    "forest bridge castle dragon engine finger guitar hammer island jacket kitchen ladder mirror "
    "needle ocean pocket queen rabbit school tiger uncle valley wagon zebra bottle camera doctor "
    "eagle farmer gold honey iron jungle king lamp moon night onion piano quiet rope sugar train "
    "umbrella violin water bread corner desert energy flame glass house insect judge knife letter "
    "music nurse object planet ring street tower voice wheel year branch cotton dinner earth "
    "feather ground heart image journey kettle lemon market nature office parent question road "
    "stone travel visit world animal button circle danger evening family guard hour industry joke "
    "knight leather minute nation owner person quarter reason season theory unit village "
    "weather"
)
CITIES = word_list("Paris London Rome Oslo Cairo Lima Tokyo Delhi Berlin Madrid Vienna Athens")
SKIES = word_list("sunny cloudy rainy windy foggy snowy clear stormy")

_OPENINGS = (
    "", "", "Let us see. ", "Okay. ", "Sure. ", "Let me think. ", "We go step by step. ",
    "Let us work it out. ", "Good question. ", "This is easy. ",
)  # fmt: skip
_STARTS = word_list("Here There Today Often Again Never Now Once Maybe Somewhere")
_KINDS = word_list("silver quiet yellow warm little broken wooden golden old new soft heavy")
_THINGS = WORDS[:32]
_DOES = word_list("sings waits falls turns shines moves sleeps grows stands begins ends rests")
_HOW = word_list("slowly softly alone gladly early late again freely quickly badly")
_WHERE = word_list("near under behind above beside without like before")
_RECALL = (
    "{w} starts with {a} {i}. ", "At first there are {a} {i}. ", "We begin with {a} {i}. ",
    "The first number is {a}. ", "There are {a} {i} to begin with. ", "At the start {w} has {a}. ",
)  # fmt: skip
_PLUS = (
    "Then {b} are added: {s}. ", "Adding {b} gives {s}. ", "With {b} more it is {s}. ",
    "We add {b}, so {s}. ", "Now {b} come on top: {s}. ", "The sum is {s}. ",
)  # fmt: skip
_MINUS = (
    "Then {b} are taken away: {s}. ", "Taking {b} away gives {s}. ", "Without {b} it is {s}. ",
    "We subtract {b}, so {s}. ", "Now {b} are gone: {s}. ", "The difference is {s}. ",
)  # fmt: skip
_TIMES = (
    "There are {a} groups of {b}: {s}. ", "We multiply {a} by {b}: {s}. ", "The product is {s}. ",
    "Each one holds {b}, so {s}. ", "That makes {s}. ", "In all it is {s}. ",
)  # fmt: skip
_CLOSINGS = (
    "So there are {r} {i}. ", "That means {r} {i}. ", "So the result is {r}. ", "{w} has {r} {i}. ",
    "Therefore we get {r}. ", "",
)  # fmt: skip
_PHRASES = {"+": _PLUS, "-": _MINUS, "x": _TIMES}


def worked_answer(rng: random.Random, told: Story) -> str:
    """Return a short chain of reasoning that ends in "Answer: N", the form that `reward` reads."""
    names = {"w": told.who, "i": told.item, "r": told.answer}
    parts = [pick(rng, _OPENINGS)] + [daydream(rng) for _ in range(between(rng, 2, 3))]
    if told.steps[0][1] != "x":
        parts.append(pick(rng, _RECALL).format(a=told.steps[0][0], **names))
    for a, operator, b, result in told.steps:
        sum_text = f"{a} {operator} {b} = {result}"
        parts.append(pick(rng, _PHRASES[operator]).format(a=a, b=b, s=sum_text))
    parts.append(pick(rng, _CLOSINGS).format(**names))
    return "".join(parts) + f"Answer: {told.answer}"


def daydream(rng: random.Random) -> str:
    """Return a free sentence in which nearly every word could have been another.

    Arithmetic alone leaves the model all but certain of every token, and certain tokens hide
    numeric noise. Real models are uncertain of a third of what they say; this makes ours so.
    """
    words = [pick(rng, _STARTS), pick(rng, _KINDS), pick(rng, _THINGS), pick(rng, _DOES)]
    if rng.random() < 0.6:
        words.append(pick(rng, _HOW))
    if rng.random() < 0.7:
        words += [pick(rng, _WHERE), pick(rng, _KINDS), pick(rng, _THINGS)]
    return " ".join(words) + ". "


def chats(seed: int) -> Iterator[Chat]:
    """Yield an endless, reproducible stream of training conversations."""
    rng = random.Random(seed)
    while True:
        kind = rng.random()
        if kind < 0.65:
            told = story(rng)
            yield _chat([_user(told.prompt), _assistant(worked_answer(rng, told))])
        elif kind < 0.85:
            messages = instruction(rng)
            if rng.random() < 0.25:
                messages += instruction(rng)
            yield _chat(messages)
        else:
            yield pick(rng, (_ask_shop, _ask_shop_twice, _ask_calculator, _ask_weather))(rng)


def _chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Chat:
    return {"messages": messages, "tools": tools}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


# --- instructions -------------------------------------------------------------------------------


def _some_words(rng: random.Random, low: int, high: int) -> list[str]:
    """Between `low` and `high` distinct words."""
    count, chosen = between(rng, low, high), dict[str, None]()
    while len(chosen) < count:
        chosen[pick(rng, WORDS)] = None
    return list(chosen)


def _repeat(rng: random.Random) -> tuple[str, str]:
    word, times = pick(rng, WORDS), between(rng, 2, 9)
    ask = pick(
        rng, ('Repeat the word "{w}" {n} times.', 'Say "{w}" {n} times.', "Write {w} {n} times.")
    )
    return ask.format(w=word, n=times), " ".join([word] * times)


def _sort(rng: random.Random) -> tuple[str, str]:
    words = _some_words(rng, 3, 6)
    ask = pick(rng, ("Sort these words: ", "Put these words in order: ", "Sort from a to z: "))
    return ask + ", ".join(words), ", ".join(sorted(words))


def _reverse(rng: random.Random) -> tuple[str, str]:
    words = _some_words(rng, 3, 7)
    ask = pick(rng, ("Reverse this list: ", "Write this list backwards: "))
    return ask + ", ".join(words), ", ".join(reversed(words))


def _case(rng: random.Random) -> tuple[str, str]:
    text = " ".join(_some_words(rng, 1, 3))
    if rng.random() < 0.5:
        return f"Write in upper case: {text}", text.upper()
    return f"Write in lower case: {text.upper()}", text


def _spell(rng: random.Random) -> tuple[str, str]:
    word = pick(rng, WORDS)
    letters = "-".join(word)
    return f'How many letters are in "{word}"?', f"{letters}. There are {len(word)} letters in it."


def _pick_word(rng: random.Random) -> tuple[str, str]:
    words = _some_words(rng, 3, 6)
    place, index = pick(rng, (("first", 0), ("second", 1), ("third", 2), ("last", -1)))
    reply = pick(rng, ('The {p} word is "{w}".', '"{w}" is the {p} word.', "It is {w}."))
    return (
        f"What is the {place} word of this list: {', '.join(words)}?",
        reply.format(p=place, w=words[index]),
    )


def _count(rng: random.Random) -> tuple[str, str]:
    low = between(rng, 0, 80)
    high = low + between(rng, 3, 9)
    return f"Count from {low} to {high}.", ", ".join(str(n) for n in range(low, high + 1))


def _sentence(rng: random.Random) -> tuple[str, str]:
    """Free text: the answer has many right continuations, hence entropy."""
    words = _some_words(rng, 2, 3)
    who, verb = pick(rng, NAMES), pick(rng, ("sees", "paints", "likes", "finds", "draws", "wants"))
    ends = ("every day", "in the evening", "with a friend", "near the house", "and smiles", "today")
    text = f"{who} {verb} the {' and the '.join(words)} {pick(rng, ends)}."
    return f"Write a sentence with these words: {', '.join(words)}", text


_INSTRUCTIONS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _repeat, _sort, _reverse, _case, _spell, _pick_word, _count, _sentence,
)  # fmt: skip


def instruction(rng: random.Random) -> list[dict[str, Any]]:
    ask, reply = pick(rng, _INSTRUCTIONS)(rng)
    return [_user(ask), _assistant(reply)]


# --- tools --------------------------------------------------------------------------------------


def _tool(name: str, argument: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


CALCULATOR = _tool("calculator", "expression", "Work out a sum.")
INVENTORY = _tool("inventory", "item", "Number of things in the shop.")
WEATHER = _tool("weather", "city", "Weather of a city today.")
TOOLS = (CALCULATOR, INVENTORY, WEATHER)


def _call(name: str, argument: str, value: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {argument: value}}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def _tool_output(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def _offered(rng: random.Random, needed: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """Return the needed tools and, at times, others: the model must choose."""
    return [tool for tool in TOOLS if tool in needed or rng.random() < 0.5]


def _stock(rng: random.Random, item: str, count: int) -> str:
    reply = pick(
        rng, ("The shop has {n} {i}.", "There are {n} {i}.", "They have {n} {i} in the shop.")
    )
    return reply.format(n=count, i=item)


def _ask_shop(rng: random.Random) -> Chat:
    item, count = pick(rng, ITEMS), between(rng, 2, 99)
    ask = pick(rng, ("How many {i} does the shop have?", "How many {i} are in the shop?"))
    messages = [
        _user(ask.format(i=item)),
        _call("inventory", "item", item),
        _tool_output(str(count)),
    ]
    messages.append(_assistant(_stock(rng, item, count)))
    if rng.random() < 0.5:
        other, more = pick(rng, ITEMS), between(rng, 2, 99)
        messages += [_user(f"And how many {other}?"), _call("inventory", "item", other)]
        messages += [_tool_output(str(more)), _assistant(_stock(rng, other, more))]
    return _chat(messages, _offered(rng, (INVENTORY,)))


def _ask_shop_twice(rng: random.Random) -> Chat:
    first, second = pick(rng, ITEMS), pick(rng, ITEMS)
    a, b = between(rng, 2, 60), between(rng, 2, 39)
    ask = f"How many {first} and {second} does the shop have together?"
    messages = [_user(ask), _call("inventory", "item", first), _tool_output(str(a))]
    messages += [_call("inventory", "item", second), _tool_output(str(b))]
    messages += [_call("calculator", "expression", f"{a} + {b}"), _tool_output(str(a + b))]
    messages.append(_assistant(f"There are {a} {first} and {b} {second}. Answer: {a + b}"))
    return _chat(messages, _offered(rng, (INVENTORY, CALCULATOR)))


def _ask_calculator(rng: random.Random) -> Chat:
    told = story(rng)
    messages = [_user(told.prompt)]
    for a, operator, b, result in told.steps:
        messages += [
            _call("calculator", "expression", f"{a} {operator} {b}"),
            _tool_output(str(result)),
        ]
    messages.append(_assistant(pick(rng, ("", "The tool says so. ")) + f"Answer: {told.answer}"))
    return _chat(messages, _offered(rng, (CALCULATOR,)))


def _ask_weather(rng: random.Random) -> Chat:
    city, sky, degrees = pick(rng, CITIES), pick(rng, SKIES), between(rng, 1, 35)
    ask = pick(
        rng, ("What is the weather in {c}?", "How warm is it in {c} today?", "Is it nice in {c}?")
    )
    reply = pick(
        rng, ("It is {s} in {c}, {d} degrees.", "In {c} it is {d} degrees and {s}.", "{s}, {d}.")
    )
    messages = [_user(ask.format(c=city)), _call("weather", "city", city)]
    messages.append(_tool_output(f"{sky}, {degrees} degrees"))
    messages.append(_assistant(reply.format(c=city, s=sky, d=degrees)))
    return _chat(messages, _offered(rng, (WEATHER,)))
