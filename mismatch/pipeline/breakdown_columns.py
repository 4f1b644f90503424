"""What every reader of a report may rely on in its breakdowns: columns, their kinds, their length.

A breakdown is a table as columns. Analyses add tables freely, and reports of earlier versions hold
some that nothing writes now: of a table or a column that is not listed here, only the length and
plain values are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mismatch.codec import Misfit

GROUP = "mean_abs_delta mean_delta count"
# Table -> the columns that it must have.
REQUIRED = {
    "by_turn": f"turn {GROUP}",
    "by_edge": f"edge {GROUP}",
    "by_cache": f"turns mean_cached {GROUP}",
    "by_token_class": f"token_class {GROUP}",
    "by_probability": f"low high {GROUP}",
    "by_entropy": f"low high {GROUP}",
    "by_length": f"start end sequences {GROUP}",
    "by_position": f"start end {GROUP}",
    "by_absolute_position": f"start end {GROUP}",
    "by_block": "boundary size at at_count elsewhere elsewhere_count",
    "routing_notes": "fact value",
    "routing_by_layer": "layer",
    "routing_by_position": "count",
    "routing_layer_position": "layer start end disagree",
    "routing_by_margin": "from count disagree",
}


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # a float, and room to add some


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _plain(value: Any) -> bool:
    return _text(value) or _number_or_none(value)


KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a text", _text, "edge turns token_class boundary token before after fact value"),
    ("a count", _count, "start end count sequences size at_count elsewhere_count"),
    ("a number", _number, "mean_abs_delta mean_delta at elsewhere from"),
    (
        "a number or null",
        _number_or_none,
        "k3_share high disagree margin margin_flipped near_tie weight_l1 load_tv mean_cached",
    ),
)
KIND_OF = {name: (what, fits) for what, fits, names in KINDS for name in names.split()}
# Columns that only these tables never leave empty.
OF_TABLE = {
    ("by_probability", "low"): ("a number", _number),
    ("by_entropy", "low"): ("a number", _number),
    ("routing_by_layer", "low"): ("a number or null", _number_or_none),
    ("routing_by_layer", "layer"): ("a count", _count),
    ("routing_by_margin", "low"): ("a number or null", _number_or_none),
    ("routing_layer_position", "layer"): ("a count", _count),
    ("routing_layer_position", "disagree"): ("a number", _number),
}


def require_columns(breakdowns: Mapping[str, Mapping[str, list[Any]]], path: str) -> None:
    """Refuse tables that nothing could show.

    Raises:
        Misfit: columns of different lengths, a column that is missing, or a value of another kind.
    """
    for name, table in breakdowns.items():
        lengths = {len(column) for column in table.values()}
        if len(lengths) > 1:
            raise Misfit(f"{path}.{name}: columns of different lengths")
        for column in REQUIRED.get(name, "").split():
            if column not in table:
                raise Misfit(f"{path}.{name}: column {column!r} is missing")
        for column, values in table.items():
            known = KIND_OF.get(column) if name in REQUIRED or name == "top_tokens" else None
            what, fits = OF_TABLE.get((name, column)) or known or ("a plain value", _plain)
            for value in values:
                if not fits(value):
                    raise Misfit(f"{path}.{name}.{column}: {what} expected, not {value!r:.60}")
    cells = breakdowns.get("routing_layer_position", {}).get("layer", [])
    if cells and len(cells) % len(set(cells)):
        raise Misfit(f"{path}.routing_layer_position: layers of different lengths")
