"""An audit of kernels: every implementation of attention and experts against float64."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mismatch.features.kernels.results import (
    ATTENTION_COLUMNS,
    EXPERT_COLUMNS,
    Audit,
    AuditReport,
    Kind,
    answered,
    causes_of,
    judge,
    was_run,
)
from mismatch.reports.formatting import (
    bound,
    brief,
    line,
    scientific,
    text,
)
from mismatch.reports.section import (
    Cell,
    Cells,
    Column,
    Figure,
    Page,
    Section,
    Table,
    named,
    not_tested,
)
from mismatch.reports.svg import ACCENT, BAND, FAINT, INK, SECOND, legend_above, rows_of
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAD = (
    "Each implementation ran by itself on inputs of the model's shapes, forward and backward, and "
    "was compared with a plain float64 one."
)
KINDS: dict[Kind, tuple[str, tuple[str, ...]]] = {
    "attention": ("Attention", ATTENTION_COLUMNS),
    "experts": ("Experts", EXPERT_COLUMNS),
}
ORIGINS = {"ours": "mismatch", "transformers": "transformers", "yours": "yours"}
WORDS = {  # column -> its name, and in lines of at most five characters for a terminal
    "accepts": ("accepts", "fits"),
    "sinks": ("sinks", "sinks"),
    "window": ("window", "win-\ndow"),
    "packing": ("packing", "pack-\ning"),
    "offsets": ("offsets", "off-\nsets"),
    "grouped_queries": ("grouped queries", "GQA"),
    "scaling": ("scaling", "sca-\nling"),
    "forward": ("output", "out-\nput"),
    "gradient": ("gradient", "grad"),
    "sink_gradient": ("sinks' gradient", "sink\ngrad"),
    "router_gradient": ("router's gradient", "rout\ngrad"),
    "repeats": ("repeats", "re-\npeat"),
    "batches": ("batches", "bat-\nches"),
}
LEGEND = (
    "✓ right, ✕ wrong, ! differs and is only reported, · not tested. Repeats: the same bits twice; "
    "batches: the same bits whatever else is in the batch."
)
NAME = Column("implementation", text)
FINDING_COLUMNS = (
    NAME,
    Column("check", text),
    Column("result", text),
    Column("value", scientific, 1),
    Column("limit", scientific, 2),
    Column("found", text),
)
GRADIENTS = ("q", "k", "v", "hidden", "gate_up", "down", "sinks", "router")


def section(result: AuditReport, report: Report | None = None) -> Section:
    """What is wrong, and a table of marks for each kind.

    Raises:
        MismatchError: nothing was audited.
    """
    verdict, texts, shape = judge(result), sentences(result), _shape(result)
    about = f"{verdict.status}: {verdict.reason}"
    model = f"Shapes of {result.model}: {shape}" if shape else f"Model: {result.model}"
    return Section(
        "kernels",
        "Kernels",
        f"{LEAD} {model}; on {result.device}.",
        warnings=[f"kernels: {about}" if verdict.code else ""],
        sentences=texts,
        notes=not_tested(result.not_tested),
        parts=[_kind(result, kind) for kind in KINDS],
        short=texts[0] if verdict.code else about,
    )


def page(result: AuditReport) -> Page:
    """The audit as a page of its own.

    Raises:
        MismatchError: nothing was audited.
    """

    def fact(value: Any) -> str:
        if isinstance(value, dict):
            value = [f"{name} {of}" for name, of in value.items()]
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value)) or "none"
        return str(value)

    verdict = judge(result)
    created = result.facts.get("created", "")
    facts = named((name, fact(value)) for name, value in result.facts.items())
    return Page(
        kind="audit of kernels" + (f" · {created}" if created else ""),
        word="wrong" if verdict.code else "sound",
        tone="critical" if verdict.code else "healthy",
        reason=verdict.reason,
        title=result.model,
        facts=(f"{_shape(result)}; on {result.device}",),
        sections=(section(result), Section("audit", "This audit", tables=[facts])),
        file="kernels",
    )


def sentences(report: AuditReport) -> list[str]:
    """What the audit says, in plain words: first what is wrong."""
    texts = [_fault(audit) for audit in report.audits if answered(audit) and audit.failed]
    texts += [
        f"{audit.name}: {audit.reason}."
        for audit in report.audits
        if was_run(audit) and not answered(audit)
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
    """How one implementation is wrong."""
    causes = causes_of(audit.failed)
    others = [WORDS[each.column][0] for each in audit.failed if each not in causes]
    wrong = "; ".join(f"{WORDS[each.column][0]}: {each.detail}" for each in causes)
    sentence = f"{audit.name} is wrong: {wrong}{'; also ' + ', '.join(others) if others else ''}."
    if audit.verdict == "unusable":
        sentence += f" It cannot be taken here: {audit.reason}."
    return sentence


def _shape(report: AuditReport) -> str:
    """The model's shape on one line, as far as it is known."""
    shape = report.geometry
    texts = [
        (("heads", "kv_heads"), "{heads} query heads, {kv_heads} key heads"),
        (("head_dim",), "head size {head_dim}"),
        (("window",), "window {window:,}"),
        (("experts", "top_k"), "{top_k} of {experts} experts"),
    ]
    parts = [words.format(**shape) for names, words in texts if all(shape.get(n) for n in names)]
    if "sinks" in shape:
        parts.append("with sinks" if shape["sinks"] else "no sinks")
    return ", ".join(parts)


