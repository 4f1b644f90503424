"""Pictures of an audit: errors per dtype, time and memory against length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mismatch.experiments.kernels.types import Audit, Cost, Kind
from mismatch.reports.figures import Picture
from mismatch.reports.quantities import bound
from mismatch.reports.svg import ACCENT, BAND, FAINT, INK, SECOND, drawing, to_svg
from mismatch.reports.text import line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (ACCENT, SECOND, FAINT, INK)
STYLES = ("-", "--", ":", "-.")
LONGEST = 24  # characters of a name in a picture
MOST = 8  # implementations in a picture


def pictures(kind: Kind, ran: Sequence[Audit]) -> list[Picture]:
    """Those that the numbers allow; the table beside them has every implementation."""
    shown = list(ran)[:MOST]
    made = [errors(kind, shown), costs(kind, shown, "time"), costs(kind, shown, "memory")]
    return [one for one in made if one is not None]


def errors(kind: Kind, ran: Sequence[Audit]) -> Picture | None:
    """The largest error of output and gradients, per implementation and dtype, logarithmic."""
    dtypes = list(dict.fromkeys(e.dtype for one in ran for e in one.errors))
    worst = {
        (one.name, e.dtype): _largest(e.forward, e.gradients) for one in ran for e in one.errors
    }
    values = [value for value in worst.values() if value]
    if not values:
        return None
    lowest = min(values) / 3
    with drawing(6.0, 0.9 + 0.3 * len(ran) * max(1, len(dtypes))) as (figure, axes):
        height = 0.8 / len(dtypes)
        for index, dtype in enumerate(dtypes):
            places = [row + (index - (len(dtypes) - 1) / 2) * height for row in range(len(ran))]
            found = [worst.get((one.name, dtype)) for one in ran]
            bars = [(place, value) for place, value in zip(places, found, strict=True) if value]
            axes.barh(
                [place for place, _ in bars],
                [value - lowest for _, value in bars],
                height * 0.9,
                left=lowest,
                color=(ACCENT, SECOND, BAND, FAINT)[index % 4],
                label=dtype,
            )
        axes.axvline(1.0, color=INK, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlim(lowest, max(2.0, 2 * max(values)))
        axes.xaxis.set_major_formatter(lambda value, _: bound(value))
        axes.minorticks_off()
        axes.set_yticks(range(len(ran)), [_short(one) for one in ran])
        axes.invert_yaxis()
        axes.grid(axis="x")
        axes.grid(False, axis="y")
        axes.set_xlabel("largest relative error against float64 (log)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=len(dtypes))
        svg = to_svg(figure, f"{kind}-errors", f"{kind}: largest error per dtype")
    return Picture(
        f"{kind}-errors",
        "Errors per dtype",
        "The largest relative error of output and gradients. Bars of one dtype should be alike: "
        "that is its rounding. 1 (the line): nothing of it is right, or no gradient arrives.",
        svg,
    )


def _largest(forward: float | None, gradients: dict[str, float]) -> float | None:
    known = [value for value in (forward, *gradients.values()) if value is not None]
    return max(known, default=None)


def costs(kind: Kind, ran: Sequence[Audit], what: str) -> Picture | None:
    """Seconds or MiB of one layer, forward and backward, against the length."""
    drawn = [(one, points) for one in ran if len(points := _points(one.costs, what)) > 1]
    if not drawn:
        return None
    unit = "seconds" if what == "time" else "MiB"
    with drawing() as (figure, axes):
        for index, (one, points) in enumerate(drawn):
            axes.plot(
                [tokens for tokens, _ in points],
                [value for _, value in points],
                color=COLOURS[index % 4],
                linestyle=STYLES[index // 4 % 4],
                marker="o",
                markersize=4,
                label=_short(one),
            )
        _logarithmic(axes, sorted({tokens for _, points in drawn for tokens, _ in points}))
        axes.set_xlabel("tokens of the sequence (log)")
        axes.set_ylabel(f"{unit}, one layer (log)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(3, len(drawn)))
        svg = to_svg(figure, f"{kind}-{what}", f"{kind}: {what} against length")
    caption = (
        "Forward and backward of one layer. Four times the tokens at 16 times the cost: a "
        "kernel that holds a number for every pair of tokens."
        if kind == "attention"
        else "Forward and backward of one layer."
    )
    return Picture(f"{kind}-{what}", f"{what.capitalize()} against length", caption, svg)


def _points(found: Sequence[Cost], what: str) -> list[tuple[int, float]]:
    points = []
    for cost in found:
        value = cost.seconds if what == "time" else cost.peak_bytes
        if value:
            points.append((cost.tokens, value if what == "time" else value / 2**20))
    return sorted(points)


def _logarithmic(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _short(one: Audit) -> str:
    name = line(one.name.rpartition(":")[2] if one.origin == "yours" else one.name)
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
