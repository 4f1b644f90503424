"""The pictures of the experts, from a comparison's routing breakdowns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.reports.figures import Array, Picture
from mismatch.reports.heatmap import heatmap
from mismatch.reports.quantities import number, percent
from mismatch.reports.svg import ACCENT, FAINT, GRID, INK, SECOND, drawing, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Table = dict[str, list[Any]]
CROWDED = 24  # bars beyond which labels are thinned out and whiskers have no caps


def pictures(tables: dict[str, Table]) -> list[Picture]:
    """All routing figures that the tables allow, in reading order."""
    made = [
        layer_position(tables.get("routing_layer_position", {})),
        by_layer(tables.get("routing_by_layer", {})),
        by_margin(tables.get("routing_by_margin", {})),
        harm(tables.get("routing_harm", {})),
        harm_by_layer(tables.get("routing_harm_by_layer", {})),
        load(tables.get("routing_load", {})),
    ]
    return [picture for picture in made if picture is not None]


def layer_position(table: Table) -> Picture | None:
    """Layer by position in the response: where the experts differ."""
    if not table.get("layer"):
        return None
    layers = list(dict.fromkeys(table["layer"]))
    share = np.array(table["disagree"], dtype=np.float64).reshape(len(layers), -1)
    columns = share.shape[1]
    starts, last = table["start"][:columns], table["end"][columns - 1]
    svg = heatmap(
        share,
        rows=[str(layer) for layer in layers],
        edges=[*starts, last],
        name="routing-map",
        title="Share of tokens with other experts, by layer and position",
        axes=("sampled token of the sequence", "layer"),
        empty="no token has other experts in any layer",
    )
    return Picture(
        "routing-map",
        "Which layer, and when",
        "Share of tokens whose experts differ, per layer and place in the response. A colour that "
        "grows stronger upwards: rounding that adds up with depth. One strong row: that layer's "
        "router or capture. Stronger to the right: state that decays along the response.",
        svg,
    )


def by_layer(table: Table) -> Picture | None:
    """Share of tokens whose experts differ, per MoE layer, with its interval."""
    if not table.get("layer") or not any(table["disagree"]):
        return None
    share, low, high = (_column(table, name, 100.0) for name in ("disagree", "low", "high"))
    with drawing() as (figure, axes):
        _bars(axes, share, low, high)
        _layers(axes, table["layer"])
        axes.set_xlabel("layer")
        axes.set_ylabel("other experts, % of tokens")
        svg = to_svg(figure, "routing-by-layer", "Routing disagreement per layer")
    return Picture(
        "routing-by-layer",
        "Where the experts differ",
        "Share of tokens for which the trainer's router picks another set of experts. A slow rise "
        "with depth is accumulated rounding; one layer near 100 % is a broken capture or router.",
        svg,
    )


def by_margin(table: Table) -> Picture | None:
    """Share of choices that differ, by their margin in units of the router's own noise."""
    if not table.get("from") or not any(table["disagree"]):
        return None
    share, low, high = (_column(table, name, 100.0) for name in ("disagree", "low", "high"))
    near = np.array([start < 1.0 for start in table["from"]])
    with drawing() as (figure, axes):
        _bars(axes, share, low, high, colours=[ACCENT if tie else SECOND for tie in near])
        _counts(axes, share, high, table["count"])
        labels = [f"{start:g}" if start else "0" for start in table["from"]]
        axes.set_xticks(np.arange(len(labels)), labels)
        axes.set_xlabel("margin over the router's own noise, from")
        axes.set_ylabel("other experts, % of choices")
        svg = to_svg(figure, "routing-by-margin", "Routing disagreement by router margin")
    return Picture(
        "routing-by-margin",
        "Near-ties or real differences",
        "How often a choice differs, by the gap between its last chosen and first rejected expert. "
        "Left of 1 (blue) the router's own noise can turn it; bars right of 1 (orange) that stay "
        "high are differences that rounding does not explain. Above the bars: choices.",
        svg,
    )


