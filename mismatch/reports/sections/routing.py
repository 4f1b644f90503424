"""Whether the trainer's router picks the engine's experts: how often, where, and what it costs.

Reports of earlier versions lack some of the tables; what cannot be said is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.reports.formatting import (
    MISSING,
    count,
    interval,
    line,
    number,
    percent,
    plural,
    points,
    text,
    times,
)
from mismatch.reports.section import Column, Figure, Section, Value
from mismatch.reports.section import Table as Rows
from mismatch.reports.summary import headline, metric_table, routing_rows
from mismatch.reports.svg import (
    ACCENT,
    CROWDED,
    FAINT,
    GRID,
    INK,
    OPACITIES,
    SECOND,
    Array,
    bars,
    drawing,
    segments,
    shades,
    ticks,
    to_svg,
)
from mismatch.types import Comparison, Estimate, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Table = dict[str, list[Any]]
MOST_MOVED = 10
WIDE = 2.0  # times the share of the tokens: an interval that reaches there decides nothing
LEAD = (
    "Does the trainer's router send a token to the same experts as the engine's did when the token "
    "was sampled?"
)
# The rows that answer: how often, which, what does it cost. The rest is folded away.
CORE = (
    "routing_disagree_layer",
    "routing_disagree_any",
    "routing_top1_disagree",
    "routing_overlap",
    "routing_near_tie_flipped",
    "routing_delta2_share",
    "routing_prompt_disagree_layer",
)
LAYERS = (
    Column("layer", text),
    Column("other experts", percent, interval=0),
    Column("margin", number),
    Column("margin where they differ", number),
    Column("of those near-ties", percent),
    Column("weights, L1", number),
    Column("load moved", percent),
)
EXPERTS = (
    Column("layer", text),
    Column("expert", text),
    Column("rollout", percent),
    Column("train", percent),
    Column("difference", points, interval=0),
    Column("lost", percent),
)
LOST = (
    "Share of the layer's choices. “Lost”: of the rollout side's choices of this expert, those "
    "that the trainer did not make."
)


def of_report(report: Report) -> Section | None:
    """Of the headline comparison; None for a dense model."""
    comparison = headline(report)
    rows = {row.metric: row for row in routing_rows(report)}
    if not rows:
        return None
    tables = comparison.breakdowns
    rest = [row for name, row in rows.items() if name not in CORE]
    parts = [("rest", f"{len(rest)} more numbers about experts", metric_table(rest), "", False)]
    by_layer, by_expert = (tables.get(f"routing_by_{name}", {}) for name in ("layer", "expert"))
    parts.append(("layers", "Every layer", Rows(LAYERS, _layers(by_layer)), "", True))
    moved = Rows(EXPERTS, _experts(by_expert))
    parts.append(("moved", "Experts whose load moved most", moved, LOST, True))
    return Section(
        id="routing",
        title="Experts chosen",
        lead=LEAD,
        sentences=tuple(sentences(comparison)),
        tables=(metric_table([rows[name] for name in CORE if name in rows]),),
        figures=tuple(figures(tables)),
        parts=tuple(
            Section(f"routing-{id}", title, lead, tables=(table,), page_only=page_only)
            for id, title, table, lead, page_only in parts
        ),
    )


def _layers(table: Table) -> tuple[tuple[Value, ...], ...]:
    names = ("margin", "margin_flipped", "near_tie", "weight_l1", "load_tv")
    return tuple(
        (str(layer), _estimate(table, row, "disagree"), *(_at(table, name, row) for name in names))
        for row, layer in enumerate(table.get("layer", []))
    )


def _experts(table: Table) -> tuple[tuple[Value, ...], ...]:
    """The experts whose load moved most, those that moved at all."""
    rows = []
    for row, layer in enumerate(table.get("layer", [])[:MOST_MOVED]):
        rollout, train = table["rollout"][row], table["train"][row]
        if rollout != train:
            moved = _estimate({**table, "difference": [train - rollout] * (row + 1)}, row,
                              "difference", "difference_")  # fmt: skip
            expert = str(table["expert"][row])
            rows.append((str(layer), expert, rollout, train, moved, _at(table, "dropped", row)))
    return tuple(rows)


def _estimate(table: Table, row: int, name: str, ends: str = "") -> Estimate | None:
    value, low, high = (_at(table, key, row) for key in (name, f"{ends}low", f"{ends}high"))
    return None if value is None else Estimate(value, low, high, 0, 0, 0)


def _at(table: Table, column: str, row: int) -> Any:
    """A cell; None where the table has no such column."""
    return table[column][row] if column in table else None


def replayed(comparison: Comparison) -> str:
    """Which side was given its experts, and how; "" where both chose their own."""
    return ", ".join(_facts(comparison, "replayed"))


def sentences(comparison: Comparison) -> list[str]:
    """What the numbers mean, one sentence each."""
    routing = comparison.routing
    if "routing_disagree_any" not in routing:
        return []
    said = []
    given = replayed(comparison)
    if given:
        said.append(
            f"Replayed: {given}. Where its experts agree with those it replays, they do so by "
            "construction, and say nothing about its router."
        )
    any_layer = routing["routing_disagree_any"]
    if any_layer.value == 0.0 and not given:
        said.append(
            f"No layer of any of the {plural(any_layer.n_tokens, 'token')} chose other experts: "
            "there is no harm to measure."
        )
    elif any_layer.value > 0.0:
        said += [*_harm(routing), *_near_ties(comparison)]
    said += [f"Left out: {fact}." for fact in _facts(comparison, "layers left out")]
    return said + [f"Not measured: {fact}." for fact in _facts(comparison, "not measured")]


def _harm(routing: dict[str, Estimate]) -> list[str]:
    any_layer, carried = routing["routing_disagree_any"], routing.get("routing_delta2_share")
    factor = routing.get("routing_harm_factor")
    if carried is None:
        return []
    if any_layer.value == 1.0:
        return [
            "Every token has a layer with other experts: there are none without to compare with."
        ]
    said = (
        f"Tokens with other experts in some layer are {percent(any_layer.value)} of the "
        f"tokens and carry {percent(carried.value)}{_between(carried)} of all delta²"
    )
    if factor is not None:
        said += f"; they are off {times(factor.value)} as far as the others"
    return [f"{said}. {_meaning(any_layer.value, carried)}"]


def _meaning(share: float, carried: Estimate) -> str:
    """What it means that tokens which are ``share`` of all carry so much."""
    if carried.low is None or carried.high is None:
        return "Without an interval it is open whether that is more than their share."
    if carried.low > share:
        return "It coincides; replaying the experts shows what it causes."
    if carried.high > WIDE * share:
        return "The interval is too wide to tell that from their share: measure more prompts."
    return "That is no more than their share: no harm is seen."


def _near_ties(comparison: Comparison) -> list[str]:
    ties = comparison.routing.get("routing_near_tie_flipped")
    source = _facts(comparison, "noise")
    if ties is None or not source:
        return []
    where = (
        "rounding of the trainer's dtype, assumed because no other pass moved a margin"
        if source[0] == "rounding"
        else f"measured against {source[0]}"
    )
    return [
        f"{percent(ties.value)}{_between(ties)} of the differing choices were "
        f"near-ties: their margin lies within the router's own noise ({where})."
    ]


def _between(estimate: Estimate) -> str:
    shown = interval(estimate, percent, " to ")
    return "" if shown == MISSING else f" ({shown})"


def _facts(comparison: Comparison, wanted: str) -> list[str]:
    table = comparison.breakdowns.get("routing_notes", {})
    pairs = zip(table.get("fact", []), table.get("value", []), strict=True)
    return [line(value) for fact, value in pairs if fact == wanted]


# ---------------------------------------------------------------- figures


def figures(tables: dict[str, Table]) -> Iterable[Figure]:
    """All that the tables allow, in reading order."""
    table = tables.get("routing_layer_position", {})
    if table.get("layer"):
        yield Figure(
            "routing-map",
            "Which layer, and when",
            "Share of tokens whose experts differ, per layer and place in the response. A colour "
            "that grows stronger upwards: rounding that adds up with depth. One strong row: that "
            "layer's router or capture. Stronger to the right: state that decays along the "
            "response.",
            partial(_map, table),
        )
    table = tables.get("routing_by_layer", {})
    if any(table.get("disagree", ())):
        yield Figure(
            "routing-by-layer",
            "Where the experts differ",
            "Share of tokens for which the trainer's router picks another set of experts. A slow "
            "rise with depth is accumulated rounding; one layer near 100 % is a broken capture or "
            "router.",
            partial(
                _bars, "routing-by-layer", "Routing disagreement per layer", table, "disagree",
                table["layer"], ("layer", "other experts, % of tokens"),
            ),
        )  # fmt: skip
    table = tables.get("routing_by_margin", {})
    if any(table.get("disagree", ())):
        colours = [ACCENT if start < 1.0 else SECOND for start in table["from"]]
        yield Figure(
            "routing-by-margin",
            "Near-ties or real differences",
            "How often a choice differs, by the gap between its last chosen and first rejected "
            "expert. Left of 1 (blue) the router's own noise can turn it; bars right of 1 (orange) "
            "that stay high are differences that rounding does not explain. Above the bars: "
            "choices.",
            partial(
                _bars, "routing-by-margin", "Routing disagreement by router margin", table,
                "disagree", [f"{start:g}" for start in table["from"]],
                ("margin over the router's own noise, from", "other experts, % of choices"),
                colours=colours, counts=table["count"],
            ),
        )  # fmt: skip
    table = tables.get("routing_harm", {})
    if table.get("flips") and [str(label) for label in table["flips"]] != ["0"]:
        yield Figure(
            "routing-harm",
            "What other experts cost",
            "Equal bars: the differing experts are near-ties and harmless. Rising bars: routing "
            "carries part of the mismatch. Above the bars: tokens.",
            partial(
                _bars, "routing-harm", "Mean |delta| by number of differing layers", table,
                "mean_abs_delta", table["flips"],
                ("layers of the token that chose other experts", "mean |delta|, nats"),
                counts=table["count"],
            ),
        )  # fmt: skip
    table = tables.get("routing_harm_by_layer", {})
    rows = [row for row, layer in enumerate(table.get("layer", [])) if layer is not None]
    if rows:
        untouched = [row for row in range(len(table["layer"])) if row not in rows]
        levels = [(table["mean_abs_delta"][row], "no such layer") for row in untouched[:1]]
        table = {name: [values[row] for row in rows] for name, values in table.items()}
        yield Figure(
            "routing-harm-by-layer",
            "What an early flip costs",
            "Tokens by the first layer that chose other experts. Falling bars: an early flip is "
            "carried through all layers above. Bars at the dashed line cost nothing.",
            partial(
                _bars, "routing-harm-by-layer", "Mean |delta| by first differing layer", table,
                "mean_abs_delta", table["layer"],
                ("first layer of the token that chose other experts", "mean |delta|, nats"),
                level=levels[0] if levels else None,
            ),
        )  # fmt: skip
    table = tables.get("routing_load", {})
    if table.get("layer"):
        yield Figure(
            "routing-load", "How busy the experts are", _load_words(table), partial(_load, table)
        )


def shade_levels(share: Array) -> tuple[Array, Array]:
    """Shade of each share, [R, C] from 0 (none) on, and the shares up to which the shades reach.

    Equal steps; finer ones near 0 where one cell stands out.
    """
    top, some = float(share.max()) or 1.0, share[share > 0.0]
    steps = np.arange(1, len(OPACITIES) + 1) / len(OPACITIES)
    bounds = top * (steps**2 if len(some) and np.median(some) < 0.2 * top else steps)
    return np.where(share > 0.0, np.searchsorted(bounds, share * (1 - 1e-12)) + 1, 0), bounds


def _map(table: Table) -> str:
    """Layer by position in the response, the first layer at the bottom."""
    from matplotlib.patches import Patch

    layers = list(dict.fromkeys(table["layer"]))
    share = np.array(table["disagree"], dtype=np.float64).reshape(len(layers), -1)
    rows, columns = share.shape
    level, bounds = shade_levels(share)
    edges = [*table["start"][:columns], table["end"][columns - 1]]
    with drawing(6.0, 1.1 + min(0.36 * rows, 2.5)) as (figure, axes):
        axes.grid(False)
        axes.set_facecolor(GRID)
        axes.patch.set_alpha(0.4)
        shades(axes, level, np.arange(columns + 1), np.arange(rows + 1) - 0.5)
        axes.set(xlim=(0, columns), ylim=(-0.5, rows - 0.5))
        ticks(axes.xaxis, [count(edge) for edge in edges], 8)
        ticks(axes.yaxis, layers, max(1, min(rows, 13)))
        axes.set_xlabel("sampled token of the sequence")
        axes.set_ylabel("layer")
        if share.any():
            swatches = [Patch(facecolor=ACCENT, alpha=opacity) for opacity in OPACITIES]
            names = [f"≤ {percent(bound)}" for bound in bounds]
            axes.legend(
                swatches, names, ncols=len(names), handlelength=1.0, loc="lower center",
                bbox_to_anchor=(0.5, 1.0),
            )  # fmt: skip
        else:
            words = "no token has other experts in any layer"
            axes.text(columns / 2, (rows - 1) / 2, words, ha="center", va="center", color=FAINT)
        title = "Share of tokens with other experts, by layer and position"
        return to_svg(figure, "routing-map", title)


def _bars(
    name: str, title: str, table: Table, value: str, labels: Sequence[object],
    words: tuple[str, str], **options: Any,
) -> str:  # fmt: skip
    """Shares are drawn in percent."""
    scale = 100.0 if value == "disagree" else 1.0
    ends = (_column(table, column, scale) for column in (value, "low", "high"))
    return bars(name, title, labels, words, *ends, **options)


def _load_words(table: Table) -> str:
    worst = int(np.argmax(table["tv"]))
    shown = (
        "The most loaded expert and the median one of every layer, on both sides; grey band: from "
        "10 to 90 % of the experts, rollout side."
        if len(table["layer"]) > CROWDED
        else "Per layer and side: line from the least to the most loaded expert, bar from 10 to "
        "90 % of them, tick at the median."
    )
    if table["tv"][worst] <= 0.0:
        return f"{shown} Both sides load every expert alike."
    return (
        f"{shown} The sides' loads differ most in layer {table['layer'][worst]}: "
        f"{percent(table['tv'][worst])} of its choices would have to move."
    )


def _load(table: Table) -> str:
    """Spread of the experts' loads per layer, both sides next to each other."""
    with drawing() as (figure, axes):
        axes.axhline(1.0, color=FAINT, linewidth=0.8, dashes=(4, 3))
        (_load_lines if len(table["layer"]) > CROWDED else _load_candles)(axes, table)
        ticks(axes.xaxis, table["layer"])
        axes.set_ylim(bottom=0)
        axes.set_ylim(top=axes.get_ylim()[1] * 1.14)
        axes.legend(loc="upper right", ncols=2)
        axes.set_xlabel("layer")
        axes.set_ylabel("load of an expert, even = 1")
        return to_svg(figure, "routing-load", "Load of the experts per layer, both sides")


def _load_candles(axes: Axes, table: Table) -> None:
    x = np.arange(len(table["layer"]))
    margin = max(0.6, (5 - len(x)) / 2)  # a single layer does not fill the drawing
    thick = max(3.0, min(9.0, 120.0 / len(x)))
    for side, colour, shift in (("rollout", ACCENT, -0.19), ("train", SECOND, 0.19)):
        least, p10, median, p90, most = (
            _column(table, f"{side}_{name}") for name in ("least", "p10", "median", "p90", "most")
        )
        at = (x + shift, x + shift)
        segments(axes, at, (least, most), color=colour, linewidth=1)
        segments(axes, at, (p10, p90), color=colour, linewidth=thick, label=side)
        ends = (x + shift - 0.17, x + shift + 0.17)
        segments(axes, ends, (median, median), color=INK, linewidth=1.4, zorder=3)
    axes.set_xlim(-margin, len(x) - 1 + margin)


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
