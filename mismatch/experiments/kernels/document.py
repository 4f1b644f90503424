"""``kernels.json``: an audit of kernels as plain data, schema ``mismatch.kernels/1``.

The JSON schema is shipped beside this module (:func:`schema`); the fields are explained in
docs/kernels.md. A report of a run holds the same document under ``kernels``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mismatch.experiments.kernels.types import Audit, AuditReport, Cost, Error, Finding, Harm
from mismatch.experiments.kernels.verdict import judge
from mismatch.json_values import packaged_schema, plain, read_document

SCHEMA = "mismatch.kernels/1"
FILE = "kernels.json"


def schema() -> dict[str, Any]:
    """The JSON schema of the document, as shipped in the package."""
    return packaged_schema("kernels-1.json")


def kernels_to_json(report: AuditReport) -> dict[str, Any]:
    """The audit as JSON data; numbers are finite or null.

    Raises:
        MismatchError: nothing was audited.
    """
    verdict = judge(report)
    return {
        "schema": SCHEMA,
        "verdict": {"status": verdict.status, "reason": verdict.reason},
        **plain(dataclasses.asdict(report)),
    }


def kernels_from_json(document: Any) -> AuditReport:
    """The inverse of :func:`kernels_to_json`.

    Raises:
        MismatchError: no such document, a schema of another version, or a missing field (named).
    """
    return read_document(
        document, SCHEMA, _read, command="mismatch kernels", page="docs/kernels.md"
    )


def _read(document: dict[str, Any]) -> AuditReport:
    return AuditReport(
        model=document["model"],
        device=document["device"],
        geometry=document["geometry"],
        audits=tuple(audit_from_json(one) for one in document["audits"]),
        facts=document["facts"],
        not_tested=tuple(document["not_tested"]),
    )


def optional_kernels(report: AuditReport | None) -> dict[str, Any]:
    """The field of a run's report; absent where no audit was made."""
    return {} if report is None else {"kernels": kernels_to_json(report)}


def optional_from_json(document: dict[str, Any] | None) -> AuditReport | None:
    """The inverse of :func:`optional_kernels`, of the field."""
    return None if document is None else kernels_from_json(document)


def of_run(run_dir: Path | str) -> AuditReport | None:
    """The audit that ``mismatch kernels --run`` left in a run directory; None where there is none.

    Raises:
        MismatchError: it is damaged.
    """
    from mismatch.run import store

    if not (Path(run_dir) / FILE).exists():
        return None
    return kernels_from_json(store.load_document(run_dir, FILE))


def audit_to_json(one: Audit) -> dict[str, Any]:
    """One implementation: what the audit's process leaves on disk."""
    found: dict[str, Any] = plain(dataclasses.asdict(one))
    return found


def audit_from_json(entry: dict[str, Any]) -> Audit:
    """The inverse of :func:`audit_to_json`.

    Raises:
        KeyError, TypeError: a field is missing or unknown.
    """
    return Audit(
        **{
            **entry,
            "findings": tuple(Finding(**one) for one in entry["findings"]),
            "errors": tuple(Error(**one) for one in entry["errors"]),
            "costs": tuple(Cost(**one) for one in entry["costs"]),
            "harm": harm_from_json(entry["harm"]),
        }
    )


def harm_from_json(entry: dict[str, Any] | None) -> Harm | None:
    """What a kernel does to the model, with the numbers that it is held against."""
    if entry is None:
        return None
    return Harm(**{**entry, "baseline": harm_from_json(entry["baseline"])})