def harm(table: Table) -> Picture | None:
    """Mean |delta| of tokens with 0, 1, 2 … layers that chose other experts."""
    flips = [str(label) for label in table.get("flips", [])]
    if not flips or flips == ["0"]:
        return None
    mean, low, high = (_column(table, name) for name in ("mean_abs_delta", "low", "high"))
    with drawing() as (figure, axes):
        _bars(axes, mean, low, high)
        _counts(axes, mean, high, table["count"])
        axes.set_xticks(np.arange(len(flips)), flips)
        axes.set_xlabel("layers of the token that chose other experts")
        axes.set_ylabel("mean |delta|, nats")
        svg = to_svg(figure, "routing-harm", "Mean |delta| by number of differing layers")
    return Picture(
        "routing-harm",
        "What other experts cost",
        "Equal bars: the differing experts are near-ties and harmless. Rising bars: routing "
        "carries part of the mismatch. Above the bars: tokens.",
        svg,
    )


def harm_by_layer(table: Table) -> Picture | None:
    """Mean |delta| by the first layer that chose other experts, beside tokens without any."""
    rows = [i for i, layer in enumerate(table.get("layer", [])) if layer is not None]
    if not rows:
        return None
    mean, low, high = (_column(table, name)[rows] for name in ("mean_abs_delta", "low", "high"))
    untouched = [i for i, layer in enumerate(table["layer"]) if layer is None]
    with drawing() as (figure, axes):
        _bars(axes, mean, low, high)
        _layers(axes, [table["layer"][i] for i in rows])
        if untouched:
            level = table["mean_abs_delta"][untouched[0]]
            axes.axhline(level, color=SECOND, linewidth=1.4, dashes=(4, 2), label="no such layer")
            axes.set_ylim(top=max(axes.get_ylim()[1], level * 1.1) * 1.12)
            axes.legend(loc="upper right")
        axes.set_xlabel("first layer of the token that chose other experts")
        axes.set_ylabel("mean |delta|, nats")
        svg = to_svg(figure, "routing-harm-by-layer", "Mean |delta| by first differing layer")
    return Picture(
        "routing-harm-by-layer",
        "What an early flip costs",
        "Tokens by the first layer that chose other experts. Falling bars: an early flip is "
        "carried through all layers above. Bars at the dashed line cost nothing.",
        svg,
    )


def load(table: Table) -> Picture | None:
    """Spread of the experts' loads per layer, both sides next to each other."""
    if not table.get("layer"):
        return None
    crowded = len(table["layer"]) > CROWDED
    with drawing() as (figure, axes):
        axes.axhline(1.0, color=FAINT, linewidth=0.8, dashes=(4, 3))
        (_load_lines if crowded else _load_candles)(axes, table)
        _layers(axes, table["layer"])
        axes.set_ylim(bottom=0)
        axes.set_ylim(top=axes.get_ylim()[1] * 1.14)
        axes.legend(loc="upper right", ncols=2)
        axes.set_xlabel("layer")
        axes.set_ylabel("load of an expert, even = 1")
        svg = to_svg(figure, "routing-load", "Load of the experts per layer, both sides")
    worst = int(np.argmax(table["tv"]))
    shown = (
        "The most loaded expert and the median one of every layer, on both sides; grey band: from "
        "10 to 90 % of the experts, rollout side."
        if crowded
        else "Per layer and side: line from the least to the most loaded expert, bar from 10 to "
        "90 % of them, tick at the median."
    )
    moved = (
        f"The sides' loads differ most in layer {table['layer'][worst]}: "
        f"{percent(table['tv'][worst])} of its choices would have to move."
        if table["tv"][worst] > 0.0
        else "Both sides load every expert alike."
    )
    return Picture(
        "routing-load",
        "How busy the experts are",
        f"{shown} {moved}",
        svg,
    )


def _load_candles(axes: Axes, table: Table) -> None:
    x = np.arange(len(table["layer"]))
    thick = max(3.0, min(9.0, 120.0 / len(x)))
    for side, colour, shift in (("rollout", ACCENT, -0.19), ("train", SECOND, 0.19)):
        least, p10, median, p90, most = (
            _column(table, f"{side}_{name}") for name in ("least", "p10", "median", "p90", "most")
        )
        at = (x + shift, x + shift)
        _segments(axes, at, (least, most), color=colour, linewidth=1)
        _segments(axes, at, (p10, p90), color=colour, linewidth=thick, label=side)
        ends = (x + shift - 0.17, x + shift + 0.17)
        _segments(axes, ends, (median, median), color=INK, linewidth=1.4, zorder=3)
    axes.set_xlim(*_reach(len(x)))


