"""Exact divergences of the headline comparison, beside what the estimators say there."""

from __future__ import annotations

from mismatch.analysis.exact_kl import KL, KL_TOPK, LAW_GAP
from mismatch.reports.formatting import number, percent, plural, times
from mismatch.reports.section import Section
from mismatch.reports.summary import all_rows, headline, metric_tables
from mismatch.types import Comparison, Estimate, Report

ORDER = ("", "_p50", "_p90", "_p95", "_p99", "_p999", "_max")
OTHERS = ("exact_reverse_kl", "exact_js", "exact_tv")
LEAD = (
    "k1 and k3 look at the token that was sampled. At a random sample of tokens both sides also "
    "gave {what}, so that the divergence there is a sum and no estimate{bound}."
)
WHOLE = "the whole distribution over the vocabulary"
PART = "the probabilities of the likeliest tokens and of all others together"


def of_report(report: Report) -> Section | None:
    """Of the headline comparison; None where it holds no exact divergence."""
    comparison = headline(report)
    name = _name(comparison)
    if name is None:
        return None
    suffix = name.removeprefix(KL)
    names = [f"{name}{tail}" for tail in ORDER]
    names += [f"{other}{suffix}" for other in OTHERS]
    names += ["exact_argmax_agree", "kl_at_exact", "k3_kl_at_exact"]
    known = {row.metric: row for row in all_rows(comparison)}
    rows = [known[each] for each in names if each in known]
    said = sentences(report)
    return Section(
        id="exact",
        title="Exact KL",
        lead=LEAD.format(what=WHOLE, bound="")
        if name == KL
        else LEAD.format(what=PART, bound=": a lower bound"),
        sentences=tuple(said),
        tables=metric_tables(rows),
        short=said[0],
    )


def sentences(report: Report) -> list[str]:
    """What the exact value adds to the estimators'."""
    comparison = headline(report)
    name = _name(comparison)
    if name is None:
        return []
    exact, k3 = comparison.metrics[name], comparison.metrics["k3_kl_at_exact"]
    what = "exact KL" if name == KL else "KL over the likeliest tokens, a lower bound"
    said = [
        f"{what}: {number(exact.value)} nats per token "
        f"({plural(exact.n_tokens, 'position')} of "
        f"{plural(exact.n_prompts, 'prompt')}); k3 on the same positions: "
        f"{number(k3.value)}"
    ]
    narrower = _narrower(exact, k3)
    if narrower is not None:
        said.append(narrower)
    gap = comparison.metrics.get(LAW_GAP)
    if gap is not None and gap.value > 1:
        said.append("the sampled tokens do not fit these distributions: see the checks")
    said += _noise(report, name, exact)
    return said


def _narrower(exact: Estimate, k3: Estimate) -> str | None:
    """How much the interval gains from seeing every token that could have come."""
    widths = [None if e.low is None or e.high is None else e.high - e.low for e in (exact, k3)]
    if widths[0] is None or widths[1] is None or not 0 < widths[0] < widths[1]:
        return None
    return f"its interval is {times(widths[1] / widths[0])} narrower than k3's there"


def _noise(report: Report, name: str, exact: Estimate) -> list[str]:
    """The trainer against itself in other micro-batches: how much of it is noise."""
    for pair in report.noise_floor:
        if pair.right.endswith(":regrouped") and name in pair.metrics and exact.value > 0:
            value = pair.metrics[name].value
            return [
                f"the trainer against itself in other micro-batches: {number(value)} "
                f"({percent(value / exact.value)} of it)"
            ]
    return []


def _name(comparison: Comparison) -> str | None:
    return next((name for name in (KL, KL_TOPK) if name in comparison.metrics), None)