def _kind(report: AuditReport, kind: Kind) -> Section:
    """Attention or experts; empty without any implementation."""
    title, names = KINDS[kind]
    audits = [audit for audit in report.audits if audit.kind == kind]
    ran = [audit for audit in audits if answered(audit)]
    others = [audit for audit in audits if not answered(audit)]
    unusable = [a.name for a in others if a.origin != "yours" and not a.crashed]
    columns = (
        Column("implementation", text, of=_name),
        *(
            Column(WORDS[name][0], text, narrow=WORDS[name][1], of=partial(mark, name))
            for name in names
        ),
    )
    return Section(
        f"kernels-{kind}",
        title,
        tables=[Table.of(columns, ran)],
        figures=_figures(kind, ran[:MOST]),
        notes=[
            LEGEND if ran else "",
            f"Not usable here: {', '.join(unusable)}." if unusable else "",
        ],
        parts=_details(kind, title, ran, others),
        folded=False,
    )


def _name(audit: Audit) -> Cell:
    notes = [ORIGINS[audit.origin], "what auto takes" if audit.chosen else "", audit.verdict]
    notes.append(audit.reason if audit.verdict == "unusable" else "")
    return Cell(short(audit), note="; ".join(filter(None, notes)))


def short(audit: Audit) -> str:
    """Its name; of the user's own the function alone."""
    return audit.name.rpartition(":")[2] if audit.origin == "yours" else audit.name


def mark(column: str, audit: Audit) -> Cell:
    """A finding as a cell without words; one that was not asked is not tested."""
    finding = audit.finding(column)
    if finding is None or finding.outcome == "not_tested":
        return Cell("·", "dim")
    if finding.outcome == "passed":
        return Cell("", "healthy")
    note = "" if finding.value is None else brief(finding.value)
    return Cell("", "critical" if finding.critical else "warn", note)


def _details(kind: Kind, title: str, ran: list[Audit], others: list[Audit]) -> list[Section]:
    """Tables that stay folded away."""
    failed = {True: Cell("wrong", "critical"), False: Cell("differs", "warn")}
    findings: list[Cells] = [
        (short(audit), WORDS[each.column][0],
         failed[each.critical] if each.outcome == "failed" else Cell("not tested", "dim"),
         each.value, each.limit, each.detail)
        for audit in ran for each in audit.findings if each.outcome != "passed"
    ]  # fmt: skip
    why = Column("implementation", text, of="name"), Column("why", text, of="reason")
    floor = (
        "Relative, in the 2-norm, against float64. The floor is what rounding inputs and output "
        "alone gives."
    )
    return [
        Section(f"kernels-{kind}-{id}", f"{title}: {words}", lead, tables=[table])
        for id, words, lead, table in (
            ("findings", "what differs, and what was not tested", "",
             Table(FINDING_COLUMNS, findings)),
            ("errors", "errors per dtype", floor, _errors(ran)),
            ("others", "not run here, or not to the end", "", Table.of(why, others)),
        )
    ]  # fmt: skip


