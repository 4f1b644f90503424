"""A preview of corrections as JSON data, and back: the field ``corrections`` of report.json."""

from __future__ import annotations

import dataclasses
from typing import Any

from mismatch.analysis.corrections.recipes import recipes
from mismatch.analysis.corrections.types import Against, Corrections, Preview
from mismatch.json_values import plain
from mismatch.metrics.corrections import Settings
from mismatch.types import Estimate


def corrections_to_json(made: Corrections) -> dict[str, Any]:
    """Dicts, lists, strings, finite numbers, booleans and null."""
    document = plain(dataclasses.asdict(made))
    document["previews"] = [plain(dataclasses.asdict(one)) for one in made.previews]
    known = [] if made.best is None else recipes(made.best, made.settings)
    document["recipes"] = [plain(dataclasses.asdict(one)) for one in known]
    return dict(document)


def optional_corrections(made: Corrections | None) -> dict[str, Any]:
    """The field of a report, absent where nothing was previewed."""
    return {} if made is None else {"corrections": corrections_to_json(made)}


def corrections_from_json(document: dict[str, Any] | None) -> Corrections | None:
    """The inverse; the recipes are not read: they follow from the rest.

    Raises:
        KeyError, TypeError: a field is missing or unknown.
    """
    if document is None:
        return None
    fields = {key: value for key, value in document.items() if key != "recipes"}
    bounds: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in document["settings"].items()
    }
    return Corrections(
        **{
            **fields,
            "settings": Settings(**bounds),
            "previews": tuple(_preview(entry) for entry in document["previews"]),
            "not_tested": tuple(document["not_tested"]),
        }
    )


def _preview(entry: dict[str, Any]) -> Preview:
    sides = {key: _against(entry[key]) for key in ("token", "sequence")}
    return Preview(**{**entry, **sides, "ess": _estimate(entry["ess"])})


def _against(entry: dict[str, Any] | None) -> Against | None:
    if entry is None:
        return None
    names = ("bias", "distance", "cosine", "norm_ratio")
    return Against(**{**entry, **{name: _estimate(entry[name]) for name in names}})


def _estimate(entry: dict[str, Any] | None) -> Estimate | None:
    return None if entry is None else Estimate(**{**entry, "flags": tuple(entry["flags"])})
