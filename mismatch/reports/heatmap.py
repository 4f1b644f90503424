"""A heat map as SVG, written by hand: a thousand cells in a few kilobytes.

Cells of one shade are one path. All shades are opacities of one colour: they differ in lightness
alone, which every eye and a black-and-white printer can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import escape

from mismatch.reports.figures import Array
from mismatch.reports.quantities import percent

OPACITIES = (0.16, 0.36, 0.57, 0.78, 1.0)
WIDTH, LEFT, TOP = 432.0, 46.0, 8.0  # as wide as every other figure of the report
HEIGHT, TALLEST = 176.0, 26.0  # of all rows, of one row
FINE = 5.0  # below this many units cells have no gap between them


def heatmap(
    share: Array,
    rows: Sequence[str],
    edges: Sequence[int],
    name: str,
    title: str,
    axes: tuple[str, str],
    empty: str,
) -> str:
    """Shares as shades, the first row at the bottom.

    Args:
        share: [R, C] in [0, 1].
        rows: R labels.
        edges: C + 1 numbers along the bottom.
        name: prefix of ids, unique in the page.
        axes: words under the columns and beside the rows.
        empty: said in the middle where every share is 0.
    """
    n_rows, n_columns = share.shape
    height = min(TALLEST, HEIGHT / n_rows)
    width = (WIDTH - LEFT - 6.0) / n_columns
    bottom = TOP + height * n_rows
    bounds = _bounds(share)
    level = np.where(share > 0.0, np.searchsorted(bounds, share * (1 - 1e-12)) + 1, 0)
    parts = [_ground(width * n_columns, height * n_rows)]
    for shade in range(1, len(OPACITIES) + 1):
        path = _cells(level == shade, width, height, bottom)
        if path:
            parts.append(f'<path shape-rendering="crispEdges" d="{path}" {_fill(shade)}/>')
    if not share.any():
        middle = (LEFT + width * n_columns / 2, (TOP + bottom) / 2 + 4)
        parts.append(_text(*middle, empty, "middle"))
    parts += _row_labels(rows, height, bottom)
    parts += _column_labels(edges, width, bottom + 15)
    parts.append(_text(LEFT + width * n_columns / 2, bottom + 33, axes[0], "middle"))
    turned = f' transform="rotate(-90 9 {_n((TOP + bottom) / 2)})"'
    parts.append(_text(9, (TOP + bottom) / 2, axes[1], "middle", turned))
    parts += _legend(bounds, bottom + 46) if share.any() else []
    total = bottom + (64 if share.any() else 40)
    return (
        f'<svg class="figure" viewBox="0 0 {_n(WIDTH)} {_n(total)}" role="img" '
        f'aria-labelledby="{name}-title"><title id="{name}-title">{escape(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _bounds(share: Array) -> Array:
    """Upper bounds of the shades: equal steps, finer ones near 0 where one cell stands out."""
    top = float(share.max()) or 1.0
    steps = np.arange(1, len(OPACITIES) + 1) / len(OPACITIES)
    some = share[share > 0.0]
    stands_out = len(some) > 0 and float(np.median(some)) < 0.2 * top
    return top * (steps**2 if stands_out else steps)


def _cells(marked: Array, width: float, height: float, bottom: float) -> str:
    """Path of the marked cells; neighbours in a row are one rectangle where cells have no gap."""
    gap = 1.0 if min(width, height) >= FINE else 0.0
    parts = []
    for row, column, length in _runs(marked, joined=gap == 0.0):
        x, y = LEFT + column * width, bottom - (row + 1) * height
        across, down = length * width - gap, height - gap
        parts.append(f"M{_n(x)} {_n(y)}h{_n(across)}v{_n(down)}h{_n(-across)}z")
    return "".join(parts)


def _runs(marked: Array, joined: bool) -> list[tuple[int, int, int]]:
    """(row, first column, length) of the marked cells."""
    runs: list[tuple[int, int, int]] = []
    for row, column in np.argwhere(marked):
        if joined and runs and runs[-1][0] == row and runs[-1][1] + runs[-1][2] == column:
            runs[-1] = (row, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((int(row), int(column), 1))
    return runs


def _ground(width: float, height: float) -> str:
    """Behind the cells: a share of 0 is this colour, and not that of the page."""
    return (
        f'<rect x="{_n(LEFT)}" y="{_n(TOP)}" width="{_n(width)}" height="{_n(height)}" '
        'shape-rendering="crispEdges" style="fill:var(--code)"/>'
    )


def _row_labels(rows: Sequence[str], height: float, bottom: float) -> list[str]:
    step = max(1, int(np.ceil(12.0 / height)))
    return [
        _text(LEFT - 6, bottom - (index + 0.5) * height + 3.6, rows[index], "end")
        for index in range(0, len(rows), step)
    ]


def _column_labels(edges: Sequence[int], width: float, y: float) -> list[str]:
    widest = max(len(f"{edge:,}") for edge in edges)
    step = max(1, int(np.ceil(9.0 * (widest + 1) / width)))
    anchors = {0: "start", len(edges) - 1: "end"}
    return [
        _text(LEFT + index * width, y, f"{edges[index]:,}", anchors.get(index, "middle"))
        for index in range(0, len(edges), step)
    ]


def _legend(bounds: Array, y: float) -> list[str]:
    """A swatch per shade with the share up to which it reaches."""
    parts, left = [], LEFT / 6
    step = (WIDTH - left) / (len(bounds) + 1)
    for shade, bound in enumerate([0.0, *bounds]):
        x = left + shade * step
        fill = _fill(shade) if shade else 'style="fill:var(--code)"'
        parts.append(f'<rect x="{_n(x)}" y="{_n(y)}" width="11" height="11" {fill}/>')
        label = f"≤ {percent(bound)}" if shade else "0 %"
        parts.append(_text(x + 15, y + 9.5, label.replace(" %", "\u00a0%"), "start"))
    return parts


def _fill(shade: int) -> str:
    return f'style="fill:var(--accent);fill-opacity:{OPACITIES[shade - 1]}"'


def _text(x: float, y: float, words: str, anchor: str, extra: str = "") -> str:
    return (
        f'<text x="{_n(x)}" y="{_n(y)}"{extra} '
        f'style="font-size:10.5px;text-anchor:{anchor};fill:var(--faint)">{escape(words)}</text>'
    )


def _n(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")