def _errors(ran: list[Audit]) -> Table:
    """Every gradient has a column; the largest one has its own, which a terminal keeps."""
    recorded = {name for audit in ran for error in audit.errors for name in error.gradients}
    names = [name for name in GRADIENTS if name in recorded] + sorted(recorded - set(GRADIENTS))
    rows: list[Cells] = []
    for audit, error in ((a, error) for a in ran for error in a.errors):
        worst = max(error.gradients, key=lambda name: error.gradients[name] or 0.0, default="")
        rows.append((
            short(audit), error.dtype, error.forward, error.gradients.get(worst), worst,
            *(error.gradients.get(name) for name in names), error.floor,
        ))  # fmt: skip
    columns = (
        NAME, Column("dtype", text), Column("output", scientific),
        Column("largest gradient", scientific), Column("of", text),
        *(Column(name, scientific, 1, detail="gradient") for name in names),
        Column("floor", scientific),
    )  # fmt: skip
    return Table(columns, rows)


# ---------------------------------------------------------------- figures


LONGEST = 24  # characters of a name in a picture
MOST = 8  # implementations in a picture


def _figures(kind: Kind, ran: list[Audit]) -> list[Figure]:
    """Those that the numbers allow; the tables have every implementation."""
    worst = {
        (audit.name, error.dtype): max(filter(None, (error.forward, *error.gradients.values())))
        for audit in ran
        for error in audit.errors
        if any((error.forward, *error.gradients.values()))
    }
    dtypes = list(dict.fromkeys(error.dtype for audit in ran for error in audit.errors))
    errors = Figure(
        f"{kind}-errors",
        "Errors per dtype",
        "The largest relative error of output and gradients. Bars of one dtype should be "
        "alike: that is its rounding. 1 (the line): nothing of it is right, or no gradient "
        "arrives.",
        partial(_bars, kind, ran, dtypes, worst),
        (6.0, 0.9 + 0.3 * len(ran) * len(dtypes)),
    )
    return [errors] if worst else []


def _bars(
    kind: Kind, ran: list[Audit], dtypes: list[str], worst: dict[tuple[str, str], float], axes: Axes
) -> str:
    """The largest error of output and gradients, per implementation and dtype, logarithmic."""
    lowest, height = min(worst.values()) / 3, 0.8 / len(dtypes)
    for index, dtype in enumerate(dtypes):
        shift = (index - (len(dtypes) - 1) / 2) * height
        rows = [(row, a) for row, a in enumerate(ran) if (a.name, dtype) in worst]
        axes.barh(
            [row + shift for row, _ in rows],
            [worst[audit.name, dtype] - lowest for _, audit in rows],
            height * 0.9,
            left=lowest,
            color=(ACCENT, SECOND, BAND, FAINT)[index % 4],
            label=dtype,
        )
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.set(xscale="log", xlim=(lowest, max(2.0, 2 * max(worst.values()))),
             xlabel="largest relative error against float64 (log)")  # fmt: skip
    axes.xaxis.set_major_formatter(lambda value, _: bound(value))
    axes.minorticks_off()
    rows_of(axes, [_label(audit) for audit in ran])
    legend_above(axes, len(dtypes), 0.4)
    values = [f"{_label(a)} {d} {bound(worst[a.name, d])}" for a in ran for d in dtypes
            if (a.name, d) in worst]  # fmt: skip
    return f"{kind}, largest error per dtype: {', '.join(values)}"


def _label(audit: Audit) -> str:
    name = line(short(audit))
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
