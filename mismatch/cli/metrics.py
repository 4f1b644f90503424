"""`mismatch metrics`: every number that a report can hold, and what others call it."""

from __future__ import annotations

import json

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import JSON, Flags

SCHEMA = "mismatch.metrics/2"
EXPLANATION = (
    "level: what a mean runs over. kind: a mean, a ratio (a smooth function of several means), a "
    "quantile, or an extreme (a maximum, a minimum, a count: no interval). good: which direction "
    "is agreement, if any. --format json adds formulas and the names in frameworks."
)


@with_flags(JSON)
def metrics(flags: Flags) -> int:
    """List every metric with its unit, kind and level of reduction.

    Examples:
    mismatch metrics
    """
    from mismatch.metrics import METRICS

    if not flags.as_json:
        from rich.console import Console

        from mismatch.reports.formatting import text
        from mismatch.reports.section import Column, Section, Table
        from mismatch.reports.terminal import print_section

        columns = (
            *(Column(name, text, of=name) for name in ("name", "unit", "kind")),
            Column("level", text, of="reduction"),
            Column("good", text, of=lambda metric: metric.good.replace("neither", "")),
        )
        console, table = Console(), Table.of(columns, METRICS.values())
        print_section(Section("metrics", "metrics", tables=[table]), console)
        console.print(EXPLANATION, highlight=False)
        return 0

    from dataclasses import asdict

    from mismatch.metrics import framework_names

    entries = [
        {
            "name": metric.name,
            # The first paragraph is the formula; what follows says how it is computed.
            "formula": " ".join(metric.definition.strip().split("\n\n")[0].split()),
            "unit": metric.unit,
            "kind": metric.kind,
            "reduction": metric.reduction,
            "good": metric.good,
            "needs": list(metric.needs),
            "aliases": [asdict(alias) for alias in framework_names.of(metric.name)],
        }
        for metric in METRICS.values()
    ]
    typer.echo(json.dumps({"schema": SCHEMA, "metrics": entries}, indent=2, ensure_ascii=False))
    return 0
