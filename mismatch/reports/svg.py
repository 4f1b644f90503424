"""A matplotlib figure as SVG for use inside an HTML page.

The colours of the figures are sentinels; here they become CSS variables, so that one drawing serves
the light scheme, the dark one and print. Text stays text, in the page's own font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Array = NDArray[Any]

# Sentinels: colours that appear nowhere else, each standing for a CSS variable of report.css.
INK, FAINT, GRID = "#010203", "#010204", "#010205"
ACCENT, SECOND, BAND = "#010206", "#010207", "#010208"
HEALTHY, WARN, BAD = "#010209", "#01020a", "#01020b"
_VARIABLES = {
    INK: "--ink",
    FAINT: "--faint",
    GRID: "--rule",
    ACCENT: "--accent",
    SECOND: "--second",
    BAND: "--band",
    HEALTHY: "--healthy-soft",
    WARN: "--warn-soft",
    BAD: "--critical-soft",
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mismatch",  # ids are hashes: the same figure gives the same bytes
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.linewidth": 0.8,
    "axes.labelpad": 6,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "ytick.left": False,
    "ytick.minor.left": False,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "path.simplify": False,
}


@contextmanager
def drawing(width: float = 6.0, height: float = 2.5) -> Iterator[tuple[Figure, Axes]]:
    """Yield figure and axes in the report's style; no pyplot, hence no global state.

    Args:
        width, height: inches; the page scales the drawing to its column.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.style import context

    with context(["default", _STYLE]):  # a user's own matplotlibrc must not restyle the report
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


def to_svg(figure: Figure, name: str, title: str) -> str:
    """Return the figure as an ``<svg>`` element.

    Args:
        name: prefix of the element's ids, unique in the page.
        title: read out by screen readers; plain text, escaped here.
    """
    from markupsafe import escape

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # Of the document a page needs no prolog, metadata, size or foreign ids.
    body = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    for element in ("metadata", "style"):  # a style inside an inline SVG rules the whole page
        body = re.sub(rf"<{element}\b.*?</{element}>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]+)"', body)
    assert box, "matplotlib always writes a viewBox"
    opening = (
        f'<svg class="figure" viewBox="{box[1]}" role="img" aria-labelledby="{name}-title">'
        f'<title id="{name}-title">{escape(title)}</title>'
    )
    body = opening + body[body.index(">") + 1 :]
    body = re.sub(rf'\bid="(?!{name}-title)', f'id="{name}-', body)
    body = body.replace("url(#", f"url(#{name}-").replace('xlink:href="#', f'href="#{name}-')
    body = re.sub(r'(?<= d=")[^"]+', _short, body)
    body = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", body)
    body = re.sub(r" ?font-family: [^;\"]+;?", "", body)
    for sentinel, variable in _VARIABLES.items():
        body = body.replace(sentinel, f"var({variable})")
    return re.sub(r"\n\s*", "\n", body).strip()


def _short(path: re.Match[str]) -> str:
    """Return a path to a hundredth of a unit, no spaces around letters, rectangles by sides."""
    rounded = re.sub(r"(\.\d\d)\d+", r"\1", path[0])
    tight = re.sub(r"\s*([A-Za-z])\s*", r"\1", rounded).strip()
    return re.sub(r"M(\S+) (\S+)L\1 (\S+)L(\S+) \3L\4 \2z", r"M\1 \2V\3H\4V\2z", tight)


# ---------------------------------------------------------------- what several figures draw

# Opacities of one colour differ in lightness alone, which every eye and a black-and-white printer
# can distinguish.
OPACITIES = (0.16, 0.36, 0.57, 0.78, 1.0)


def rectangles(axes: Axes, x: Any, y: Any, width: Any, height: Any, **style: Any) -> None:
    """N rectangles as one path: a patch each would cost more bytes than everything else.

    Args:
        x, y: lower left corners; [N] each, as are the sizes, or one value for all.
    """
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    x, y, width, height = np.broadcast_arrays(x, y, width, height)
    corners = [(x, y), (x, y + height), (x + width, y + height), (x + width, y), (x, y)]
    vertices = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], len(x))
    axes.add_patch(PathPatch(Path(vertices, codes), linewidth=0, **style))


def shades(axes: Axes, level: Array, x: Array, y: Array) -> None:
    """Cells of a grid in the opacities of one colour; equal neighbours are one rectangle.

    Args:
        level: [R, C], from 0 (none) to ``len(OPACITIES)``.
        x, y: edges, [C + 1] and [R + 1].
    """
    for shade, opacity in enumerate(OPACITIES, 1):
        change = np.diff(np.pad((level == shade).astype(np.int8), ((0, 0), (1, 1))), axis=1)
        rows, first = np.nonzero(change == 1)
        _, last = np.nonzero(change == -1)
        size = x[last] - x[first], y[rows + 1] - y[rows]
        rectangles(axes, x[first], y[rows], *size, facecolor=ACCENT, alpha=opacity)


def ticks(axis: Axis, labels: Sequence[object], most: int = 16) -> None:
    """Labels at 0, 1, 2 …, thinned out where there are many."""
    step = max(1, -(-len(labels) // most))
    axis.set_ticks(np.arange(len(labels))[::step], [str(label) for label in labels][::step])


def legend_above(axes: Axes, columns: int, centre: float = 0.5, **style: Any) -> None:
    """Between title and drawing, where it covers nothing."""
    axes.legend(loc="lower center", bbox_to_anchor=(centre, 1.0), ncols=columns, **style)


def rows_of(axes: Axes, labels: Sequence[str]) -> None:
    """Names next to horizontal rows, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.grid(False, axis="y")
