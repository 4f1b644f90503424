"""An audit of kernels in words and rows, for every rendering."""

from __future__ import annotations

from dataclasses import replace

from mismatch.experiments.kernels.types import (
    ATTENTION_COLUMNS,
    EXPERT_COLUMNS,
    Audit,
    AuditReport,
    Cost,
    Error,
    Finding,
    Harm,
    Kind,
)
from mismatch.experiments.kernels.verdict import answered, causes_of, ended, judge, was_run
from mismatch.reports import kernels_figures
from mismatch.reports.kernels_rows import (
    CostLine,
    ErrorLine,
    HarmLine,
    Line,
    Mark,
    Other,
    Part,
    View,
)
from mismatch.reports.quantities import MISSING, number, percent, times
from mismatch.reports.text import line

TITLE = "Kernels"
LEAD = (
    "Each implementation ran by itself on inputs of the model's shapes, forward and backward, and "
    "was held against a plain float64 one."
)
KINDS: dict[Kind, str] = {"attention": "Attention", "experts": "Experts"}
COLUMNS: dict[Kind, tuple[str, ...]] = {
    "attention": ATTENTION_COLUMNS,
    "experts": EXPERT_COLUMNS,
}
ORIGINS = {"ours": "mismatch", "transformers": "transformers", "yours": "yours"}
# Column -> its name, its name in two lines of at most five characters, what it asks.
WORDS = {
    "accepts": ("accepts", "fits\n", "does it take the model's shapes and masks?"),
    "sinks": ("sinks", "sinks\n", "do the learned sinks count in the softmax?"),
    "window": ("window", "win-\ndow", "does it see exactly the keys of the sliding window?"),
    "packing": ("packing", "pack-\ning", "do documents of one row stay apart?"),
    "offsets": ("offsets", "off-\nsets", "do queries that start late see the right keys?"),
    "grouped_queries": ("grouped queries", "GQA\n", "do query heads read their own group's keys?"),
    "scaling": ("scaling", "sca-\nling", "is the given scale used?"),
    "forward": ("output", "out-\nput", "is the output right?"),
    "gradient": ("gradient", "grad\n", "are the gradients of the inputs right?"),
    "sink_gradient": ("sinks' gradient", "sink\ngrad", "do the sinks get their gradient?"),
    "router_gradient": ("router's gradient", "rout\ngrad", "does the router get its gradient?"),
    "repeats": ("repeats", "re-\npeat", "the same bits twice?"),
    "batches": ("batches", "bat-\nches", "the same bits whatever else is in the batch?"),
}  # fmt: skip
LEGEND = "✓ right, ✕ wrong, ~ off by rounding, · not tested, – not usable"
GRADIENTS = ("q", "k", "v", "hidden", "gate_up", "down", "sinks", "router")


def view(report: AuditReport | None, *, pictures: bool = True) -> View | None:
    """The audit; None where there is none.

    Args:
        pictures: False leaves the figures out, which only a page can show.

    Raises:
        MismatchError: nothing was audited.
    """
    if report is None:
        return None
    verdict = judge(report)
    parts = [_part(report, kind, pictures) for kind in KINDS]
    return View(
        verdict=replace(verdict, reason=line(verdict.reason)),
        tone="healthy" if verdict.code == 0 else "critical",
        model=line(report.model),
        shape=_shape(report),
        device=line(report.device),
        lead=LEAD,
        sentences=tuple(sentences(report)),
        parts=tuple(one for one in parts if one.lines or one.others),
        harm=tuple(_harm_lines(report)),
        not_tested=tuple(line(one) for one in report.not_tested),
    )


def sentences(report: AuditReport) -> list[str]:
    """What the audit says, in plain words: first what is wrong."""
    said = [_fault(one) for one in report.audits if answered(one) and one.failed]
    said += [
        f"{line(one.name)}: {line(one.reason)}."
        for one in report.audits
        if was_run(one) and not answered(one)
    ]
    for kind, title in KINDS.items():
        right = [one for one in report.audits if one.kind == kind and one.verdict == "sound"]
        if right:
            names = ", ".join(line(one.name) for one in right)
            said.append(f"{title}: nothing wrong with {names}.")
    chosen = [one for one in report.audits if one.chosen]
    said += [
        f"The trainer takes {line(one.name)} by itself ({one.kind}): it is {one.verdict}."
        for one in chosen
    ]
    return said


