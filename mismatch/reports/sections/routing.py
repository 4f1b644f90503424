"""Whether the trainer's router picks the engine's experts: how often, where, and what it costs.

Reports of earlier versions lack some of the tables; what cannot be said is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.analysis.results import REPLAY
from mismatch.reports.formatting import (
    MISSING,
    count,
    interval,
    line,
    number,
    percent,
    plural,
    text,
    times,
)
from mismatch.reports.section import Cells, Column, Figure, Section
from mismatch.reports.section import Table as Rows
from mismatch.reports.sections.tokens import LEAST
from mismatch.reports.summary import all_rows, headline, metric_tables
from mismatch.reports.svg import (
    ACCENT,
    FAINT,
    GRID,
    INK,
    OPACITIES,
    SECOND,
    Array,
    legend_above,
    shades,
    ticks,
)
from mismatch.types import Comparison, Estimate, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Table = dict[str, list[Any]]
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
    "keys_disagree_layer",
    "keys_overlap",
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
NO_FLIP = "No flip in any layer"
EVERY_TOKEN = "Every token has a flip in some layer, so none is left to compare with."
# What the share of delta² that tokens with a flip carry means.
NO_INTERVAL = "There is no interval, so it is open whether that is more than their share."
HARMFUL = "Correlation only; router replay measures what flips cost: --fix router-replay."
MEASURED = "Correlation only; the fix router-replay, below, measured what flips cost."
TOO_WIDE = "The interval is too wide to compare that with their share: measure more prompts."
HARMLESS = "That is no more than their share: no harm is seen."


def section(report: Report) -> Section | None:
    """Show routing of the headline comparison; None for a dense model."""
    comparison = headline(report)
    rows = {row.metric: row for row in all_rows(comparison) if row.metric in comparison.routing}
    if not rows:
        return None
    tables = comparison.breakdowns
    ordered = [rows[name] for name in dict.fromkeys((*CORE, *rows)) if name in rows]
    drawn, tried = list(figures(tables)), report.result("fixes")
    measured = any(o.measured and REPLAY in o.id for o in (tried.outcomes if tried else ()))
    layers = Rows(LAYERS, _layers(tables.get("routing_by_layer", {})))
    return Section(
        id="routing",
        title="Experts chosen",
        lead=LEAD,
        sentences=sentences(comparison, measured),
        parts=(
            Section(
                "routing-pictures",
                "By layer, position and margin",
                figures=drawn,
                short="; ".join(figure.title for figure in drawn),
            ),
            Section(
                "routing-numbers",
                f"{len(rows)} numbers; every layer",
                tables=metric_tables(ordered),
                parts=(Section("routing-layers", "Every layer", tables=(layers,), page_only=True),),
            ),
        ),
        folded=False,
        short=_short(comparison),
        first=True,
    )


def _short(comparison: Comparison) -> str:
    """How many choices of the routers differ, and how many of these rounding explains."""
    if "replayed" in comparison.breakdowns.get("routing_notes", {}).get("fact", ()):
        return "replayed, so they agree by construction"
    flips = comparison.routing.get("routing_disagree_layer")
    ties = comparison.routing.get("routing_near_tie_flipped")
    keys = comparison.routing.get("keys_disagree_layer")
    sparse = "" if keys is None else f"; sparse attention: {percent(keys.value)} of selections"
    if flips is None or flips.value == 0.0:
        return "" if flips is None else NO_FLIP + sparse
    near = f"; rounding explains {percent(ties.value)} of these" if ties is not None else ""
    return f"{percent(flips.value)} of choices differ{near}{sparse}"


def _keys(routing: dict[str, Estimate]) -> list[str]:
    """Return what sparse attention selected, in one sentence."""
    if (differ := routing.get("keys_disagree_layer")) is None:
        return []
    common, ties = routing["keys_overlap"], routing.get("keys_near_tie_flipped")
    near = "" if ties is None else f"; rounding explains {percent(ties.value)} of them"
    return [
        f"Sparse attention: {percent(differ.value)}{_between(differ)} of selections differ{near}. "
        f"{percent(common.value)} of the selected keys are the same."
    ]


def _layers(table: Table) -> list[Cells]:
    """Return cells per layer; reports of earlier versions lack some columns."""
    layers = table.get("layer", [])
    none = [None] * len(layers)
    numbers = ("margin", "margin_flipped", "near_tie", "weight_l1", "load_tv")
    names = ("disagree", "low", "high", *numbers)
    columns = zip(layers, *(table.get(name, none) for name in names), strict=True)
    return [
        (str(layer), None if flips is None else Estimate(flips, low, high, 0, 0, 0), *rest)
        for layer, flips, low, high, *rest in columns
    ]


def sentences(comparison: Comparison, measured: bool = False) -> list[str]:
    """Return what the numbers mean, one sentence each; ``measured``: router replay was tried."""
    routing = comparison.routing
    if "routing_disagree_any" not in routing:
        return []
    table = comparison.breakdowns.get("routing_notes", {})
    noted: dict[str, list[str]] = {}
    for fact, value in zip(table.get("fact", []), table.get("value", []), strict=True):
        noted.setdefault(fact, []).append(line(value))
    texts = []
    given = ", ".join(noted.get("replayed", ()))
    if given:
        texts.append(
            f"Replayed: {given}. Where its experts agree with those it replays, they do so by "
            "construction, which says nothing about its router."
        )
    any_layer = routing["routing_disagree_any"]
    if any_layer.value > 0.0:
        texts += _harm(routing, measured)
        ties, source = routing.get("routing_near_tie_flipped"), noted.get("noise")
        if ties is not None and source:
            where = f"measured against {source[0]}"
            if source[0] == "rounding":
                where = "assumed: rounding of the trainer's dtype, as no other pass moved a margin"
            texts.append(
                f"Rounding explains {percent(ties.value)}{_between(ties)} of the flips: their "
                f"margin is within the router's own noise ({where})."
            )
    elif any_layer.value == 0.0 and not given:
        tokens = plural(any_layer.n_tokens, "token")
        texts.append(f"{NO_FLIP} of {tokens}: there is no harm to measure.")
    texts += _keys(routing)
    texts += [f"Left out: {fact}." for fact in noted.get("layers left out", ())]
    return texts + [f"Not measured: {fact}." for fact in noted.get("not measured", ())]


def _harm(routing: dict[str, Estimate], measured: bool) -> list[str]:
    """Return what it means that tokens which are a share of all carry so much."""
    share, carried = routing["routing_disagree_any"].value, routing.get("routing_delta2_share")
    factor = routing.get("routing_harm_factor")
    if carried is None:
        return []
    if share == 1.0:
        return [EVERY_TOKEN]
    rest = "" if factor is None else f", and their error is {times(factor.value)} that of the rest"
    if carried.low is None or carried.high is None:
        meaning = NO_INTERVAL
    elif carried.low > share:
        meaning = MEASURED if measured else HARMFUL
    else:
        meaning = TOO_WIDE if carried.high > WIDE * share else HARMLESS
    return [
        f"{percent(share)} of tokens have a flip in at least one layer; they carry "
        f"{percent(carried.value)}{_between(carried)} of all delta²{rest}. {meaning}"
    ]


def _between(estimate: Estimate) -> str:
    shown = interval(estimate, percent, " to ")
    return "" if shown == MISSING else f" ({shown})"


# ---------------------------------------------------------------- figures


def figures(tables: dict[str, Table]) -> Iterable[Figure]:
    """Where flips sit, and whether they are near-ties."""
    table = tables.get("routing_layer_position", {})
    if table.get("layer"):
        seen = tables.get("routing_by_position", {}).get("count", [])
        layers, title = tables.get("routing_by_layer", {}), NO_FLIP
        if any(layers.get("disagree", ())):
            row = int(np.argmax(layers["disagree"]))
            share = percent(layers["disagree"][row])
            title = f"Layer {layers['layer'][row]} flips most: {share} of tokens"
        yield Figure(
            "routing-map",
            title,
            "Share of tokens with a flip, by layer and place in the response; places with fewer "
            f"than {LEAST} tokens are blank. Stronger upwards: rounding that adds up. One strong "
            "row: that layer's router. Stronger to the right: state that decays.",
            partial(_map, table, seen),
            (6.0, 1.1 + min(0.36 * len(set(table["layer"])), 2.5)),
        )
    table = tables.get("routing_by_margin", {})
    if any(table.get("disagree", ())):
        yield Figure(
            "routing-by-margin",
            "Flips by how close the router's choice was",
            f"Flip rate of {plural(sum(table['count']), 'choice')} by router margin, in units of "
            "the router's own noise. Left of 1 (blue) noise can turn a choice; right of 1 (orange) "
            "rounding does not explain it.",
            partial(_margins, table),
        )


def shade_levels(share: Array) -> tuple[Array, Array]:
    """Shade of each share, [R, C] from 0 (none) on, and the shares up to which the shades reach.

    Equal steps; finer steps near 0 where one cell stands out.
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
    """Flip rate by router margin; the highest bar sets the scale, not the widest interval."""
    height, low, high = (
        100.0 * np.array(table[name], np.float64) for name in ("disagree", "low", "high")
    )
    x = np.arange(len(height))
    colours = [ACCENT if start < 1.0 else SECOND for start in table["from"]]
    axes.bar(x, height, 0.7, color=colours, linewidth=0)
    arms = np.nan_to_num(np.abs(np.stack([height - low, high - height])))
    axes.errorbar(x, height, arms, fmt="none", color=INK, elinewidth=1, capsize=3, mfc=INK)
    margin = max(0.6, (5 - len(x)) / 2)  # a single bar does not fill the drawing
    axes.set_xlim(-margin, len(x) - 1 + margin)
    top = float(np.nanmax(height))
    ceiling = 1.15 * min(max(top, float(np.nanmax(np.fmax(height, high)))), 1.6 * top)
    axes.set_ylim(0, ceiling)
    for at, (end, choices) in enumerate(zip(np.fmax(height, high), table["count"], strict=True)):
        cut = end > 0.93 * ceiling  # the interval leaves the drawing: write next to it, not on it
        if not np.isfinite(end):
            continue
        left, up = (at + 0.05, 0.945 * ceiling) if cut else (at, end + 0.015 * ceiling)
        shown = count(choices) if choices < 10_000 else f"{number(choices / 1000)}k"
        axes.text(left, up, shown, ha="left" if cut else "center", color=FAINT, fontsize=10)
    labels = [f"{start:g}" for start in table["from"]]
    ticks(axes.xaxis, labels)
    axes.set_xlabel("router margin over its noise, from")
    axes.set_ylabel("flips, % of choices")
    rates = (f"{label} {number(rate)}" for label, rate in zip(labels, height, strict=True))
    return f"Flip rate by router margin; flips, % of choices: {', '.join(rates)}"
