"""The verdict of an audit: a word, a sentence, an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mismatch.codec import fields_of, from_json, object_schema, refused, to_json
from mismatch.errors import MismatchError
from mismatch.experiments.kernels.types import Audit, AuditReport, Finding

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


SHORT = {
    "forward": "output",
    "grouped_queries": "grouped queries",
    "sink_gradient": "sinks' gradient",
    "router_gradient": "router's gradient",
}
# A kernel that ignores a feature has another output too, and another gradient.
CONSEQUENCES = ("forward", "gradient", "sink_gradient")
ENDED = ("crashed: ", "timed out: ")  # how the reason begins of one that took its process with it


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """The last line.

    >>> KernelVerdict("sound", "2 of 2 are right", 0).code
    0

    Attributes:
        code: of the command: 0 or 1.
    """

    status: Literal["sound", "wrong"]
    reason: str
    code: int

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"verdict: {self.status} – {self.reason}"


def judge(report: AuditReport) -> KernelVerdict:
    """Wrong as soon as a run could use one that is wrong, or one of the user's own did not pass.

    Raises:
        MismatchError: no implementation was run at all.
    """
    ran = [one for one in report.audits if was_run(one)]
    if not ran:
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in report.audits[:4])
        said = f" ({reasons})" if reasons else ""
        raise MismatchError(
            f"no implementation was audited for {report.model}{said}",
            "drop --only and --name, or name one that runs here: eager",
        )
    bad = blamed(report)
    if not bad:
        sound = [one for one in ran if one.verdict == "sound"]
        if not sound:
            reason = f"none of the {len(ran)} that ran can be used here for this model"
            return KernelVerdict("wrong", reason, 1)
        return KernelVerdict("sound", f"{_named(sound)}: nothing wrong{_refused(ran)}", 0)
    named = "; ".join(f"{one.name}: {why(one)}" for one in bad[:3])
    more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    return KernelVerdict("wrong", named + more, 1)


def _named(sound: Sequence[Audit]) -> str:
    """Names by kind: both have an ``eager``."""
    kinds = dict.fromkeys(one.kind for one in sound)
    said = {kind: ", ".join(one.name for one in sound if one.kind == kind) for kind in kinds}
    if len(said) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{kind} {names}" for kind, names in said.items())


def _refused(ran: Sequence[Audit]) -> str:
    """Those that are wrong and decide nothing, since no run could use them."""
    names = [one.name for one in ran if not one.usable and one.failed and answered(one)]
    return f" ({', '.join(names)}: wrong, but not usable here)" if names else ""


def causes_of(failed: Sequence[Finding]) -> list[Finding]:
    """The failures that are no consequence of another one."""
    causes = [finding for finding in failed if finding.column not in CONSEQUENCES]
    return causes or list(failed)


def blamed(report: AuditReport) -> list[Audit]:
    """Audits that make the verdict wrong: usable and wrong, or the user's own and not sound."""
    yours = [a for a in report.audits if a.origin == "yours" and a.verdict != "sound"]
    return [audit for audit in report.audits if audit in report.wrong or audit in yours]


def was_run(audit: Audit) -> bool:
    """Whether it was run: it has findings, its process ended, or it is the user's own."""
    return answered(audit) or ended(audit) or audit.origin == "yours"


def answered(audit: Audit) -> bool:
    """Whether any check beside "accepts" was run."""
    return any(f.outcome != "not_tested" for f in audit.findings if f.column != "accepts")


def ended(audit: Audit) -> bool:
    """Whether its process crashed, hung or was killed."""
    return audit.reason.startswith(ENDED)


def why(audit: Audit) -> str:
    """The first two failed checks, or the reason."""
    if audit.failed:
        named = ", ".join(SHORT.get(f.column, f.column) for f in audit.failed[:2])
        more = len(audit.failed) - 2
        return f"{named} and {more} more" if more > 0 else named
    return audit.reason
