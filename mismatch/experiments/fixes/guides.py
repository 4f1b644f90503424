"""What to know about each fix, and how frameworks set it: the text of its page.

The text lies in ``guide-*.toml`` beside this module. docs/fixes/ is made of it, and
``mismatch fixes ID`` prints its essentials. Keys of frameworks are read from the sources that each
setting names; evidence that was not read in its source is marked second-hand.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from mismatch.analysis.corrections.recipes import Recipe, recipes
from mismatch.errors import MismatchError
from mismatch.metrics.corrections import Settings


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


VERSIONS = {  # what the keys were read from; a source without a path names itself
    "verl": "verl 0.9.1",
    "TRL": "TRL 1.16.0",
    "SkyRL": "SkyRL 0.3.0",
    "NeMo-RL": "NeMo-RL main (2026)",
    "prime-rl": "prime-rl main (2026)",
    "slime": "slime main (2026)",
    "miles": "miles main (2026)",
}
FILES = ("guide-train.toml", "guide-engine.toml", "guide-estimator.toml")


def guide_of(name: str) -> Guide:
    """The guide of a fix.

    Raises:
        MismatchError: there is none.
    """
    found = guides().get(name)
    if found is None:
        raise MismatchError(f"no guide to the fix {name!r}", f"one of: {', '.join(guides())}")
    return found


def settings_of(name: str) -> tuple[Recipe, ...]:
    """How frameworks set a fix; empty where nothing is known of it."""
    found = guides().get(name)
    return found.settings if found else ()


@cache
def guides() -> dict[str, Guide]:
    """All of them, by id of the fix."""
    found = {}
    for name in FILES:
        text = resources.files("mismatch.experiments.fixes").joinpath(name).read_text("utf-8")
        for id, entry in tomllib.loads(text).items():
            found[id] = _guide(id, entry)
    return found


def _source(framework: str, source: str) -> str:
    version = VERSIONS.get(framework)
    return source if version is None or "#" in source.partition(";")[0] else f"{version}, {source}"


def _guide(id: str, entry: dict[str, Any]) -> Guide:
    settings = [
        Recipe(
            one["framework"],
            tuple(one.get("lines", "").strip("\n").splitlines()),
            one.get("remark", ""),
            _source(one["framework"], one["source"]),
        )
        for one in entry.get("settings", ())
    ]
    if correction := entry.get("correction"):
        settings = [*recipes(correction, Settings()), *settings]
    return Guide(
        id,
        " ".join(entry["changes"].split()),
        " ".join(entry["worse"].split()),
        tuple(settings),
        tuple(Evidence(**one) for one in entry["evidence"]),
    )
