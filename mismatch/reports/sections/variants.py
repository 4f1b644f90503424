"""The headline's tokens under other settings: replayed experts, weights in another form, and what
`mismatch score --name` has added.
"""

from __future__ import annotations

from mismatch.analysis.two_passes import replay_phrase
from mismatch.reports.formatting import line, number, percent, text
from mismatch.reports.section import Cell, Column, Section, Table, Value
from mismatch.specs import AS_STORED
from mismatch.types import Comparison, Report

LEAD = (
    "Other settings of the trainer, beside the one under test; report.json has all their numbers."
)
COLUMNS = (
    Column("left / right", text),
    Column("mean |delta|", number),
    Column("k3 KL", number),
    Column("routing flips", percent, detail="of (token, layer)"),
)


def of_report(report: Report) -> Section | None:
    """The headline first, for comparison; None where there is nothing beside it.

    The engine's prefill against the trainer is left out: the noise and the budget show it.
    """
    others = [
        comparison
        for comparison in report.comparisons[1:]
        if report.fingerprints.get(comparison.rollout, {}).get("mode") != "prefill"
    ]
    if not others:
        return None
    rows = tuple(_row(report, comparison) for comparison in (report.comparisons[0], *others))
    return Section("beside", "On the same tokens", lead=LEAD, tables=(Table(COLUMNS, rows),))


def _row(report: Report, comparison: Comparison) -> tuple[Cell | Value, ...]:
    facts = report.fingerprints.get(comparison.train, {})
    given = replay_phrase(facts)
    flips = comparison.routing.get("routing_disagree_layer")
    constructed = bool(given) and flips is not None and flips.value == 0
    return (
        Cell(
            f"{comparison.rollout} / {comparison.train}",
            note=_meaning(facts.get("weights_form", AS_STORED), given),
        ),
        comparison.metrics.get("logprob_abs_diff_mean"),
        comparison.metrics.get("k3_kl"),
        "replayed" if constructed else flips,
    )


def _meaning(form: str, given: str) -> str:
    parts = [f"replays the {line(given)}"] if given else []
    return "; ".join([*parts, *([f"experts {line(form)}"] if form != AS_STORED else [])])
