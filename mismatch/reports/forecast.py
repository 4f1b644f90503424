"""The length forecast as rows, sentences and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.metrics.forecast import Forecast
from mismatch.reports import quantities
from mismatch.reports.figures import Picture
from mismatch.reports.svg import ACCENT, BAND, FAINT, INK, SECOND, drawing, to_svg
from mismatch.reports.text import line
from mismatch.types import Estimate, Report

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


@dataclass(frozen=True, slots=True)
class LengthRow:
    """One response length as texts."""

    length: str
    spread: str
    spread_interval: str
    ess: str
    ess_interval: str
    ess_untruncated: str
    truncated: str
    outside: str
    geo_rejected: str
    at_floor: bool


def rows(report: Report) -> list[LengthRow]:
    """The lengths from the data's to the target."""
    forecast = report.result("forecast")
    if forecast is None:
        return []
    return [
        LengthRow(
            quantities.count(row.length),
            quantities.number(row.spread.value),
            _interval(row.spread),
            _percent(row.ess.value),
            _interval(row.ess, share=True),
            _percent(row.ess_untruncated.value),
            _percent(row.truncated.value),
            _percent(row.outside.value),
            _percent(row.geo_rejected.value),
            row.ess_untruncated.value <= forecast.floor * (1 + 1e-9),
        )
        for row in forecast.rows
    ]


def sentences(report: Report) -> list[str]:
    """What the forecast says, how it was checked, how far it reaches, and what to doubt."""
    forecast = report.result("forecast")
    if forecast is None:
        return []
    if forecast.missing:
        return [f"No forecast: {line(forecast.missing)}."]
    said = [_headline(forecast), _reach(forecast)]
    if any(row.at_floor for row in rows(report)):
        said.append(
            f"A sample of {quantities.count(round(1 / forecast.floor))} sequences never shows an "
            f"effective size under {quantities.percent(forecast.floor)}: one sequence is left."
        )
    return said + [f"Caution: {CAUTIONS[flag]}." for flag in forecast.flags if flag in CAUTIONS]


def _headline(forecast: Forecast) -> str:
    last = forecast.rows[-1]
    return (
        f"At {quantities.count(last.length)} tokens the sequence log-ratio would spread by "
        f"{quantities.number(last.spread.value)} nats ({_between(last.spread)}); "
        f"full importance weights would leave an effective sample of "
        f"{_percent(last.ess_untruncated.value)}, geometric bounds of 0.999 and 1.001 would reject "
        f"{_percent(last.geo_rejected.value)}."
    )


def _reach(forecast: Forecast) -> str:
    check = forecast.check
    if check is None:
        return ""
    error = (
        f"Checked on this run: the first {quantities.count(check.fitted)} positions predict the "
        f"spread at {quantities.count(check.length)} tokens as "
        f"{quantities.number(check.predicted)} nats, it is {quantities.number(check.observed)} "
        f"({_signed(check.error.value)}"
    )
    if check.error.low is not None and check.error.high is not None:
        error += f", interval {_signed(check.error.low)} to {_signed(check.error.high)}"
    reach = quantities.times(forecast.reach)
    if forecast.reach <= 1:
        return f"{error}). The target lies within the data."
    return f"{error}). That vouches for a factor of 2; the target is {reach} as long as the data."


def _between(estimate: Estimate) -> str:
    """An interval inside a sentence: a line may break in it."""
    return _interval(estimate).replace("…", "to").replace(quantities.MISSING, "no interval")


def _percent(share: float) -> str:
    """A share; far below what any run could show there is no number."""
    return "< 0.001 %" if 0.0 < share < 1e-5 else quantities.percent(share)


def _signed(share: float) -> str:
    return f"{100 * share:+.0f} %"


def _interval(estimate: Estimate, share: bool = False) -> str:
    write = _percent if share else quantities.number
    if estimate.low is None or estimate.high is None:
        return quantities.MISSING
    return f"{write(estimate.low)} … {write(estimate.high)}"


def pictures(report: Report) -> list[Picture]:
    """Spread against length with what was observed, and what corrections would keep."""
    forecast = report.result("forecast")
    if forecast is None or len(forecast.rows) < 2:
        return []
    return [_spread(forecast), _kept(forecast)]


