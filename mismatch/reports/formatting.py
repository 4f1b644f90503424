"""The one place where numbers become text, and where foreign text is made safe."""

from __future__ import annotations

import math
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import resources
from typing import Any, Literal

from mismatch.types import Estimate

Format = Callable[..., str]
MISSING = "–"
Tone = Literal["", "dim", "strong", "code", "bar", "healthy", "warn", "critical"]
# How a status looks: the tone of every rendering. Statuses of verdicts, then those of checks.
TONES: dict[str, Tone] = {
    "healthy": "healthy",
    "warn": "warn",
    "critical": "critical",
    "passed": "healthy",
    "tolerable": "warn",
    "inconclusive": "warn",
    "unfit": "critical",
    "broken": "critical",
    "warning": "warn",
    "failed": "critical",
}
MARKS = {"healthy": "✓", "warn": "!", "critical": "✕"}  # of tones, so that colour is not needed


@cache
def packaged(name: str) -> str:
    """Return a template, style sheet or table that ships with the package."""
    return resources.files("mismatch.reports").joinpath("templates", name).read_text("utf-8")


@cache
def wording(table: str) -> dict[str, Any]:
    """Return words by key, of a table of templates/words.toml."""
    words: dict[str, Any] = tomllib.loads(packaged("words.toml"))[table]
    return words


def number(value: float | None, digits: int = 3, sign: bool = False) -> str:
    """Return a value to ``digits`` significant digits; a difference may carry its sign.

    >>> number(0.011123), number(3.1e-4), number(12345.6), number(0.0), number(-2.5)
    ('0.0111', '0.000310', '12,346', '0', '−2.50')
    >>> number(6.04e-5), number(6.04e-7)
    ('0.000060', '6.04e-7')
    >>> signed(0.25), brief(0.0123), change(-0.0123)
    ('+0.250', '0.012', '−0.012')
    """
    if value is None or math.isnan(value):
        return MISSING
    if value < 0:
        return f"−{number(-value, digits)}"
    plus = "+" if sign and value > 0 else ""
    if math.isinf(value):
        return f"{plus}inf"
    if value == 0:
        return "0"
    if value >= 1e7 or value < 1e-6:
        return plus + _powers(f"{value:.{digits - 1}e}")
    digits = min(digits, 2) if value < 1e-4 else digits  # as :func:`alike`: one value, one text
    return f"{plus}{value:,.{_places(value, digits)}f}"


def _powers(scientific: str) -> str:
    mantissa, exponent = scientific.split("e")
    return f"{mantissa}e{int(exponent)}"


