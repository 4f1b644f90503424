"""The triangle of two engines and the trainer, one drawing for each set of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch.experiments.engine_pair.outlier import FLOOR
from mismatch.experiments.engine_pair.types import TRAINER, Triangle
from mismatch.reports import quantities
from mismatch.reports.figures import Picture
from mismatch.reports.svg import ACCENT, BAND, INK, SECOND, drawing, to_svg
from mismatch.reports.text import line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CORNERS = ((0.0, 0.0), (2.0, 0.0), (1.0, 1.5))  # first engine, second engine, trainer
LABELS = ((0.0, -0.26), (0.0, -0.26), (0.0, 0.2))  # of the names, from their corners
# Where an edge's number stands, from the middle of the edge: outside the triangle.
BESIDE = {
    (0, 1): (0.0, -0.17, "center"),
    (0, 2): (-0.1, 0.02, "right"),
    (1, 2): (0.1, 0.02, "left"),
}
WIDEST, THINNEST = 9.0, 1.2


def pictures(made: Triangle) -> list[Picture]:
    """One for each set of tokens that has all its edges; widths follow mean |delta|.

    Edges that are rounding stay thin: the scale reaches up to ``FLOOR`` at least.
    """
    sets = [one.engine for one in made.sides if _lengths(made, one.engine)]
    longest = max([FLOOR, *(max(_lengths(made, tokens).values()) for tokens in sets)])
    return [_picture(made, number, tokens, longest) for number, tokens in enumerate(sets)]


def _picture(made: Triangle, number: int, tokens: str, longest: float) -> Picture:
    name = f"triangle-{number}"
    with drawing(4.4, 2.7) as (figure, axes):
        _triangle(axes, made, tokens, longest)
        axes.set_aspect("equal")
        axes.set_xlim(-0.9, 2.9)
        axes.set_ylim(-0.45, 1.85)
        axes.axis("off")
        svg = to_svg(figure, name, f"{_title(made)}, on the tokens of {line(tokens)}")
    odd = f" {_capital(made.odd)} stands apart." if made.odd else ""
    return Picture(
        name,
        f"On the tokens of {line(tokens)}",
        "Mean |delta| between two parties that scored the same given tokens; a wider line is a "
        f"larger distance.{odd}",
        svg,
    )


def _capital(party: str) -> str:
    return "The trainer" if party == TRAINER else line(party)


def _title(made: Triangle) -> str:
    first, second, _ = made.parties
    return f"Mean |delta| between {line(first)}, {line(second)} and the trainer"


def _lengths(made: Triangle, tokens: str) -> dict[tuple[int, int], float]:
    """(corner, corner) -> mean |delta|; empty where an edge is missing."""
    found = {}
    for one, other in BESIDE:
        edge = made.edge(made.parties[one], made.parties[other], tokens, "prefill")
        if edge is None or edge.comparison is None:
            return {}
        found[one, other] = edge.comparison.metrics["logprob_abs_diff_mean"].value
    return found


def _triangle(axes: Axes, made: Triangle, tokens: str, longest: float) -> None:
    for (one, other), length in _lengths(made, tokens).items():
        (x1, y1), (x2, y2) = CORNERS[one], CORNERS[other]
        at_odd = made.odd in (made.parties[one], made.parties[other])
        axes.plot(
            [x1, x2],
            [y1, y2],
            color=SECOND if at_odd else ACCENT,
            linewidth=THINNEST + (WIDEST - THINNEST) * length / longest,
            solid_capstyle="round",
            zorder=1,
        )
        dx, dy, align = BESIDE[one, other]
        axes.text(
            (x1 + x2) / 2 + dx, (y1 + y2) / 2 + dy, quantities.number(length),
            ha=align, va="center", color=INK,
        )  # fmt: skip
    for name, (x, y), (dx, dy) in zip(made.parties, CORNERS, LABELS, strict=True):
        odd = name == made.odd
        axes.plot([x], [y], "o", markersize=13, color=SECOND if odd else BAND, zorder=2)
        axes.text(
            x + dx, y + dy, "trainer" if name == TRAINER else line(name),
            ha="center", va="center", color=INK, weight="bold" if odd else "normal",
        )  # fmt: skip
