"""``against.json``: a new run against an old one as plain data, schema ``mismatch.against/1``."""

from __future__ import annotations

from typing import Any

from mismatch.codec import fields_of, from_json, object_schema, refused, to_json
from mismatch.experiments.regression.types import Against

SCHEMA = "mismatch.against/1"
COMMAND, PAGE = "mismatch compare NEW --against OLD", "docs/runs.md"


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    definitions: dict[str, Any] = {}
    whole = object_schema(Against, definitions)
    row = definitions["AgainstRow"]
    for definition, field in ((row, "metric"), (definitions["Comparison"], "breakdowns")):
        del definition["properties"][field]
        definition["required"] = list(definition["properties"])
    by_metric = {"type": "object", "additionalProperties": {"$ref": "#/$defs/AgainstRow"}}
    properties = {
        "metrics" if name == "rows" else name: by_metric if name == "rows" else kind
        for name, kind in whole["properties"].items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        **whole,
        "properties": {"schema": {"const": SCHEMA}, **properties},
        "required": ["schema", *properties],
        "$defs": definitions,
    }


def against_to_json(made: Against) -> dict[str, Any]:
    """All of it, rows by metric; numbers are finite or null."""
    fields = to_json(made)
    rows = {row.pop("metric"): row for row in fields["rows"]}
    if fields["engines"] is not None:
        del fields["engines"]["breakdowns"]  # few metrics only, and none of them broken down
    return {
        "schema": SCHEMA,
        **{"metrics" if name == "rows" else name: rows if name == "rows" else value
           for name, value in fields.items()},
    }  # fmt: skip


def against_from_json(document: Any) -> Against:
    """The inverse of :func:`against_to_json`.

    Raises:
        MismatchError: no such document, a schema of another version, or a field that does not fit.
    """
    fields = fields_of(document, SCHEMA, command=COMMAND)
    rows = fields.pop("metrics", {})
    fields["rows"] = [{"metric": metric, **row} for metric, row in rows.items()]
    with refused(SCHEMA, command=COMMAND, page=PAGE):
        return from_json(Against, fields)
