"""``kernels.json``: an audit of kernels as plain data, schema ``mismatch.kernels/1``.

The fields are explained in docs/kernels.md. A report of a run holds the same under ``kernels``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch.codec import fields_of, from_json, object_schema, refused, to_json
from mismatch.experiments.kernels.types import AuditReport
from mismatch.experiments.kernels.verdict import judge

SCHEMA = "mismatch.kernels/1"
FILE = "kernels.json"
COMMAND, PAGE = "mismatch kernels", "docs/kernels.md"


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    definitions: dict[str, Any] = {}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA}
    return {**head, **kernels_schema(definitions), "$defs": definitions}


def kernels_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    """The same as a part of another schema."""
    audit = object_schema(AuditReport, definitions)
    verdict = {
        "type": "object",
        "properties": {"status": {"enum": ["sound", "wrong"]}, "reason": {"type": "string"}},
        "required": ["status", "reason"],
        "additionalProperties": False,
    }
    head = {"schema": {"const": SCHEMA}, "verdict": verdict}
    return audit | {
        "properties": head | audit["properties"],
        "required": [*head, *audit["required"]],
    }


def kernels_to_json(report: AuditReport) -> dict[str, Any]:
    """The audit as JSON data; numbers are finite or null.

    Raises:
        MismatchError: nothing was audited.
    """
    verdict = judge(report)
    head = {"status": verdict.status, "reason": verdict.reason}
    return {"schema": SCHEMA, "verdict": head, **to_json(report)}


def kernels_from_json(document: Any) -> AuditReport:
    """The inverse of :func:`kernels_to_json`; the verdict is not read: it follows from the rest.

    Raises:
        MismatchError: no such document, a schema of another version, or a field that does not fit.
    """
    fields = fields_of(document, SCHEMA, command=COMMAND)
    fields.pop("verdict", None)
    with refused(SCHEMA, command=COMMAND, page=PAGE):
        return from_json(AuditReport, fields)


def of_run(run_dir: Path | str) -> AuditReport | None:
    """The audit that ``mismatch kernels --run`` left in a run directory; None where there is none.

    Raises:
        MismatchError: it is damaged.
    """
    from mismatch.run import store

    if not (Path(run_dir) / FILE).exists():
        return None
    return kernels_from_json(store.load_document(run_dir, FILE))
