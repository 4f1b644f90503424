"""The levels table: bounds per metric and class of stack, and files that override them.

Levels hold for step 0, the same weights on both sides. The table is mismatch/levels.toml; each cell
says where it comes from.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError, did_you_mean
from mismatch.metrics import METRICS
from mismatch.run.files import read_regular

SHIPPED = "levels.toml"
COLUMNS = ("fp32", "fp16", "bf16 dense", "bf16 MoE", "quantised")


@dataclass(frozen=True, slots=True)
class Level:
    """One cell: the bounds of one metric in one column.

    >>> Level(1e-3, 0.013, "NeMo-RL docs").healthy
    0.001
    """

    healthy: float
    unfit: float
    source: str
    yours: bool = False  # of the user's file: one that cannot be applied is an error


Thresholds = Mapping[str, Mapping[str, Level]]  # metric -> column -> cell


@cache
def default_thresholds() -> Thresholds:
    """Return the levels table that ships with the package."""
    text = resources.files("mismatch.analysis").joinpath("levels.toml").read_text(encoding="utf-8")
    return _cells(tomllib.loads(text), text, SHIPPED, {})


def load_thresholds(path: str | Path) -> Thresholds:
    """Return the table with the cells of a TOML file in place of the built-in cells.

    A cell of the file may give ``healthy``, ``unfit`` or both, and a ``source``; what it leaves
    out stays. A metric without built-in levels may get some.

    Raises:
        MismatchError: unreadable or not TOML; an unknown metric, column or key (with line and near
            misses); bounds that are no numbers or in the wrong order.
    """
    path = Path(path)
    try:
        text = read_regular(path).decode()
        data = tomllib.loads(text)
    except OSError as error:
        fault = f"cannot read the thresholds file {path}: {error.strerror or error}"
        raise MismatchError(fault, "give --thresholds the path of a TOML file") from error
    except (ValueError, RecursionError) as error:
        fault = f"{path} is not TOML: {error}"
        fix = 'a cell looks like: [k3_kl."bf16 MoE"] healthy = 1e-3'
        raise MismatchError(fault, fix) from error
    return _cells(data, text, str(path), default_thresholds())


def _cells(data: dict[str, Any], text: str, where: str, base: Thresholds) -> Thresholds:
    judgeable = [name for name, metric in METRICS.items() if metric.good != "neither"]
    table = {metric: dict(columns) for metric, columns in base.items()}
    for metric, columns in data.items():
        _known(metric, judgeable, "metric", text, where)
        if not isinstance(columns, dict):
            fault = f"{where}, line {_line(text, metric)}: {metric} is no table of columns"
            fix = f'write [{metric}."bf16 MoE"], then healthy = … and unfit = …'
            raise MismatchError(fault, fix)
        for column, cell in columns.items():
            _known(column, COLUMNS, f"column of {metric}", text, where)
            old = table.get(metric, {}).get(column)
            table.setdefault(metric, {})[column] = _level(metric, column, cell, old, text, where)
    return table


def _known(name: str, names: Sequence[str], what: str, text: str, where: str) -> None:
    if name in names:
        return
    guess = did_you_mean(name, names, most=1)
    listed = ", ".join(names) if len(names) <= 8 else "docs/reference/metrics.md lists them"
    fault = f"{where}, line {_line(text, name)}: unknown {what}: {name!r}"
    raise MismatchError(fault, f"{guess}known: {listed}")


def _level(metric: str, column: str, cell: Any, old: Level | None, text: str, where: str) -> Level:
    cell_name = f"{where}, line {_line(text, metric, column)}: {metric}, {column}"
    example = f'[{metric}."{column}"] with healthy = … and unfit = …'
    if not isinstance(cell, dict):
        raise MismatchError(f"{cell_name}: no table of bounds", f"write {example}")
    for key in cell:
        _known(key, ("healthy", "unfit", "source"), f"key of {metric}", text, where)
    bounds = []
    for name in ("healthy", "unfit"):
        value: Any = cell.get(name, getattr(old, name, None))
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise MismatchError(f"{cell_name}: {name} is no number: {value!r}", f"write {example}")
        bounds.append(float(value))
    low, high = METRICS[metric].bounds
    for name, bound in zip(("healthy", "unfit"), bounds, strict=True):
        if bound > high if METRICS[metric].good == "high" else bound < low:
            fault = f"{cell_name}: no run can reach {name} = {bound:g}"
            raise MismatchError(fault, f"{metric} lies between {low:g} and {high:g}")
    sign = -1.0 if METRICS[metric].good == "high" else 1.0
    if sign * bounds[0] > sign * bounds[1]:
        order = "above" if sign < 0 else "below"
        fault = f"{cell_name}: healthy {bounds[0]:g} is worse than unfit {bounds[1]:g}"
        fix = f"{metric} is good when {METRICS[metric].good}: healthy lies {order} unfit"
        raise MismatchError(fault, fix)
    source = str(cell.get("source", f"your thresholds ({where})"))
    return Level(bounds[0], bounds[1], source, yours=where != SHIPPED)


def _line(text: str, *names: str) -> int:
    """First line that holds all the names: TOML parsers keep no positions of keys."""
    for number, line in enumerate(text.splitlines(), start=1):
        if all(name in line for name in names):
            return number
    return 1 if len(names) == 1 else _line(text, names[0])