def _load_lines(axes: Axes, table: Table) -> None:
    """For many layers: the sides nearly coincide, so the second is dashed and lies on the first."""
    x = np.arange(len(table["layer"]))
    low, high = _column(table, "rollout_p10"), _column(table, "rollout_p90")
    axes.fill_between(x, low, high, color=GRID, lw=0)
    for side, colour, style in (
        ("rollout", ACCENT, {"linewidth": 2.0}),
        ("train", SECOND, {"linewidth": 1.2, "dashes": (3, 2)}),
    ):
        axes.plot(x, _column(table, f"{side}_most"), color=colour, label=side, **style)
        axes.plot(x, _column(table, f"{side}_median"), color=colour, **style)
    axes.margins(x=0.01)


def _column(table: Table, name: str, scale: float = 1.0) -> Array:
    """A column as numbers, NaN where there is none; reports of earlier versions lack some."""
    values = table.get(name) or [None] * len(next(iter(table.values())))
    return scale * np.array([np.nan if value is None else value for value in values], np.float64)


def _bars(
    axes: Axes, height: Array, low: Array, high: Array, colours: list[str] | None = None
) -> None:
    """Bars with their intervals; the highest bar sets the scale, not the widest interval."""
    x = np.arange(len(height))
    paint = np.array(colours or [ACCENT] * len(x))
    for colour in dict.fromkeys(paint):
        _blocks(axes, x[paint == colour], np.nan_to_num(height)[paint == colour], str(colour))
    axes.set_xlim(*_reach(len(x)))
    known = ~np.isnan(low) & ~np.isnan(high)
    at, low, high = x[known], low[known], high[known]
    _segments(axes, (at, at), (low, high), color=INK, linewidth=1)
    if len(x) <= CROWDED:
        for ends in (low, high):
            _segments(axes, (at - 0.09, at + 0.09), (ends, ends), color=INK, linewidth=1)
    top = max(float(np.nanmax(height)), 1e-12)
    reach = float(high.max()) if known.any() else top
    axes.set_ylim(0, 1.15 * min(max(top, reach), 1.6 * top))


def _reach(count: int) -> tuple[float, float]:
    """Limits of the horizontal axis: a single bar does not fill the drawing."""
    margin = max(0.6, (5 - count) / 2)
    return -margin, count - 1 + margin


def _blocks(axes: Axes, x: Array, height: Array, colour: str) -> None:
    """Bars as one path: a bar each would cost more bytes than everything else."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [(-0.35, 0), (-0.35, 1), (0.35, 1), (0.35, 0)]
    bars = np.stack([np.stack([x + dx, height * up], axis=1) for dx, up in corners], axis=1)
    path = Path.make_compound_path(*[Path(bar, closed=False) for bar in bars])
    axes.add_patch(PathPatch(path, facecolor=colour, linewidth=0))


def _segments(axes: Axes, x: tuple[Array, Array], y: tuple[Array, Array], **style: Any) -> None:
    """Straight lines as one path, from (x[0], y[0]) to (x[1], y[1])."""
    gap = np.full(len(x[0]), np.nan)
    lines = [np.stack([*ends, gap], axis=1).ravel() for ends in (x, y)]
    axes.plot(lines[0], lines[1], solid_capstyle="butt", **style)


def _counts(axes: Axes, height: Array, high: Array, count: list[int]) -> None:
    """The number of tokens above every bar and its interval."""
    ceiling = axes.get_ylim()[1]
    for x, (value, end, tokens) in enumerate(zip(height, high, count, strict=True)):
        text = f"{tokens:,}" if tokens < 10_000 else f"{number(tokens / 1000)}k"
        above = float(np.nanmax([value, end]))
        cut = above > 0.93 * ceiling  # the interval leaves the drawing: beside it, not on it
        left, up = (x + 0.05, 0.945 * ceiling) if cut else (x, above + 0.015 * ceiling)
        side = "left" if cut else "center"
        axes.text(left, up, text, ha=side, color=FAINT, fontsize=9.5)


def _layers(axes: Axes, layers: list[int]) -> None:
    """Layer numbers along the bottom, thinned out where there are many."""
    step = max(1, -(-len(layers) // 16))
    axes.set_xticks(np.arange(len(layers))[::step], [str(layer) for layer in layers][::step])
