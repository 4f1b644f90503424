"""Error budget and length forecast as the fields of ``report.json``, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from mismatch.json_values import estimate_from_json, plain
from mismatch.metrics.budget import Budget, Gap, Step
from mismatch.metrics.forecast import Forecast, HeldBack, Row
from mismatch.types import Estimate, Report


def growth_to_json(report: Report) -> dict[str, Any]:
    """The fields ``budget`` and ``forecast``, each where the report has it."""
    parts = {"budget": report.budget, "forecast": report.forecast}
    return {
        name: plain(dataclasses.asdict(part)) for name, part in parts.items() if part is not None
    }


def budget_from_json(entry: dict[str, Any] | None) -> Budget | None:
    """The inverse, of the document's ``budget``; None where an older document has none."""
    if entry is None:
        return None
    return Budget(
        left=entry["left"],
        right=entry["right"],
        mean=estimate_from_json(entry["mean"]),
        spread=estimate_from_json(entry["spread"]),
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
        check=None
        if check is None
        else HeldBack(**check | {"error": estimate_from_json(check["error"])}),
        observed=tuple((point[0], point[1]) for point in entry["observed"]),
        rows=tuple(
            Row(row["length"], *(estimate_from_json(row[name]) for name in _ROW))
            for row in entry["rows"]
        ),
        flags=tuple(entry["flags"]),
    )


_ROW = [field.name for field in dataclasses.fields(Row) if field.name != "length"]


def _step(entry: dict[str, Any]) -> Step:
    mean, size = estimate_from_json(entry["mean"]), estimate_from_json(entry["size"])
    return Step(entry["left"], entry["right"], mean, size, _optional(entry["share"]))


def _optional(entry: dict[str, Any] | None) -> Estimate | None:
    return None if entry is None else estimate_from_json(entry)
