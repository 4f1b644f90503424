"""A matplotlib figure as SVG that may stand inside an HTML page.

The colours of the figures are sentinels; here they become CSS variables, so that one drawing serves
the light scheme, the dark one and print. Text stays text, in the page's own font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
def drawing(width: float = 6.0, height: float = 3.5) -> Iterator[tuple[Figure, Axes]]:
    """Figure and axes in the report's style; no pyplot, hence no global state.

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
    """The figure as an ``<svg>`` element.

    Args:
        name: prefix of the element's ids, unique in the page.
        title: read out by screen readers; plain text, escaped here.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return embed(buffer.getvalue(), name, title)


def embed(document: str, name: str, title: str) -> str:
    """Cut an SVG document down to what a page needs: no prolog, metadata, size or foreign ids."""
    from markupsafe import escape

    body = document[document.index("<svg") :]
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
    body = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", body)
    body = re.sub(r" ?font-family: [^;\"]+;?", "", body)
    for sentinel, variable in _VARIABLES.items():
        body = body.replace(sentinel, f"var({variable})")
    return re.sub(r"\n\s*", "\n", body).strip()
