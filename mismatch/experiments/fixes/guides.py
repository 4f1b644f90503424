"""What is known of each fix: why it helps, when it hurts, how each framework sets it, evidence.

Read from guide-*.toml, the one source of ``mismatch fixes`` and of docs/fixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from mismatch.analysis.corrections.recipes import Recipe, recipes
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import Chosen, Fix
from mismatch.experiments.fixes.catalogue import guides as entries
from mismatch.frameworks import BY_TITLE
from mismatch.metrics.importance_weights import Settings


@dataclass(frozen=True, slots=True)
class Evidence:
    """One published or measured fact.

    Attributes:
        read: it was read in the source; False: second-hand.
    """

    text: str
    source: str
    read: bool = True


@dataclass(frozen=True, slots=True)
class Guide:
    """The page of one fix.

    Attributes:
        changes: what it changes, and why that removes mismatch.
        worse: when it makes things worse, or hides something.
        settings: how each framework is told.
    """

    id: str
    changes: str
    worse: str
    settings: tuple[Recipe, ...]
    evidence: tuple[Evidence, ...]


def guide_of(name: str) -> Guide:
    """The guide of a fix.

    Raises:
        MismatchError: there is none.
    """
    guide = guides().get(name)
    if guide is None:
        raise MismatchError(f"no guide to the fix {name!r}", f"one of: {', '.join(guides())}")
    return guide


def settings_of(name: str) -> tuple[Recipe, ...]:
    """How frameworks set a fix; empty where nothing is known of it."""
    guide = guides().get(name)
    return guide.settings if guide else ()


@cache
def guides() -> dict[str, Guide]:
    """All of them, by id of the fix."""
    return {id: _guide(id, entry) for id, entry in entries().items()}


def _source(framework: str, source: str) -> str:
    """Where keys were read; a source without a path names its own commit."""
    known = BY_TITLE.get(framework)
    if known is None or not known.version or "#" in source.partition(";")[0]:
        return source
    return f"{known.read_in}, {source}"


def _guide(id: str, entry: dict[str, Any]) -> Guide:
    settings = [
        Recipe(
            setting["framework"],
            tuple(setting.get("lines", "").strip("\n").splitlines()),
            setting.get("remark", ""),
            _source(setting["framework"], setting["source"]),
        )
        for setting in entry.get("settings", ())
    ]
    if correction := entry.get("correction"):
        settings = [*recipes(correction, Settings()), *settings]
    return Guide(
        id,
        " ".join(entry["changes"].split()),
        " ".join(entry["worse"].split()),
        tuple(settings),
        tuple(Evidence(**evidence) for evidence in entry["evidence"]),
    )


SIDES = {
    "train": "Trainer",
    "engine": "Engine",
    "estimator": "Loss (changes weights, removes nothing)",
}


def trials(fix: Fix) -> list[str]:
    """The commands that try it."""
    asked = [Chosen(fix, value).label for value in fix.values] or [fix.id]
    lines = [f"mismatch check --model MODEL --fix {name}" for name in asked]
    return [*lines, "mismatch corrections RUN"] if fix.side == "estimator" else lines


def sentence(text: str) -> str:
    """A phrase as a sentence; a first word that is a setting's name stays as it is."""
    first = text.partition(" ")[0]
    start = text[:1] if set(first) & set("_=.") else text[:1].upper()
    return f"{start}{text[1:]}."
