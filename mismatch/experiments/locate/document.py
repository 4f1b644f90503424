"""The document of ``mismatch locate``: ``locate.json``, and a part of report.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from mismatch.codec import fields_of, from_json, object_schema, refused, to_json
from mismatch.experiments.locate.judge import judge
from mismatch.experiments.locate.types import Location, Status
from mismatch.run import store

SCHEMA, FILE = "mismatch.locate/1", "locate.json"
COMMAND, PAGE = "mismatch locate", "docs/locate.md"


def to_document(found: Location) -> dict[str, Any]:
    """As JSON data, with the verdict."""
    verdict = judge(found)
    head = {"status": verdict.status, "reason": verdict.reason}
    return {"schema": SCHEMA, "verdict": head, **to_json(found)}


def from_document(document: Any) -> Location:
    """The inverse of :func:`to_document`.

    Raises:
        MismatchError: no such document, or one of another version.
    """
    fields = fields_of(document, SCHEMA, command=COMMAND)
    fields.pop("verdict", None)
    with refused(SCHEMA, command=COMMAND, page=PAGE):
        return from_json(Location, fields)


def of_run(run_dir: Path | str) -> Location | None:
    """What ``mismatch locate`` left in a run; None where it left nothing.

    Raises:
        MismatchError: it is damaged.
    """
    if not (Path(run_dir) / FILE).exists():
        return None
    return from_document(store.load_document(run_dir, FILE))


def document_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of the document, as a part of another."""
    location = object_schema(Location, definitions)
    verdict = {
        "type": "object",
        "properties": {
            "status": {"enum": list(get_args(Status))},
            "reason": {"type": "string"},
        },
        "required": ["status", "reason"],
        "additionalProperties": False,
    }
    head = {"schema": {"const": SCHEMA}, "verdict": verdict}
    return location | {
        "properties": head | location["properties"],
        "required": [*head, *location["required"]],
    }
