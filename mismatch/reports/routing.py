"""The report's section on experts: sentences, pictures and tables from the routing breakdowns.

Reports of earlier versions lack some of the tables; what cannot be said is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mismatch.reports import quantities, routing_figures
from mismatch.reports.figures import Picture
from mismatch.reports.summary import Row, headline, routing_rows
from mismatch.reports.text import line
from mismatch.types import Comparison, Estimate, Report

MOST_MOVED = 10
WIDE = 2.0  # times the share of the tokens: an interval that reaches there decides nothing
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


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One MoE layer, all texts."""

    layer: str
    disagree: str
    interval: str
    margin: str
    margin_flipped: str
    near_tie: str
    weights: str
    load: str


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """One expert of one layer, all texts."""

    layer: str
    expert: str
    rollout: str
    train: str
    difference: str
    interval: str
    dropped: str


@dataclass(frozen=True, slots=True)
class Section:
    """What the page shows beside the table of numbers."""

    replayed: str
    sentences: list[str]
    core: list[Row]
    rest: list[Row]
    pictures: list[Picture]
    layers: list[LayerRow]
    experts: list[ExpertRow]


def section(report: Report) -> Section:
    """Everything about the headline comparison's experts; empty lists for a dense model."""
    comparison = headline(report)
    tables = comparison.breakdowns
    return Section(
        replayed=replayed(comparison),
        sentences=sentences(comparison),
        core=core_rows(report),
        rest=[row for row in routing_rows(report) if row.metric not in CORE],
        pictures=routing_figures.pictures(tables),
        layers=_layers(tables.get("routing_by_layer", {})),
        experts=_experts(tables.get("routing_by_expert", {})),
    )


def core_rows(report: Report) -> list[Row]:
    """The rows of the routing table that are always shown."""
    rows = {row.metric: row for row in routing_rows(report)}
    return [rows[name] for name in CORE if name in rows]


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
            f"No layer of any of the {any_layer.n_tokens:,} tokens chose other experts: "
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
        f"Tokens with other experts in some layer are {quantities.percent(any_layer.value)} of the "
        f"tokens and carry {quantities.percent(carried.value)}{_interval(carried)} of all delta²"
    )
    if factor is not None:
        said += f"; they are off {quantities.times(factor.value)} as far as the others"
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
        f"{quantities.percent(ties.value)}{_interval(ties)} of the differing choices were "
        f"near-ties: their margin lies within the router's own noise ({where})."
    ]


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({quantities.percent(estimate.low)} to {quantities.percent(estimate.high)})"


def _facts(comparison: Comparison, wanted: str) -> list[str]:
    table = comparison.breakdowns.get("routing_notes", {})
    pairs = zip(table.get("fact", []), table.get("value", []), strict=True)
    return [line(value) for fact, value in pairs if fact == wanted]


def _layers(table: dict[str, list[Any]]) -> list[LayerRow]:
    return [
        LayerRow(
            layer=str(layer),
            disagree=_percent(_at(table, "disagree", row)),
            interval=_range(_at(table, "low", row), _at(table, "high", row)),
            margin=quantities.number(_at(table, "margin", row)),
            margin_flipped=quantities.number(_at(table, "margin_flipped", row)),
            near_tie=_percent(_at(table, "near_tie", row)),
            weights=quantities.number(_at(table, "weight_l1", row)),
            load=_percent(_at(table, "load_tv", row)),
        )
        for row, layer in enumerate(table.get("layer", []))
    ]


def _experts(table: dict[str, list[Any]]) -> list[ExpertRow]:
    """The experts whose load moved most, those that moved at all."""
    rows = []
    for row, layer in enumerate(table.get("layer", [])[:MOST_MOVED]):
        rollout, train = table["rollout"][row], table["train"][row]
        if rollout == train:
            continue
        rows.append(
            ExpertRow(
                layer=str(layer),
                expert=str(table["expert"][row]),
                rollout=_percent(rollout),
                train=_percent(train),
                difference=_points(train - rollout),
                interval=_range(
                    _at(table, "difference_low", row), _at(table, "difference_high", row), _points
                ),
                dropped=_percent(_at(table, "dropped", row)),
            )
        )
    return rows


def _at(table: dict[str, list[Any]], column: str, row: int) -> Any:
    """A cell; None where the table has no such column."""
    return table[column][row] if column in table else None


def _percent(share: float | None) -> str:
    return quantities.MISSING if share is None else quantities.percent(share)


def _points(share: float) -> str:
    """A difference of shares, signed."""
    return f"{'+' if share > 0 else '-' if share < 0 else ''}{quantities.percent(abs(share))}"


def _range(low: float | None, high: float | None, write: Any = _percent) -> str:
    return "" if low is None or high is None else f"{write(low)} … {write(high)}"
