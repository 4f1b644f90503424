"""``against.json``: a new run against an old one as plain data, schema ``mismatch.against/1``."""

from __future__ import annotations

import dataclasses
from typing import Any

from mismatch.experiments.regression.types import Against
from mismatch.json_values import packaged_schema, plain
from mismatch.types import Comparison

SCHEMA = "mismatch.against/1"


def schema() -> dict[str, Any]:
    """The JSON schema of the document, as shipped in the package."""
    return packaged_schema("against-1.json")


def against_to_json(made: Against) -> dict[str, Any]:
    """All of it; numbers are finite or null."""
    return {
        "schema": SCHEMA,
        "outcome": made.outcome,
        "fails": made.fails,
        "reason": made.reason,
        "margin": made.margin,
        "old": plain(dataclasses.asdict(made.old)),
        "new": plain(dataclasses.asdict(made.new)),
        "prompts": made.prompts,
        "same_tokens": made.same_tokens,
        "same_sequences": made.same_sequences,
        "metrics": {row.metric: _row(dataclasses.asdict(row)) for row in made.rows},
        "changed": [dataclasses.asdict(one) for one in made.changed],
        "engines": None if made.engines is None else _engines(made.engines),
        "notes": list(made.notes),
        "method": made.method,
    }


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {key: plain(value) for key, value in row.items() if key != "metric"}


def _engines(made: Comparison) -> dict[str, Any]:
    entry = dataclasses.asdict(made)
    return {key: plain(value) for key, value in entry.items() if key != "breakdowns"}
