"""How frameworks switch a correction of the loss on, read from corrections.toml."""

from __future__ import annotations

import tomllib
from importlib import resources

from mismatch.frameworks import Recipe
from mismatch.metrics.importance_weights import Settings


def recipes(correction: str, settings: Settings) -> tuple[Recipe, ...]:
    """Return how each framework switches a correction of the loss on, with these bounds.

    A framework that has no such correction says so: a near miss is not offered as the same.
    """
    text = resources.files("mismatch.metrics").joinpath("corrections.toml").read_text("utf-8")
    tables = tomllib.loads(text)
    low, high = settings.geometric
    clip = 1.0 - settings.gspo[0], settings.gspo[1] - 1.0
    bounds = {"s": settings, "inverse": (1.0 / high, 1.0 / low), "clip": clip}
    found = []
    for framework, source in tables["sources"].items():
        entry = tables.get(correction, {}).get(framework)
        if entry is not None:
            entry = entry | {"lines": entry.get("lines", "").format(**bounds)}
        elif framework in tables["missing"]:
            entry = {"remark": tables["missing"][framework]}
        if entry is not None:
            found.append(Recipe.of(framework, entry, entry.get("source", source)))
    return tuple(found)
