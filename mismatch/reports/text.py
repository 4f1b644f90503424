"""Foreign strings made safe to look at: tokens, model names, error messages.

A sampled token can be anything: a newline, an escape sequence that recolours the terminal, a
right-to-left override that reorders the line around it. Whatever cannot be seen, or moves its
surroundings, is written as a visible sign.
"""

from __future__ import annotations

import unicodedata

_SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥"}
# Control, format (bidi, zero width, tags), surrogate, private, unassigned, line separators.
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_DOTTED_CIRCLE = "\u25cc"


def visible(text: str) -> str:
    """``text`` with everything invisible or disruptive spelled out.

    >>> visible("a\\tb\\x1b[31m\\u202e")
    'a⇥b⟨1B⟩[31m⟨202E⟩'
    """
    if text and unicodedata.combining(text[0]):
        text = _DOTTED_CIRCLE + text  # else the mark would sit on the character before the token
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    category = unicodedata.category(character)
    if category in _INVISIBLE:
        return f"⟨{ord(character):X}⟩"
    if category == "Zs" and character != " ":
        return f"⟨{ord(character):X}⟩"
    return character


def token_text(text: str, limit: int = 80) -> str:
    """One token as it is shown: visible, spaces marked at its edges, never longer than ``limit``.

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
    """Text of several lines, safe for a terminal: messages that quote servers, logs, files.

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