def _places(value: float, digits: int) -> int:
    """Decimals that show a positive value to so many significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(float(f"{value:.{digits}g}"))))


signed = partial(number, sign=True)
brief = partial(number, digits=2)
change = partial(number, digits=2, sign=True)


def near_one(value: float | None) -> str:
    """Return a factor as text; close to 1 three significant digits hide what matters.

    >>> near_one(1.00123), near_one(0.5)
    ('1.0012', '0.500')
    """
    return f"{value:.4f}" if value is not None and 0.9 < value < 1.1 else number(value)


NUMBERS: tuple[Format, ...] = (number, signed, brief, change, near_one)  # of :func:`alike`


def alike(values: Iterable[float | None], write: Format = number) -> Format:
    """Return one way of writing several numbers in one row or column: all scientific, or none.

    Those under 1e-4 have two significant digits, those under 1e-7 none.

    >>> [alike([9.48e-5, 0.063])(value) for value in (9.48e-5, 0.063, 9.48e-8, -9.48e-8)]
    ['0.000095', '0.0630', '< 0.0000001', '> −0.0000001']
    >>> [alike([9.48e-5, 9.48e-8])(value) for value in (9.48e-5, 9.48e-8)]
    ['9.48e-5', '9.48e-8']
    """
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and value]
    if write not in NUMBERS or not sizes or not min(sizes) < 1e-3 or max(sizes) >= 1e7:
        return write
    options = getattr(write, "keywords", {})
    all_small = min(sizes) < 1e-6 and max(sizes) < 1e-3

    def shown(value: float | None) -> str:
        if value is None or not 0 < abs(value) < 1e-3:
            return write(value)
        size, digits = abs(value), options.get("digits", 3)
        sign = "−" if value < 0 else "+" if options.get("sign") else ""
        if all_small:
            return sign + _powers(f"{size:.{digits - 1}e}")
        if size < 1e-7:
            return "< 0.0000001" if value > 0 else "> −0.0000001"
        return f"{sign}{size:.{_places(size, 2 if size < 1e-4 else digits)}f}"

    return shown


def bound(value: float) -> str:
    """Return a bound of a level, without trailing zeros.

    >>> bound(0.03), bound(1e-5), bound(0.002), bound(0.013)
    ('0.03', '1e-5', '0.002', '0.013')
    """
    if value != 0 and abs(value) < 1e-3:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


def percent(share: float | None, digits: int = 2) -> str:
    """Return a share as percent, never in scientific notation.

    >>> percent(0.0373), percent(0.0), percent(0.998), percent(0.00021), percent(3e-7)
    ('3.7 %', '0 %', '99.80 %', '0.021 %', '< 0.001 %')
    >>> percent(1 - 1e-9)
    '> 99.99 %'
    """
    if share is None or not math.isfinite(share):
        return MISSING
    scaled = share * 100
    if 0 < abs(scaled) < 1e-3:
        return "< 0.001 %"
    if abs(scaled) >= 100:
        return f"{scaled:,.0f} %"
    if scaled >= 90:  # what is missing to 100 % is what matters
        missing = number(100 - scaled, digits)
        decimals = len(missing.partition(".")[2]) if "e" not in missing else 2
        shown = f"{scaled:.{min(decimals, 2)}f} %"
        return "> 99.99 %" if shown.startswith("100") else shown
    return f"{number(scaled, digits)} %"


def points(share: float) -> str:
    """Return a difference of shares in percentage points, with its sign.

    >>> points(0.012), points(-0.5)
    ('+1.2 pp', '−50 pp')
    """
    return f"{'+' if share > 0 else '−' if share < 0 else ''}{percent(abs(share))[:-1]}pp"


def count(value: int) -> str:
    """Return a whole number with thousands separated."""
    return f"{value:,}"


def plural(value: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "token"), plural(2048, "token")
    ('1 token', '2,048 tokens')
    """
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


def times(factor: float) -> str:
    """Return a ratio of two values.

    >>> times(0.63), times(12.4), times(137.0)
    ('0.63×', '12×', '137×')
    """
    return f"{number(factor, 2 if abs(factor) < 100 else 3)}×"


def chance(p: float) -> str:
    """Return a p-value.

    >>> chance(2e-5), chance(0.04)
    ('< 0.001', '0.040')
    """
    return "< 0.001" if p < 0.001 else brief(p)


def scientific(value: float | None) -> str:
    """Return an error that may be of any order, to two significant digits.

    >>> scientific(6e-8), scientific(21.0), scientific(0.0), scientific(None)
    ('6.0e-8', '2.1e1', '0', '–')
    """
    if value is None or not math.isfinite(value) or value == 0:
        return brief(value)
    return _powers(f"{value:.1e}")


def seconds(value: float | None) -> str:
    """Return a time.

    >>> seconds(11.52), seconds(None)
    ('12 s', '–')
    """
    return MISSING if value is None else f"{brief(value)} s"


def memory(size: float | None) -> str:
    """Return bytes as MiB or GiB.

    >>> memory(5 << 20), memory(3 << 30), memory(None)
    ('5.00 MiB', '3.0 GiB', '–')
    """
    if size is None:
        return MISSING
    return f"{brief(size / 2**30)} GiB" if size >= 2**30 else f"{number(size / 2**20)} MiB"


def interval(estimate: Any, write: Format = number, to: str = " … ") -> str:
    """Return the 95 % interval of an estimate; "–" where it has none.

    >>> interval(Estimate(0.1, 0.05, 0.2, 64, 8, 4))
    '0.0500 … 0.200'
    """
    if not isinstance(estimate, Estimate) or estimate.low is None or estimate.high is None:
        return MISSING
    return f"{write(estimate.low)}{to}{write(estimate.high)}"


