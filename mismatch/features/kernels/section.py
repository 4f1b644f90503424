"""An audit of kernels: every implementation of attention and experts against float64."""

from __future__ import annotations

from functools import partial

from mismatch.features.kernels.results import (
    ATTENTION_COLUMNS,
    EXPERT_COLUMNS,
    Audit,
    AuditReport,
    Kind,
    causes_of,
    judge,
    word_of,
)
from mismatch.reports.formatting import brief, scientific, text
from mismatch.reports.section import Cell, Cells, Column, Section, Table, not_tested

LEAD = (
    "Each implementation ran by itself on inputs of the model's shapes, forward and backward, and "
    "was compared with a plain float64 one."
)
KINDS: dict[Kind, tuple[str, tuple[str, ...]]] = {
    "attention": ("Attention", ATTENTION_COLUMNS),
    "experts": ("Experts", EXPERT_COLUMNS),
}
NARROW = {  # lines of at most five characters for a terminal
    "accepts": "fits",
    "sinks": "sinks",
    "window": "win-\ndow",
    "packing": "pack-\ning",
    "offsets": "off-\nsets",
    "grouped_queries": "GQA",
    "scaling": "sca-\nling",
    "forward": "out-\nput",
    "gradient": "grad",
    "sink_gradient": "sink\ngrad",
    "router_gradient": "rout\ngrad",
    "repeats": "re-\npeat",
    "batches": "bat-\nches",
}
LEGEND = (
    "✓ right, ✕ wrong, ! differs and is only reported, · not tested. Repeats: the same bits twice; "
    "batches: the same bits whatever else is in the batch."
)
FLOOR = (
    "Relative, in the 2-norm, against float64. The floor is what rounding inputs and output alone "
    "gives."
)
ERRORS = (
    *(Column("implementation", text), Column("dtype", text), Column("output", scientific)),
    *(Column("largest gradient", scientific), Column("of", text)),
)
OTHERS = Column("implementation", text, of="name"), Column("why", text, of="reason")
GRADIENTS = ("q", "k", "v", "hidden", "gate_up", "down", "sinks", "router")


def section(result: AuditReport) -> Section:
    """Show what is wrong, and a table of marks for each kind."""
    verdict, texts = judge(result), sentences(result)
    about = f"{verdict.status}: {verdict.reason}"
    return Section(
        "kernels",
        "Kernels",
        f"{LEAD} Shapes of {result.model}: {_shape(result)}; on {result.device}.",
        warnings=[f"kernels: {about}" if verdict.code else ""],
        sentences=texts,
        notes=not_tested(result.not_tested),
        parts=[_kind(result, kind) for kind in KINDS],
    )


def sentences(report: AuditReport) -> list[str]:
    """Say what is wrong, what ended, what is right, and what a trainer takes."""
    texts = [_fault(audit) for audit in report.audits if audit.answered and audit.failed]
    texts += [
        f"{audit.name}: {audit.reason}."
        for audit in report.audits
        if audit.was_run and not audit.answered
    ]
    for kind, (title, _) in KINDS.items():
        right = [a.name for a in report.audits if a.kind == kind and a.verdict == "sound"]
        if right:
            texts.append(f"{title}: nothing wrong with {', '.join(right)}.")
    return texts + [
        f"The trainer takes {audit.name} by itself ({audit.kind}): it is {audit.verdict}."
        for audit in report.audits
        if audit.chosen
    ]


def _fault(audit: Audit) -> str:
    causes = causes_of(audit.failed)
    others = [word_of(each.column) for each in audit.failed if each not in causes]
    wrong = "; ".join(f"{word_of(each.column)}: {each.detail}" for each in causes)
    sentence = f"{audit.name} is wrong: {wrong}{'; also ' + ', '.join(others) if others else ''}."
    if audit.verdict == "unusable":
        sentence += f" It cannot be taken here: {audit.reason}."
    return sentence


def _shape(report: AuditReport) -> str:
    shape = report.geometry
    parts = ["{heads} query heads, {kv_heads} key heads", "head size {head_dim}"]
    parts += ["window {window:,}"] if shape["window"] else []
    parts += ["{top_k} of {experts} experts"] if shape["experts"] else []
    parts += ["with sinks" if shape["sinks"] else "no sinks"]
    return ", ".join(parts).format(**shape)


def _kind(report: AuditReport, kind: Kind) -> Section:
    """Show attention or experts; empty without any implementation."""
    title, names = KINDS[kind]
    audits = [audit for audit in report.audits if audit.kind == kind]
    ran = [audit for audit in audits if audit.answered]
    others = [audit for audit in audits if not audit.answered]
    unusable = [a.name for a in others if a.origin != "yours" and not a.crashed]
    columns = (
        Column("implementation", text, of=_name),
        *(
            Column(word_of(name), text, narrow=NARROW[name], of=partial(mark, name))
            for name in names
        ),
    )

    def part(id: str, words: str, table: Table, lead: str = "") -> Section:
        return Section(f"kernels-{kind}-{id}", f"{title}: {words}", lead, tables=[table])

    return Section(
        f"kernels-{kind}",
        title,
        tables=[Table.of(columns, ran)],
        notes=[
            LEGEND if ran else "",
            f"Not usable here: {', '.join(unusable)}." if unusable else "",
        ],
        parts=[
            part("errors", "errors per dtype", _errors(ran), FLOOR),
            part("others", "not run here, or not to the end", Table.of(OTHERS, others)),
        ],
        folded=False,
    )


def _name(audit: Audit) -> Cell:
    notes = [audit.origin, "what auto takes" if audit.chosen else "", audit.verdict]
    notes.append(audit.reason if audit.verdict == "unusable" else "")
    return Cell(short(audit), note="; ".join(filter(None, notes)))


def short(audit: Audit) -> str:
    """Return its name; of the user's own the function alone."""
    return audit.name.rpartition(":")[2] if audit.origin == "yours" else audit.name


def mark(column: str, audit: Audit) -> Cell:
    """Return a finding as a cell without words."""
    finding = audit.finding(column)
    if finding is None or finding.outcome == "not_tested":
        return Cell("·", "dim")
    if finding.outcome == "passed":
        return Cell("", "healthy")
    note = "" if finding.value is None else brief(finding.value)
    return Cell("", "critical" if finding.critical else "warn", note)


def _errors(ran: list[Audit]) -> Table:
    """Show every gradient; the largest has a separate column, which a terminal keeps."""
    recorded = {name for audit in ran for error in audit.errors for name in error.gradients}
    names = [name for name in GRADIENTS if name in recorded] + sorted(recorded - set(GRADIENTS))
    rows: list[Cells] = []
    for audit, error in ((a, error) for a in ran for error in a.errors):
        each = error.gradients
        worst = max(each, key=lambda name: each[name] or 0.0, default="")
        row = (short(audit), error.dtype, error.forward, each.get(worst), worst)
        rows.append((*row, *(each.get(name) for name in names), error.floor))
    gradients = (Column(name, scientific, 1, detail="gradient") for name in names)
    return Table((*ERRORS, *gradients, Column("floor", scientific)), rows)
