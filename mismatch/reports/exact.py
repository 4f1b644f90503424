"""The report's section on exact divergences: one table, and what it says beside the estimators."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch.analysis.exact_kl import KL, KL_TOPK, LAW_GAP
from mismatch.reports import quantities
from mismatch.reports.summary import Row, all_rows, headline
from mismatch.types import Comparison, Estimate, Report

ORDER = ("", "_p50", "_p90", "_p95", "_p99", "_p999", "_max")
OTHERS = ("exact_reverse_kl", "exact_js", "exact_tv")


@dataclass(frozen=True, slots=True)
class Section:
    """What the page shows.

    Attributes:
        whole: the sums run over the whole vocabulary; else they are lower bounds.
        sentences: what the numbers say.
    """

    whole: bool
    rows: list[Row]
    sentences: list[str]


def section(report: Report) -> Section | None:
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
    return Section(name == KL, rows, sentences(report))


def sentences(report: Report) -> list[str]:
    """What the exact value adds to the estimators'."""
    comparison = headline(report)
    name = _name(comparison)
    if name is None:
        return []
    exact, k3 = comparison.metrics[name], comparison.metrics["k3_kl_at_exact"]
    what = "exact KL" if name == KL else "KL over the likeliest tokens, a lower bound"
    said = [
        f"{what}: {quantities.number(exact.value)} nats per token "
        f"({quantities.plural(exact.n_tokens, 'position')} of "
        f"{quantities.plural(exact.n_prompts, 'prompt')}); k3 on the same positions: "
        f"{quantities.number(k3.value)}"
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
    return f"its interval is {quantities.times(widths[1] / widths[0])} narrower than k3's there"


def _noise(report: Report, name: str, exact: Estimate) -> list[str]:
    """The trainer against itself in other micro-batches: how much of it is noise."""
    for pair in report.noise_floor:
        if pair.right.endswith(":regrouped") and name in pair.metrics and exact.value > 0:
            value = pair.metrics[name].value
            return [
                f"the trainer against itself in other micro-batches: {quantities.number(value)} "
                f"({quantities.percent(value / exact.value)} of it)"
            ]
    return []


def _name(comparison: Comparison) -> str | None:
    return next((name for name in (KL, KL_TOPK) if name in comparison.metrics), None)
