"""What is known of each fix: why it helps, when it hurts, how each framework sets it, evidence.

Read from guide-*.toml and metrics/corrections.toml, the one source of ``mismatch fixes``, of
docs/fixes and of the settings that a report shows.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from mismatch.errors import MismatchError
from mismatch.frameworks import Recipe
from mismatch.metrics.correction_settings import recipes
from mismatch.metrics.importance_weights import Settings

GUIDES: dict[Literal["train", "engine", "estimator"], str] = {
    "train": "guide-train.toml",
    "engine": "guide-engine.toml",
    "estimator": "guide-estimator.toml",
}
SIDES = {
    "train": "Trainer",
    "engine": "Engine",
    "estimator": "Loss (changes weights, removes nothing)",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One published or measured fact."""

    text: str
    source: str
    read: bool = True
    """It was read in the source; False: second-hand."""


@dataclass(frozen=True, slots=True)
class Guide:
    """The page of one fix."""

    id: str
    changes: str
    """What it changes, and why that removes mismatch."""
    worse: str
    """When it makes things worse, or hides something."""
    settings: tuple[Recipe, ...]
    evidence: tuple[Evidence, ...]


def guide_of(name: str) -> Guide:
    """Return the guide of a fix.

    Raises:
        MismatchError: there is none.
    """
    guide = guides().get(name)
    if guide is None:
        raise MismatchError(f"no guide to the fix {name!r}", f"one of: {', '.join(guides())}")
    return guide


def settings_of(name: str) -> tuple[Recipe, ...]:
    """Return how frameworks set a fix; empty where nothing is known of it."""
    guide = guides().get(name)
    return guide.settings if guide else ()


@cache
def read(name: str) -> dict[str, dict[str, Any]]:
    """Return one of the TOML files next to this file, by id of the fix."""
    text = resources.files("mismatch.experiments.fixes").joinpath(name).read_text("utf-8")
    return tomllib.loads(text)


@cache
def guides() -> dict[str, Guide]:
    """Return all of them, by id of the fix."""
    found = {}
    for file in GUIDES.values():
        for id, entry in read(file).items():
            settings = [
                Recipe.of(setting["framework"], setting, setting["source"])
                for setting in entry.get("settings", ())
            ]
            if correction := entry.get("correction"):
                settings = [*recipes(correction, Settings()), *settings]
            found[id] = Guide(
                id,
                " ".join(entry["changes"].split()),
                " ".join(entry["worse"].split()),
                tuple(settings),
                tuple(Evidence(**evidence) for evidence in entry["evidence"]),
            )
    return found


def sentence(text: str) -> str:
    """Return a phrase as a sentence; a first word that is a setting's name stays as it is."""
    first = text.partition(" ")[0]
    start = text[:1] if set(first) & set("_=.") else text[:1].upper()
    return f"{start}{text[1:]}."
