"""`mismatch metrics`: every number that a report can hold, and what others call it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option
from mismatch.cli.options import JSON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mismatch.metrics import Metric

SCHEMA = "mismatch.metrics/1"
ALIAS_FIELDS = ("framework", "name", "reduction", "sign", "clipping", "note")
EXPLANATION = (
    "level: what a mean runs over. kind: a mean, a ratio (a smooth function of several means), a\n"
    "quantile, or an extreme (a maximum, a minimum, a count: no interval). good: which direction\n"
    "is agreement, where one is. mismatch metrics --explain NAME says the rest."
)


EXPLAIN = Option(
    "explain",
    str | None,
    "",
    "Formula, direction, unit, interval, levels and names elsewhere of one metric; another "
    "framework's name will do.",
    metavar="NAME",
)


@with_flags(EXPLAIN, JSON)
def metrics(flags: Flags) -> int:
    """List every metric, or explain one.

    The list has unit, kind and level of reduction.
    """
    from mismatch.metrics import METRICS

    explain = flags["explain"]
    chosen = list(METRICS.values()) if explain is None else [find(explain)]
    if flags["as_json"]:
        rows = [as_data(metric) for metric in chosen]
        typer.echo(json.dumps({"schema": SCHEMA, "metrics": rows}, indent=2, ensure_ascii=False))
    elif explain is not None:
        typer.echo("\n".join(explanation(chosen[0])))
    else:
        print_list(chosen)
    return 0


def find(name: str) -> Metric:
    """The metric of a name, ours or another framework's.

    Raises:
        MismatchError: there is none; it says which names are near.
    """
    from difflib import get_close_matches

    from mismatch.errors import MismatchError
    from mismatch.metrics import METRICS
    from mismatch.metrics.framework_names import ALIASES, metric_called

    wanted = name.strip()
    ours = {metric.replace(".", "_"): metric for metric in METRICS}.get(
        wanted.lower().replace(".", "_")
    ) or metric_called(wanted)
    if ours is not None:
        return METRICS[ours]
    others = {alias.name: alias for aliases in ALIASES.values() for alias in aliases}
    near = get_close_matches(wanted, [*METRICS, *others], n=4, cutoff=0.5)
    near += [ours for ours in METRICS if wanted and wanted in ours and ours not in near][:4]
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise MismatchError(f"no metric {name!r}", f"{hint}mismatch metrics lists all {len(METRICS)}")


def print_list(chosen: list[Metric]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("name", "unit", "kind", "level", "good"):
        table.add_column(title, no_wrap=True)
    for metric in chosen:
        good = "" if metric.good == "neither" else metric.good
        table.add_row(metric.name, metric.unit, metric.kind, metric.reduction, good)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 80)
    console.print(table, highlight=False, markup=False)
    console.print(EXPLANATION, highlight=False, markup=False)


def explanation(metric: Metric) -> Iterator[str]:
    """Everything there is to say about one metric, at most 80 columns wide."""
    from mismatch.metrics import describe, framework_names
    from mismatch.reports.metric_labels import metric_label

    words = metric_label(metric.name)
    yield f"{metric.name}: {words.label}"
    yield from _field("reading", words.meaning)
    yield from _field("formula", describe.formula(metric))
    if "delta" in metric.needs:
        yield from _field("sign", "delta = train - rollout, rho = exp(delta)")
    yield from _field("direction", describe.DIRECTIONS[metric.good])
    yield from _field("unit", f"{metric.unit}; {describe.values(metric)}")
    yield from _field("level", f"one term per {_UNITS[metric.reduction]}")
    yield from _field("interval", describe.interval(metric))
    yield from _field("source", describe.source(metric))
    yield from _field("needs", ", ".join(metric.needs))
    attribute = metric.name.replace(".", "_")
    yield from _field("python", f"from mismatch.metrics import {attribute}")
    yield ""
    yield "Elsewhere"
    for alias in framework_names.of(metric.name):
        yield from _wrapped(alias.label, "", 2)
        yield from _wrapped(alias.remark(metric.reduction) or "the same number", "", 4)
        yield from _wrapped(f"read in {alias.source}", "", 4)
    if not framework_names.of(metric.name):
        yield "  no other framework is known to report it"
    yield ""
    yield "Levels"
    yield from levels(metric)


_UNITS = {"token": "action token", "sequence": "sequence with at least one action token"}


def levels(metric: Metric) -> Iterator[str]:
    """The cells of the levels table for a metric, each with its source."""
    from mismatch.analysis.levels import default_thresholds
    from mismatch.reports.formatting import bound

    cells = default_thresholds().get(metric.name, {})
    for column, level in cells.items():
        signs = ("≥", "<") if metric.good == "high" else ("≤", ">")
        healthy, unfit = bound(level.healthy), bound(level.unfit)
        yield f"  {column:<11} healthy {signs[0]} {healthy}, unfit {signs[1]} {unfit}"
        yield from _wrapped(level.source, "", 14)
    if not cells:
        yield from _wrapped(
            "none: the number is context, and nothing published bounds it", " " * 2, 2
        )


def as_data(metric: Metric) -> dict[str, Any]:
    """One metric as JSON data."""
    from mismatch.metrics import describe, framework_names

    return {
        "name": metric.name,
        "formula": describe.formula(metric),
        "unit": metric.unit,
        "kind": metric.kind,
        "reduction": metric.reduction,
        "good": metric.good,
        "interval": describe.interval(metric),
        "source": describe.source(metric),
        "needs": list(metric.needs),
        "aliases": [
            {name: getattr(alias, name) for name in ALIAS_FIELDS}
            | {"differs": alias.value is not None, "source": alias.source}
            for alias in framework_names.of(metric.name)
        ],
    }


def _field(title: str, text: str) -> Iterator[str]:
    yield from _wrapped(text, f"  {title:<10} ", 13)


def _wrapped(text: str, start: str, indent: int) -> Iterator[str]:
    """At most 80 columns; ``start`` stands before the first line, spaces before the others."""
    import textwrap

    wrapped = textwrap.fill(
        text,
        80,
        initial_indent=start or " " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield from wrapped.split("\n")
