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
from mismatch.reports.section import Cells, Column, Figure, Section
from mismatch.reports.section import Table as Rows
from mismatch.reports.summary import all_rows, headline, metric_tables
from mismatch.reports.svg import (
    ACCENT,
    FAINT,
    GRID,
    OPACITIES,
    SECOND,
    Array,
    bars,
    legend_above,
    shades,
    ticks,
)
from mismatch.reports.tokens_table import LEAST
from mismatch.types import Comparison, Estimate, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Table = dict[str, list[Any]]
MOST_MOVED = 10
WIDE = 2.0  # times the share of the tokens: an interval that reaches there decides nothing
LEAD = "A flip: in some layer the trainer's router picks another set of experts than the engine's."
# The rows that answer: how often, which, what does it cost. They come first.
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
    Column("flips", percent, interval=0),
    Column("margin", number),
    Column("margin of flips", number),
    Column("near-ties", percent, detail="of flips"),
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
NO_FLIP = "No flip in any layer"
EVERY_TOKEN = "Every token has a flip in some layer: there are none without to compare with."
# What the share of delta² that tokens with a flip carry means.
NO_INTERVAL = "Without an interval it is open whether that is more than their share."
HARMFUL = "Correlation only: --replay-routing ids measures the cause."
TOO_WIDE = "The interval is too wide to tell that from their share: measure more prompts."
HARMLESS = "That is no more than their share: no harm is seen."


def section(report: Report) -> Section | None:
    """Of the headline comparison; None for a dense model."""
    comparison = headline(report)
    rows = {row.metric: row for row in all_rows(comparison) if row.metric in comparison.routing}
    if not rows:
        return None
    tables = comparison.breakdowns
    by_layer, by_expert = (tables.get(f"routing_by_{name}", {}) for name in ("layer", "expert"))
    ordered = [rows[name] for name in dict.fromkeys((*CORE, *rows)) if name in rows]
    layers, moved = Rows(LAYERS, _layers(by_layer)), Rows(EXPERTS, _experts(by_expert))
    drawn = list(figures(tables))
    short = "; ".join(figure.title for figure in drawn)
    pictures = "By layer, position and margin"
    return Section(
        id="routing",
        title="Experts chosen",
        lead=LEAD,
        sentences=sentences(comparison),
        parts=(
            Section("routing-pictures", pictures, figures=drawn, short=short),
            Section(
                "routing-numbers",
                f"{len(rows)} numbers; every layer; experts whose load moved most",
                tables=metric_tables(ordered),
                parts=(
                    Section("routing-layers", "Every layer", tables=(layers,), page_only=True),
                    Section("routing-moved", "Load moved", LOST, tables=(moved,), page_only=True),
                ),
            ),
        ),
        folded=False,
    )


def _layers(table: Table) -> list[Cells]:
    names = ("margin", "margin_flipped", "near_tie", "weight_l1", "load_tv")
    return [
        (str(layer), _estimate(table, row, "disagree"), *(_at(table, name, row) for name in names))
        for row, layer in enumerate(table.get("layer", []))
    ]


def _experts(table: Table) -> list[Cells]:
    """The experts whose load moved most, those that moved at all."""
    rows: list[Cells] = []
    for row, layer in enumerate(table.get("layer", [])[:MOST_MOVED]):
        rollout, train = table["rollout"][row], table["train"][row]
        if rollout != train:
            moved = _estimate({**table, "difference": [train - rollout] * (row + 1)}, row,
                              "difference", "difference_")  # fmt: skip
            expert = str(table["expert"][row])
            rows.append((str(layer), expert, rollout, train, moved, _at(table, "dropped", row)))
    return rows


def _estimate(table: Table, row: int, name: str, ends: str = "") -> Estimate | None:
    value, low, high = (_at(table, key, row) for key in (name, f"{ends}low", f"{ends}high"))
    return None if value is None else Estimate(value, low, high, 0, 0, 0)


def _at(table: Table, column: str, row: int) -> Any:
    """A cell; None where the table has no such column."""
    return table[column][row] if column in table else None


def sentences(comparison: Comparison) -> list[str]:
    """What the numbers mean, one sentence each."""
    routing = comparison.routing
    if "routing_disagree_any" not in routing:
        return []
    texts = []
    given = ", ".join(_facts(comparison, "replayed"))
    if given:
        texts.append(
            f"Replayed: {given}. Where its experts agree with those it replays, they do so by "
            "construction, and say nothing about its router."
        )
    any_layer = routing["routing_disagree_any"]
    if any_layer.value > 0.0:
        texts += _harm(routing)
        ties, source = routing.get("routing_near_tie_flipped"), _facts(comparison, "noise")
        if ties is not None and source:
            where = f"measured against {source[0]}"
            if source[0] == "rounding":
                where = "rounding of the trainer's dtype, assumed because no other pass moved a "
                where += "margin"
            texts.append(
                f"{percent(ties.value)}{_between(ties)} of flips are near-ties: their margin lies "
                f"within the router's own noise ({where})."
            )
    elif any_layer.value == 0.0 and not given:
        tokens = plural(any_layer.n_tokens, "token")
        texts.append(f"{NO_FLIP} of {tokens}: there is no harm to measure.")
    texts += [f"Left out: {fact}." for fact in _facts(comparison, "layers left out")]
    return texts + [f"Not measured: {fact}." for fact in _facts(comparison, "not measured")]