def _spread(forecast: Forecast) -> Picture:
    length = np.array([row.length for row in forecast.rows])
    spread = np.array([row.spread.value for row in forecast.rows])
    low = np.array([_end(row.spread, "low") for row in forecast.rows])
    high = np.array([_end(row.spread, "high") for row in forecast.rows])
    with drawing() as (figure, axes):
        axes.fill_between(length, low, high, color=BAND, lw=0)
        axes.plot(length, spread, color=ACCENT, lw=2, label="forecast, 95 % interval")
        seen = np.array([point for point in forecast.observed if point[1] > 0]).reshape(-1, 2)
        axes.plot(seen[:, 0], seen[:, 1], "o", color=SECOND, ms=5, label="this run")
        axes.set(xscale="log", yscale="log")
        _lengths(axes, forecast)
        axes.yaxis.set_major_formatter(lambda value, _: quantities.number(value, 2))
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        decades = np.arange(np.floor(np.log10(seen[:, 1].min())), np.log10(high.max()) + 1)
        marks = np.outer(10.0**decades, [1.0, 2.0, 5.0]).ravel()
        bottom, top = axes.get_ylim()
        axes.set_yticks([mark for mark in marks if bottom <= mark <= top][:12])
        axes.set_ylabel("spread of the log-ratio, nats")
        axes.legend(loc="upper left")
        svg = to_svg(figure, "forecast-spread", "Spread of the sequence log-ratio by length")
    return Picture(
        "forecast-spread",
        "How sequence ratios spread with length",
        "Standard deviation of the sum of delta over a response. Dots: this run's own responses, "
        "cut to that length. The dashed line is where the data end.",
        svg,
    )


def _kept(forecast: Forecast) -> Picture:
    length = np.array([row.length for row in forecast.rows])
    lines = (
        ("effective size, ratios capped at 2", ACCENT, "-", [row.ess for row in forecast.rows]),
        ("effective size, full ratios", INK, ":", [row.ess_untruncated for row in forecast.rows]),
        ("rejected, geometric bounds", SECOND, "--", [row.geo_rejected for row in forecast.rows]),
        ("outside [1/2, 2]", FAINT, "-.", [row.outside for row in forecast.rows]),
    )
    with drawing() as (figure, axes):
        first = lines[0][3]
        low = 100 * np.array([_end(estimate, "low") for estimate in first])
        high = 100 * np.array([_end(estimate, "high") for estimate in first])
        axes.fill_between(length, low, high, color=BAND, lw=0)
        for label, color, style, estimates in lines:
            values = [100 * estimate.value for estimate in estimates]
            axes.plot(length, values, style, color=color, lw=1.8, label=label)
        axes.set(xscale="log", ylim=(-3, 130))
        axes.set_yticks([0, 25, 50, 75, 100])
        _lengths(axes, forecast)
        axes.set_ylabel("sequences, %")
        axes.legend(loc="upper left", ncols=2, fontsize=9)
        svg = to_svg(figure, "forecast-kept", "Effective sample size and rejection by length")
    return Picture(
        "forecast-kept",
        "What importance weights would keep",
        "Effective size is the share of the sequences that importance weights leave in force. "
        "Geometric rejection looks at the mean of delta, so it can fall with length; weights of "
        "whole sequences only get worse.",
        svg,
    )


def _lengths(axes: Axes, forecast: Forecast) -> None:
    axes.axvline(forecast.longest, color=FAINT, lw=1, dashes=(4, 3))
    ticks = [row.length for row in forecast.rows]
    ticks = ticks[:-1][:: max(1, len(ticks) // 4)] + ticks[-1:]
    if len(ticks) > 2 and ticks[-1] < 1.8 * ticks[-2]:
        del ticks[-2]
    axes.set_xticks(ticks, [quantities.count(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel("response length, tokens")


def _end(estimate: Estimate, side: str) -> float:
    end = getattr(estimate, side)
    return estimate.value if end is None else float(end)


def view(report: Report) -> dict[str, Any] | None:
    """What the HTML section shows; None without a forecast."""
    if report.result("forecast") is None:
        return None
    return {"sentences": sentences(report), "rows": rows(report), "pictures": pictures(report)}
