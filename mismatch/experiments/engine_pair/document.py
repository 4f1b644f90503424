"""Two engines and the trainer: the field ``engines`` of ``report.json``, and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mismatch.experiments.engine_pair.types import Contrast, Edge, EngineRow, Triangle
from mismatch.json_values import (
    estimate_from_json,
    pair_from_json,
    pair_to_json,
    plain,
    verdict_from_json,
)


def engines_to_json(made: Triangle | None) -> dict[str, Any]:
    """The field of a report, absent where one engine ran."""
    if made is None:
        return {}
    return {
        "engines": {
            "sides": [_side(one) for one in made.engines],
            "edges": [_edge(one) for one in made.edges],
            "contrasts": [plain(dataclasses.asdict(one)) for one in made.contrasts],
            "odd": made.odd,
            "factor": plain(made.factor),
            "reason": made.reason,
            "not_tested": list(made.not_tested),
        }
    }


def engines_from_json(document: dict[str, Any]) -> Triangle | None:
    """The inverse, of the whole report; None where one engine ran.

    Raises:
        KeyError, TypeError: a field is missing or unknown.
    """
    entry = document.get("engines")
    if entry is None:
        return None
    first, second = (_read_side(one, document["fingerprints"]) for one in entry["sides"])
    contrasts = [
        Contrast(**{**one, "difference": estimate_from_json(one["difference"])})
        for one in entry["contrasts"]
    ]
    factor = entry["factor"]
    return Triangle(
        engines=(first, second),
        edges=tuple(_read_edge(one) for one in entry["edges"]),
        contrasts=tuple(contrasts),
        odd=entry["odd"],
        factor=math.inf if factor is None and entry["odd"] is not None else factor,
        reason=entry["reason"],
        not_tested=tuple(entry["not_tested"]),
    )


def _side(one: EngineRow) -> dict[str, Any]:
    """Without the fingerprint: that stands among the report's others."""
    return {
        "engine": one.engine,
        "version": one.version,
        "place": one.place,
        "verdict": None if one.verdict is None else plain(dataclasses.asdict(one.verdict)),
    }


def _read_side(entry: dict[str, Any], fingerprints: dict[str, Any]) -> EngineRow:
    facts = fingerprints.get(f"{entry['engine']}:decode", {})
    verdict = None if entry["verdict"] is None else verdict_from_json(entry["verdict"])
    return EngineRow(**{**entry, "fingerprint": facts, "verdict": verdict})


def _edge(one: Edge) -> dict[str, Any]:
    return {
        "parties": list(one.parties),
        "tokens": one.tokens,
        "kind": one.kind,
        "comparison": None if one.comparison is None else pair_to_json(one.comparison),
        "reason": one.reason,
    }


def _read_edge(entry: dict[str, Any]) -> Edge:
    made = entry["comparison"]
    comparison = None if made is None else pair_from_json(made)
    first, second = entry["parties"]
    return Edge((first, second), entry["tokens"], entry["kind"], comparison, entry["reason"])
