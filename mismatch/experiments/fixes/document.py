"""What trying fixes gave: the fields ``fixes`` and ``fix_trials`` of ``report.json``, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from mismatch.experiments.fixes.base import EstimatorFix, FixOutcome, FixTable
from mismatch.json_values import (
    estimate_from_json,
    estimates_from_json,
    plain,
    verdict_from_json,
)
from mismatch.types import Estimate, Verdict

ROWS, TRIALS = "fixes", "fix_trials"


def fixes_to_json(made: FixTable | None) -> dict[str, Any]:
    """Both fields of a report, absent where no fix was tried.

    ``fixes`` is one entry per fix, best first; ``fix_trials`` is what holds for all of them.
    """
    if made is None:
        return {}
    trials = {
        field.name: getattr(made, field.name)
        for field in dataclasses.fields(made)
        if field.name not in ("outcomes", "estimators", "verdict_as_is")
    }
    trials["estimators"] = [dataclasses.asdict(one) for one in made.estimators]
    trials["verdict_as_is"] = _optional_dict(made.verdict_as_is)
    return {ROWS: [_row(one) for one in made.outcomes], TRIALS: plain(trials)}


def fixes_from_json(document: dict[str, Any]) -> FixTable | None:
    """The inverse, of the whole report; None where no fix was tried, or by an older version.

    Raises:
        KeyError, TypeError: a field is missing or unknown.
    """
    if ROWS not in document:
        return None
    trials = document[TRIALS]
    return FixTable(
        **{
            **trials,
            "outcomes": tuple(_outcome(entry) for entry in document[ROWS]),
            "estimators": tuple(EstimatorFix(**entry) for entry in trials["estimators"]),
            "left_out": tuple(trials["left_out"]),
            "verdict_as_is": _optional_verdict(trials["verdict_as_is"]),
        }
    )


def _row(one: FixOutcome) -> dict[str, Any]:
    entry: dict[str, Any] = plain(dataclasses.asdict(one))
    entry["cost"] = {key: entry.pop(key) for key in ("seconds", "peak_bytes")}
    return entry


def _outcome(entry: dict[str, Any]) -> FixOutcome:
    fields = {key: value for key, value in entry.items() if key != "cost"}
    estimates = {name: estimates_from_json(entry[name]) for name in ("before", "after", "changes")}
    return FixOutcome(
        **{
            **fields,
            **estimates,
            **entry["cost"],
            "paired": _optional_estimate(entry["paired"]),
            "difference": _optional_estimate(entry["difference"]),
            "verdict_after": _optional_verdict(entry["verdict_after"]),
        }
    )


def _optional_estimate(entry: dict[str, Any] | None) -> Estimate | None:
    return None if entry is None else estimate_from_json(entry)


def _optional_verdict(entry: dict[str, Any] | None) -> Verdict | None:
    return None if entry is None else verdict_from_json(entry)


def _optional_dict(verdict: Verdict | None) -> dict[str, Any] | None:
    return None if verdict is None else dataclasses.asdict(verdict)
