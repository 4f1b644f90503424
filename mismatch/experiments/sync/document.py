"""A probe of the weight sync as JSON data, and back."""

from __future__ import annotations

from typing import Any

from mismatch.codec import fields_of, from_json, object_schema, refused, to_json
from mismatch.experiments.sync.judge import judge
from mismatch.experiments.sync.types import SyncReport, SyncVerdict

SCHEMA = "mismatch.sync-probe/1"
FILE = "sync-probe.json"
COMMAND, PAGE = "mismatch sync-probe", "docs/sync-probe.md"


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    definitions: dict[str, Any] = {}
    report = object_schema(SyncReport, definitions)
    verdict = object_schema(SyncVerdict, definitions)
    head = {"schema": {"const": SCHEMA}, "verdict": verdict}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        **report,
        "properties": head | report["properties"],
        "required": [*head, *report["required"]],
        "$defs": definitions,
    }


def sync_to_json(report: SyncReport) -> dict[str, Any]:
    """The report as JSON data, with its verdict."""
    return {"schema": SCHEMA, "verdict": to_json(judge(report)), **to_json(report)}


def sync_from_json(document: Any) -> SyncReport:
    """The inverse of :func:`sync_to_json`; the verdict is not read: it follows from the rest.

    Raises:
        MismatchError: no such document, a schema of another version, or a field that does not fit.
    """
    fields = fields_of(document, SCHEMA, command=COMMAND)
    fields.pop("verdict", None)
    with refused(SCHEMA, command=COMMAND, page=PAGE):
        return from_json(SyncReport, fields)