def _harm(routing: dict[str, Estimate]) -> list[str]:
    """What it means that tokens which are a share of all carry so much."""
    share, carried = routing["routing_disagree_any"].value, routing.get("routing_delta2_share")
    factor = routing.get("routing_harm_factor")
    if carried is None:
        return []
    if share == 1.0:
        return [EVERY_TOKEN]
    sentence = (
        f"{percent(share)} of tokens have a flip in at least one layer; they carry "
        f"{percent(carried.value)}{_between(carried)} of all delta²"
    )
    if factor is not None:
        sentence += f", and their error is {times(factor.value)} that of the rest"
    if carried.low is None or carried.high is None:
        meaning = NO_INTERVAL
    elif carried.low > share:
        meaning = HARMFUL
    elif carried.high > WIDE * share:
        meaning = TOO_WIDE
    else:
        meaning = HARMLESS
    return [f"{sentence}. {meaning}"]


def _between(estimate: Estimate) -> str:
    shown = interval(estimate, percent, " to ")
    return "" if shown == MISSING else f" ({shown})"


def _facts(comparison: Comparison, wanted: str) -> list[str]:
    table = comparison.breakdowns.get("routing_notes", {})
    pairs = zip(table.get("fact", []), table.get("value", []), strict=True)
    return [line(value) for fact, value in pairs if fact == wanted]


# ---------------------------------------------------------------- figures


def figures(tables: dict[str, Table]) -> Iterable[Figure]:
    """Where flips sit, and whether they are near-ties."""
    table = tables.get("routing_layer_position", {})
    if table.get("layer"):
        seen = tables.get("routing_by_position", {}).get("count", [])
        yield Figure(
            "routing-map",
            _worst_layer(tables.get("routing_by_layer", {})),
            "Share of tokens with a flip, by layer and place in the response; places with fewer "
            f"than {LEAST} tokens are blank. Stronger upwards: rounding that adds up. One strong "
            "row: that layer's router. Stronger to the right: state that decays.",
            partial(_map, table, seen),
            (6.0, 1.1 + min(0.36 * len(set(table["layer"])), 2.5)),
        )
    table = tables.get("routing_by_margin", {})
    if any(table.get("disagree", ())):
        flips = np.array(table["disagree"], np.float64) * np.array(table["count"], np.float64)
        clear = float(flips[[start >= 1.0 for start in table["from"]]].sum() / flips.sum())
        yield Figure(
            "routing-by-margin",
            f"{percent(clear)} of flips are no near-ties",
            f"Flip rate of {plural(sum(table['count']), 'choice')} by router margin, in units of "
            "the router's own noise. Left of 1 (blue) noise can turn a choice; right of 1 (orange) "
            "rounding does not explain it.",
            partial(_margins, table),
        )


def _worst_layer(table: Table) -> str:
    """The layer of most flips."""
    if not any(table.get("disagree", ())):
        return NO_FLIP
    row = int(np.argmax(table["disagree"]))
    share = percent(table["disagree"][row])
    return f"Layer {table['layer'][row]} flips most: {share} of tokens"


def shade_levels(share: Array) -> tuple[Array, Array]:
    """Shade of each share, [R, C] from 0 (none) on, and the shares up to which the shades reach.

    Equal steps; finer ones near 0 where one cell stands out.
    """
    top, some = float(share.max()) or 1.0, share[share > 0.0]
    steps = np.arange(1, len(OPACITIES) + 1) / len(OPACITIES)
    bounds = top * (steps**2 if len(some) and np.median(some) < 0.2 * top else steps)
    return np.where(share > 0.0, np.searchsorted(bounds, share * (1 - 1e-12)) + 1, 0), bounds


def _map(table: Table, seen: Sequence[int], axes: Axes) -> str:
    """Layer by position in the response, the first layer at the bottom."""
    from matplotlib.patches import Patch

    layers = list(dict.fromkeys(table["layer"]))
    share = np.array(table["disagree"], dtype=np.float64).reshape(len(layers), -1)
    rows, columns = share.shape
    if len(seen) == columns:  # a share of a few tokens says nothing
        share[:, np.array(seen) < LEAST] = 0.0
    level, bounds = shade_levels(share)
    edges = [*table["start"][:columns], table["end"][columns - 1]]
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
        legend_above(axes, len(names), handles=swatches, labels=names, handlelength=1.0)
    else:
        words = "no flip in any layer"
        axes.text(columns / 2, (rows - 1) / 2, words, ha="center", va="center", color=FAINT)
    mean = zip(layers, share.mean(axis=1), strict=True)
    means = ", ".join(f"{layer} {percent(value)}" for layer, value in mean)
    return f"Share of tokens with a flip, mean by layer: {means}"


def _margins(table: Table, axes: Axes) -> str:
    """Flip rate by router margin, in percent; reports of earlier versions have no intervals."""
    none = [None] * len(table["from"])
    ends = (
        100.0 * np.array(table.get(name) or none, np.float64)
        for name in ("disagree", "low", "high")
    )
    words = "router margin over its noise, from", "flips, % of choices"
    colours = [ACCENT if start < 1.0 else SECOND for start in table["from"]]
    labels = [f"{start:g}" for start in table["from"]]
    heights = bars(axes, labels, words, *ends, colours=colours, counts=table["count"])
    return f"Flip rate by router margin; {words[1]}: {heights}"
