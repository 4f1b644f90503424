"""A probe of the weight sync as JSON data, and back."""

from __future__ import annotations

from typing import Any

from mismatch.codec import object_schema, to_json, with_verdict, without_verdict
from mismatch.experiments.sync.judge import judge
from mismatch.experiments.sync.types import SyncReport, SyncVerdict

SCHEMA = "mismatch.sync-probe/1"
FILE = "sync-probe.json"
COMMAND, PAGE = "mismatch sync-probe", "docs/sync-probe.md"


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    definitions: dict[str, Any] = {}
    verdict = object_schema(SyncVerdict, definitions)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA}
    return {
        **head,
        **with_verdict(SyncReport, SCHEMA, verdict, definitions),
        "$defs": definitions,
    }


def sync_to_json(report: SyncReport) -> dict[str, Any]:
    """The report as JSON data, with its verdict."""
    return {"schema": SCHEMA, "verdict": to_json(judge(report)), **to_json(report)}


def sync_from_json(document: Any) -> SyncReport:
    """The inverse of :func:`sync_to_json`; raises as :func:`mismatch.codec.without_verdict`."""
    return without_verdict(SyncReport, document, SCHEMA, command=COMMAND, page=PAGE)
