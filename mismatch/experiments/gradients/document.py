"""The field ``gradients`` of ``report.json``, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from mismatch.experiments.gradients.types import GradientCheck, GradientRow, GroupError
from mismatch.json_values import plain
from mismatch.types import Estimate

FIELD = "gradients"
OF_GROUP = ("norm_ratio", "cosine", "relative_error")
OF_ROW = ("bias", "variance", "error_ratio", "variance_ratio")


def gradients_to_json(made: GradientCheck | None) -> dict[str, Any]:
    """The field of a report; absent where no gradient was taken."""
    return {} if made is None else {FIELD: plain(dataclasses.asdict(made))}


def gradients_from_json(document: dict[str, Any] | None) -> GradientCheck | None:
    """The inverse, of the field.

    Raises:
        KeyError, TypeError: a field is missing or unknown.
    """
    if document is None:
        return None
    return GradientCheck(
        **{
            **document,
            "rows": tuple(_row(entry) for entry in document["rows"]),
            "summary": tuple(document["summary"]),
            "not_tested": tuple(document["not_tested"]),
        }
    )


def _row(entry: dict[str, Any]) -> GradientRow:
    groups = tuple(GroupError(**_read(one, OF_GROUP)) for one in entry["groups"])
    return GradientRow(**{**_read(entry, OF_ROW), "groups": groups})


def _read(entry: dict[str, Any], estimates: tuple[str, ...]) -> dict[str, Any]:
    return {**entry, **{name: _estimate(entry[name]) for name in estimates}}


def _estimate(entry: dict[str, Any] | None) -> Estimate | None:
    return None if entry is None else Estimate(**{**entry, "flags": tuple(entry["flags"])})