def in_short(report: AuditReport | None) -> str:
    """One sentence for the short terminal; "" where there is no audit."""
    if report is None:
        return ""
    verdict = judge(report)
    mark = "! " if verdict.code else ""
    return f"{mark}kernels: {verdict.status}: {line(verdict.reason)}"


def _fault(one: Audit) -> str:
    """One implementation that is wrong: how, and what that does to the model."""
    wrong = ", ".join(WORDS[each.column][0] for each in one.failed)
    text = f"{line(one.name)} is wrong: {wrong}."
    if one.harm is not None:
        text += f" On the model: {_harm_words(one.harm)}."
    if one.verdict == "unusable":
        text += f" It cannot be taken here: {line(one.reason)}."
    return text


def _harm_words(harm: Harm) -> str:
    said = f"mean |delta| {number(harm.mean_abs_delta)} nats"
    if harm.baseline is not None:
        said += f" (what auto takes: {number(harm.baseline.mean_abs_delta)})"
    if harm.gradient_error is not None:
        said += f", gradient off by {percent(harm.gradient_error)}"
    if harm.sink_gradient_error is not None:
        said += f", that of the sinks by {percent(harm.sink_gradient_error)}"
    return said


def _part(report: AuditReport, kind: Kind, pictures: bool) -> Part:
    known = [one for one in report.audits if one.kind == kind]
    ran = [one for one in known if answered(one)]
    found = {name for one in ran for error in one.errors for name in error.gradients}
    gradients = tuple(sorted(found, key=_place))
    drawn = kernels_figures.pictures(kind, ran) if pictures else ()
    return Part(
        kind=kind,
        title=KINDS[kind],
        columns=COLUMNS[kind],
        lines=tuple(_line(one) for one in ran),
        others=tuple(_other(one) for one in known if not answered(one)),
        errors=tuple(_error_line(one, each, gradients) for one in ran for each in one.errors),
        gradients=gradients,
        costs=tuple(_cost_lines(ran)),
        pictures=tuple(drawn),
    )


def _place(name: str) -> tuple[int, str]:
    return (GRADIENTS.index(name) if name in GRADIENTS else len(GRADIENTS), name)


def _line(one: Audit) -> Line:
    marks = tuple(mark(one.finding(column), column) for column in COLUMNS[one.kind])
    causes = tuple(each.column for each in causes_of(one.failed))
    sign, tone = {"sound": ("✓", "healthy"), "wrong": ("✕", "critical")}.get(
        one.verdict, ("–", "critical" if one.failed else "none")
    )
    return Line(
        name=line(one.name),
        short=short(one),
        origin=ORIGINS[one.origin],
        chosen=one.chosen,
        verdict=one.verdict,
        sign=sign,
        tone=tone,
        reason=line(one.reason),
        marks=marks,
        faults=tuple(_said(each) for each in marks if each.tone == "critical"),
        causes=tuple(_said(each) for each in marks if each.column in causes),
        follows=tuple(
            each.title for each in marks if each.tone == "critical" and each.column not in causes
        ),
        remarks=tuple(_said(each) for each in marks if each.tone == "warn"),
    )


def _other(one: Audit) -> Other:
    sign, tone = ("✕", "critical") if one.origin == "yours" or ended(one) else ("–", "none")
    return Other(line(one.name), sign, tone, line(one.reason))


def short(one: Audit) -> str:
    """Its name; of the user's own the function alone."""
    return line(one.name.rpartition(":")[2] if one.origin == "yours" else one.name)