def text(value: object) -> str:
    """Return a string as it stands in a column of text."""
    return line(value)


def capital(sentence: str) -> str:
    """With its first letter large, the others as they are."""
    return sentence[:1].upper() + sentence[1:]


def badge(tone: str) -> str:
    """Return the mark before a status, so that it is seen without colour."""
    return f"{MARKS[tone]} " if tone in MARKS else ""


# ---------------------------------------------------------------- foreign text

# A sampled token can be anything: a newline, an escape sequence that recolours the terminal, a
# right-to-left override that reorders the line around it. Whatever cannot be seen, or moves its
# surroundings, is written as a visible sign.
_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥"}
# Control, format (bidi, zero width, tags), surrogate, private, unassigned, separators.
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
_DOTTED_CIRCLE = "\u25cc"
_JOINER = "\u200d"
_COMMANDS = re.compile(r"(?<!\S):(?=:)|(?<=#)#(?=\[)")  # ::set-output, ##[command]
_ADDED = "\ufe0f\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"  # colour, shade of skin


def visible(text: str) -> str:
    """``text`` with everything invisible or disruptive spelled out.

    >>> visible("a\\tb\\x1b[31m\\u202e")
    'a⇥b⟨1B⟩[31m⟨202E⟩'

    No word can be taken for a command to GitHub's runner, which reads the logs of jobs.

    >>> visible("::error::x std::vector ##[group]")
    '⟨3A⟩:error::x std::vector #⟨23⟩[group]'

    Joined emoji stay whole.

    >>> visible("\\U0001f469\\u200d\\U0001f52c a\\u200db")
    '\U0001f469\u200d\U0001f52c a⟨200D⟩b'
    """
    if text and unicodedata.combining(text[0]):
        text = _DOTTED_CIRCLE + text  # else the mark would sit on the character before the token
    if not (text.isascii() and text.isprintable()):
        joined = _JOINER in text
        text = "".join(
            character if joined and character == _JOINER and _joins(text, at)
            else _visible_character(character)
            for at, character in enumerate(text)
        )  # fmt: skip
    return _COMMANDS.sub(lambda sign: f"⟨{ord(sign[0]):X}⟩", text)


def _joins(text: str, at: int) -> bool:
    """Whether the joiner at a place is between two pictures: itself a picture."""
    before = text[max(0, at - 4) : at].rstrip(_ADDED)[-1:]
    return all(
        unicodedata.category(each or " ") == "So" for each in (before, text[at + 1 : at + 2])
    )


def _visible_character(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    hidden = character != " " and unicodedata.category(character) in _INVISIBLE
    return f"⟨{ord(character):X}⟩" if hidden else character


def token_text(text: str, limit: int = 80) -> str:
    """Return a token as shown: visible, spaces marked at its edges, never longer than ``limit``.

    >>> token_text(" the"), token_text("  "), token_text("")
    ('␣the', '␣␣', '(empty)')
    """
    if not text:
        return "(empty)"
    shown = visible(text[: limit + 1])
    if len(shown) > limit:
        shown = shown[: limit - 1] + "…"
    stripped = shown.lstrip(" ")
    shown = "␣" * (len(shown) - len(stripped)) + stripped
    stripped = shown.rstrip(" ")
    return stripped + "␣" * (len(shown) - len(stripped))


def plain_lines(text: str) -> str:
    """Return text of several lines, safe for a terminal: messages that quote servers, logs, files.

    >>> plain_lines("HTTP 500: \\x1b]0;title\\x07")
    'HTTP 500: ⟨1B⟩]0;title⟨7⟩'
    """
    return "\n".join(visible(part) for part in text.split("\n"))


def line(text: object) -> str:
    """Any text on one line, safe for a terminal: details of checks, names, paths.

    >>> line("killed\\n  by signal 9\\x1b[0m")
    'killed by signal 9⟨1B⟩[0m'
    """
    return visible(" ".join(str(text).split()))
