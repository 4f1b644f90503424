"""Error budget and length forecast as the fields of ``report.json``, and back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mismatch.metrics.budget import Budget, Gap, Step
from mismatch.metrics.forecast import Forecast, HeldBack, Row
from mismatch.types import Estimate, Report


def growth_to_json(report: Report) -> dict[str, Any]:
    """The fields ``budget`` and ``forecast``, each where the report has it."""
    parts = {"budget": report.budget, "forecast": report.forecast}
    return {
        name: _finite(dataclasses.asdict(part)) for name, part in parts.items() if part is not None
    }


def budget_from_json(entry: dict[str, Any] | None) -> Budget | None:
    """The inverse, of the document's ``budget``; None where an older document has none."""
    if entry is None:
        return None
    return Budget(
        left=entry["left"],
        right=entry["right"],
        mean=_estimate(entry["mean"]),
        spread=_estimate(entry["spread"]),
        steps=tuple(_step(step) for step in entry["steps"]),
        beside=tuple(_step(step) for step in entry["beside"]),
        gaps=tuple(Gap(**gap) for gap in entry["gaps"]),
        notes=tuple(entry["notes"]),
    )


def forecast_from_json(entry: dict[str, Any] | None) -> Forecast | None:
    """The inverse, of the document's ``forecast``; None where an older document has none."""
    if entry is None:
        return None
    check = entry["check"]
    return Forecast(
        target=entry["target"],
        longest=entry["longest"],
        reach=entry["reach"],
        floor=entry["floor"],
        mean=_optional(entry["mean"]),
        variance=_optional(entry["variance"]),
        inflation=_optional(entry["inflation"]),
        lags=entry["lags"],
        persistent=entry["persistent"],
        tail_index=entry["tail_index"],
        missing=entry["missing"],
        check=None if check is None else HeldBack(**check | {"error": _estimate(check["error"])}),
        observed=tuple((point[0], point[1]) for point in entry["observed"]),
        rows=tuple(
            Row(row["length"], *(_estimate(row[name]) for name in _ROW)) for row in entry["rows"]
        ),
        flags=tuple(entry["flags"]),
    )


_ROW = [field.name for field in dataclasses.fields(Row) if field.name != "length"]


def _step(entry: dict[str, Any]) -> Step:
    mean, size = _estimate(entry["mean"]), _estimate(entry["size"])
    return Step(entry["left"], entry["right"], mean, size, _optional(entry["share"]))


def _optional(entry: dict[str, Any] | None) -> Estimate | None:
    return None if entry is None else _estimate(entry)


def _estimate(entry: dict[str, Any]) -> Estimate:
    value = entry["value"]
    if value is None:
        value = math.inf if "overflow" in entry["flags"] else math.nan
    return Estimate(**entry | {"value": float(value), "flags": tuple(entry["flags"])})


def _finite(value: Any) -> Any:
    """Tuples as lists, numbers finite or null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
