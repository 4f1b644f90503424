"""The causes that can be named, in words: what you see, why, what confirms it, what fixes it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True)
class Entry:
    """One cause of causes.toml.

    Attributes:
        confirm: the experiment that separates it from those that look alike.
        mend: the fix, as one action.
        seen: issues with this root cause, as owner/repo#number.
        lead: the headline where the side is known, with {side} and {other}; "": the title.
        choice: what a user chose by it, where it is a price and no fault; else "".
        picture: why the gallery has none; "" where it has one.
        frameworks: name of a framework -> what sets it or shows it there, as read at its source.
    """

    id: str
    title: str
    see: str
    why: str
    confirm: str
    mend: str
    seen: tuple[str, ...] = ()
    lead: str = ""
    choice: str = ""
    picture: str = ""
    frameworks: Mapping[str, str] = field(default_factory=dict, hash=False)


@cache
def catalogue() -> dict[str, Entry]:
    """Return every cause by its id."""
    text = resources.files("mismatch.analysis").joinpath("causes.toml").read_text("utf-8")
    return {
        id: Entry(id, **{**fields, "seen": tuple(fields.get("seen", ()))})
        for id, fields in tomllib.loads(text).items()
    }


def title_of(id: str) -> str:
    """Return a cause's title; its id where another package's detector names a new one."""
    entry = catalogue().get(id)
    return entry.title if entry else id
