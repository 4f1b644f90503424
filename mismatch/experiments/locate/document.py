"""The document of ``mismatch locate``: ``locate.json``, and a part of report.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from mismatch.codec import status_schema, to_json, with_verdict, without_verdict
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
    """The inverse of :func:`to_document`; raises as :func:`mismatch.codec.without_verdict`."""
    return without_verdict(Location, document, SCHEMA, command=COMMAND, page=PAGE)


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
    return with_verdict(Location, SCHEMA, status_schema(get_args(Status)), definitions)
