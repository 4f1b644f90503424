"""Importance weights at a longer response, extrapolated from this run's tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mismatch.metrics.forecast import Forecast, Row
from mismatch.reports.formatting import (
    MISSING,
    count,
    interval,
    number,
    percent,
    times,
)
from mismatch.reports.section import Cell, Cells, Column, Figure, Section, Table
from mismatch.reports.svg import ACCENT, BAND, FAINT, INK, SECOND
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAUTIONS = {
    "heavy-tail": "the tail of delta is heavy, so single tokens may cost far more than these "
    "numbers say",
    "few-prompts": "few prompts, so the intervals may be too narrow",
    "one-prompt": "one prompt only, hence no interval",
    "persistent": "whole responses are off in one direction, so the spread grows with the length "
    "and not with its root",
    "check-failed": "the first half of the positions does not predict the second: the tokens of "
    "late positions differ from early ones",
}
LEAD = (
    "What importance weights would do at a planned response length, extrapolated from the tokens "
    "of this run."
)
COLUMNS = (
    Column("tokens", count),
    Column("spread, nats", number, interval=1),
    Column("effective size", percent, 3, interval=4, detail="ratios capped at 2"),
    Column("effective size, full ratios", percent, 1, detail="ratios not capped"),
    Column("ratio over 2", percent, 3, detail="truncated or masked"),
    Column("outside [1/2, 2]", percent, 3, detail="two-sided mask"),
    Column("rejected", percent, 2, detail="geometric bounds"),
)


def section(result: Forecast, report: Report) -> Section:
    """What the forecast says, how it was checked, how far it reaches, and what to doubt."""
    said = sentences(result)
    return Section(
        id="forecast",
        title="At a longer response",
        lead=LEAD,
        sentences=said,
        tables=(Table(COLUMNS, [_row(result, row) for row in result.rows]),),
        figures=(_figure(result),) if len(result.rows) > 1 else (),
        short=said[0],
    )


def _row(forecast: Forecast, row: Row) -> Cells:
    at_floor = row.ess_untruncated.value <= forecast.floor * (1 + 1e-9)
    full = Cell(row.ess_untruncated, note="the floor, 1/N" if at_floor else "")
    return row.length, row.spread, row.ess, full, row.truncated, row.outside, row.geo_rejected


def sentences(forecast: Forecast) -> list[str]:
    """The same in words."""
    if forecast.missing:
        return [f"No forecast: {forecast.missing}."]
    last = forecast.rows[-1]
    between = interval(last.spread, to=" to ").replace(MISSING, "no interval")
    said = [
        f"At {count(last.length)} tokens the sequence log-ratio would spread by "
        f"{number(last.spread.value)} nats ({between}); full importance weights would leave an "
        f"ESS of {percent(last.ess_untruncated.value)}, geometric bounds of "
        f"0.999 and 1.001 would reject {percent(last.geo_rejected.value)}.",
        *_reach(forecast),
    ]
    if any(r.ess_untruncated.value <= forecast.floor * (1 + 1e-9) for r in forecast.rows):
        said.append(f"ESS floor: 1/{count(round(1 / forecast.floor))} ({percent(forecast.floor)}).")
    return said + [f"Caution: {CAUTIONS[flag]}." for flag in forecast.flags if flag in CAUTIONS]


def _reach(forecast: Forecast) -> list[str]:
    check = forecast.check
    if check is None:
        return []
    error = _signed(check.error.value)
    if check.error.low is not None:
        error += f", interval {interval(check.error, _signed, ' to ')}"
    reach = (
        "The target lies within the data."
        if forecast.reach <= 1
        else f"Validated to 2× the observed length; the target is {times(forecast.reach)}: order "
        "of magnitude only."
    )
    return [
        f"Checked on this run: the first {count(check.fitted)} positions predict the spread at "
        f"{count(check.length)} tokens as {number(check.predicted)} nats, it is "
        f"{number(check.observed)} ({error}). {reach}"
    ]


def _signed(share: float) -> str:
    return f"{100 * share:+.0f} %"


def _figure(forecast: Forecast) -> Figure:
    return Figure(
        "forecast-kept",
        "What importance weights would keep",
        "Effective size is the share of the sequences that importance weights leave in force. "
        "Geometric rejection looks at the mean of delta, so it can fall with length; weights of "
        "whole sequences only get worse.",
        partial(_kept, forecast),
    )


def _kept(forecast: Forecast, axes: Axes) -> str:
    rows = forecast.rows
    length = [row.length for row in rows]
    low = [100 * (row.ess.value if row.ess.low is None else row.ess.low) for row in rows]
    high = [100 * (row.ess.value if row.ess.high is None else row.ess.high) for row in rows]
    axes.fill_between(length, low, high, color=BAND, lw=0)
    told = []
    for label, color, style, estimates in (
        ("effective size, ratios capped at 2", ACCENT, "-", [row.ess for row in rows]),
        ("effective size, full ratios", INK, ":", [row.ess_untruncated for row in rows]),
        ("rejected, geometric bounds", SECOND, "--", [row.geo_rejected for row in rows]),
        ("outside [1/2, 2]", FAINT, "-.", [row.outside for row in rows]),
    ):
        values = [100 * estimate.value for estimate in estimates]
        axes.plot(length, values, style, color=color, lw=1.8, label=label)
        ends = [(rows[at].length, estimates[at].value) for at in (0, -1)]
        told.append(f"{label}: " + ", ".join(f"{percent(x)} at {count(n)} tokens" for n, x in ends))
    axes.set(xscale="log", ylim=(-3, 130))
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.axvline(forecast.longest, color=FAINT, lw=1, dashes=(4, 3))
    ticks = length[:-1][:: max(1, len(length) // 4)] + length[-1:]
    if len(ticks) > 2 and ticks[-1] < 1.8 * ticks[-2]:
        del ticks[-2]
    axes.set_xticks(ticks, [count(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel("response length, tokens")
    axes.set_ylabel("sequences, %")
    axes.legend(loc="upper left", ncols=2)
    return "; ".join(told)