def mark(found: Finding | None, column: str) -> Mark:
    """A finding as a cell; one that was not asked is not tested."""
    title = WORDS[column][0]
    if found is None:
        return Mark(column, title, "·", "none", "not tested", "", "", "not asked")
    sign, tone, word = {
        "passed": ("✓", "healthy", "right"),
        "failed": ("✕", "critical", "wrong") if found.critical else ("~", "warn", "differs"),
        "not_tested": ("·", "none", "not tested"),
    }[found.outcome]
    value = "" if found.value is None else number(found.value, 2)
    limit = "" if found.limit is None else number(found.limit, 2)
    return Mark(column, title, sign, tone, word, value, limit, line(found.detail))


def _said(one: Mark) -> str:
    return f"{one.title}: {one.detail}"


def _error_line(one: Audit, error: Error, names: tuple[str, ...]) -> ErrorLine:
    gradients = tuple(
        (name, number(error.gradients[name], 2) if name in error.gradients else MISSING)
        for name in names
    )
    worst = max(error.gradients, key=lambda name: error.gradients[name] or 0.0, default=MISSING)
    return ErrorLine(
        name=short(one),
        dtype=error.dtype,
        forward=number(error.forward, 2),
        gradients=gradients,
        largest=(number(error.gradients.get(worst), 2), worst),
        floor=number(error.floor, 2),
    )


def _cost_lines(ran: list[Audit]) -> list[CostLine]:
    """By length; the best of each length that is sound, if any is, has factor 1.

    One that leaves something out has less to do.
    """
    sound = [one for one in ran if one.verdict == "sound"] or ran
    lengths = sorted({cost.tokens for one in ran for cost in one.costs})
    lines = []
    for tokens in lengths:
        rows = [(one, cost) for one in ran for cost in one.costs if cost.tokens == tokens]
        known = [cost for one, cost in rows if one in sound]
        fastest = min((c.seconds for c in known if c.seconds is not None), default=None)
        least = min((c.peak_bytes for c in known if c.peak_bytes), default=None)
        lines += [_cost_line(short(one), cost, fastest, least) for one, cost in rows]
    return lines


def _cost_line(name: str, cost: Cost, fastest: float | None, least: int | None) -> CostLine:
    slower = cost.seconds / fastest if cost.seconds is not None and fastest else None
    more = cost.peak_bytes / least if cost.peak_bytes and least else None
    return CostLine(
        name=name,
        tokens=f"{cost.tokens:,}",
        seconds=MISSING if cost.seconds is None else f"{number(cost.seconds, 2)} s",
        slower=MISSING if slower is None else times(slower),
        memory=MISSING if cost.peak_bytes is None else f"{number(cost.peak_bytes / 2**20)} MiB",
        more=MISSING if more is None else times(more),
        note=line(cost.note),
    )


def _harm_lines(report: AuditReport) -> list[HarmLine]:
    """Each that was tried on the model, and below them the kernel the trainer takes by itself."""
    harmed = [(short(one), one.harm) for one in report.audits if one.harm is not None]
    lines = [_harm_line(name, harm) for name, harm in harmed]
    usual = next((harm.baseline for _, harm in harmed if harm.baseline is not None), None)
    return lines + ([_harm_line("what auto takes", usual)] if usual is not None else [])


def _harm_line(name: str, harm: Harm) -> HarmLine:
    return HarmLine(
        name=name,
        tokens=f"{harm.tokens:,}",
        mean=number(harm.mean_abs_delta),
        k3=number(harm.k3_kl),
        gradient=percent(harm.gradient_error),
        cosine=number(harm.gradient_cosine, 4),
        sinks=percent(harm.sink_gradient_error),
    )


def _shape(report: AuditReport) -> str:
    """The model's shape on one line, as far as it is known."""
    known = report.geometry
    texts = [
        (("heads", "kv_heads"), "{heads} query heads, {kv_heads} key heads"),
        (("head_dim",), "head size {head_dim}"),
        (("window",), "window {window:,}"),
        (("experts", "top_k"), "{top_k} of {experts} experts"),
    ]
    said = [text.format(**known) for names, text in texts if all(known.get(n) for n in names)]
    if "sinks" in known:
        said.append("with sinks" if known["sinks"] else "no sinks")
    return line(", ".join(said))
