"""Analyses as plug-ins: what a report holds beyond its comparisons, by id.

A new analysis of the core is a row of :data:`CORE`; a feature lists its rows in its ``FEATURE``
(see :mod:`mismatch.plugins`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mismatch.codec import Misfit, from_json, schema_of, to_json
from mismatch.plugins import Analysis, features, load
from mismatch.types import Comparison, Rollout, Scoring


@dataclass(frozen=True, slots=True)
class RunArtefacts:
    """What an analysis may read: the artefacts of a run.

    Attributes:
        decode, train: the two sides of the headline comparison, which is ``comparison``.
        usable: scoring name -> scoring, of all whose values can be trusted.
        refused: scoring name -> why not.
        first: as ``usable``, of scorings by the model's first layers alone.
        few: as ``usable``, of scorings of the first sample of each prompt alone.
    """

    rollout: Rollout
    decode: Scoring
    train: Scoring
    comparison: Comparison
    usable: dict[str, Scoring]
    refused: dict[str, str]
    first: dict[str, Scoring] = field(default_factory=dict)
    few: dict[str, Scoring] = field(default_factory=dict)


class _Fixes(Analysis):
    """Two keys: one entry per fix, and what holds for all of them."""

    def write(self, result: Any) -> dict[str, Any]:
        trials = to_json(result)
        return {"fixes": trials.pop("outcomes"), "fix_trials": trials}

    def read(self, document: dict[str, Any]) -> Any:
        if "fixes" not in document:
            return None
        if "fix_trials" not in document:
            raise Misfit("field 'fix_trials' is missing")
        table = {"outcomes": document["fixes"], **document["fix_trials"]}
        return from_json(load(self.result), table)

    def schema(self, definitions: dict[str, Any]) -> dict[str, Any]:
        schema_of(load(self.result), definitions)
        trials = dict(definitions.pop("FixTable"))
        outcomes = trials["properties"].pop("outcomes")
        trials["required"] = list(trials["properties"])
        definitions["FixTrials"] = trials
        return {"fixes": outcomes, "fix_trials": {"$ref": "#/$defs/FixTrials"}}


_HERE, _SHOWN = "mismatch.analysis", "mismatch.reports.sections"
CORE = (
    Analysis("square", f"{_HERE}.results:Square", f"{_HERE}.square:measure",
             f"{_SHOWN}.square:section", unseen="not_judged", order=0),
    Analysis("two_passes", f"{_HERE}.results:TwoPasses", f"{_HERE}.two_passes:measure",
             f"{_SHOWN}.two_passes:section", order=4),
    Analysis("causes", f"{_HERE}.cause_results:Causes", f"{_HERE}.causes:measure",
             f"{_SHOWN}.causes:section", order=5),
    _Fixes("fixes", "mismatch.experiments.results:FixTable",
           section=f"{_SHOWN}.fixes:section", order=5),
    Analysis("explain", "mismatch.experiments.results:Explanation",
             section=f"{_SHOWN}.experiments:section", order=9),
    Analysis("long_sequence", f"{_HERE}.results:LongSequence",
             section=f"{_SHOWN}.long_sequence:section", from_run=f"{_HERE}.long_sequence:of_run",
             checks=f"{_HERE}.long_sequence:checks", order=20),
)  # fmt: skip


@cache
def analyses() -> tuple[Analysis, ...]:
    """Return all of them, in the order of their keys in report.json."""
    found = (*CORE, *(each for feature in features() for each in feature.analyses))
    return tuple(sorted(found, key=lambda analysis: analysis.order))
