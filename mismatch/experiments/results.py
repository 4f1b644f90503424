"""The results of passes beyond a check's own, as plug-ins of its report."""

from __future__ import annotations

from typing import Any

from mismatch.analysis.plugins import Analysis
from mismatch.codec import Misfit, from_json, schema_of, to_json
from mismatch.experiments.explanation import Explanation
from mismatch.experiments.fixes.base import FixTable


class _Fixes(Analysis[FixTable]):
    """Two keys: one entry per fix, and what holds for all of them."""

    def write(self, result: FixTable) -> dict[str, Any]:
        trials = to_json(result)
        return {"fixes": trials.pop("outcomes"), "fix_trials": trials}

    def read(self, document: dict[str, Any]) -> FixTable | None:
        if "fixes" not in document:
            return None
        if "fix_trials" not in document:
            raise Misfit("field 'fix_trials' is missing")
        return from_json(FixTable, {"outcomes": document["fixes"], **document["fix_trials"]})

    def schema(self, definitions: dict[str, Any]) -> dict[str, Any]:
        schema_of(FixTable, definitions)
        trials = dict(definitions.pop("FixTable"))
        outcomes = trials["properties"].pop("outcomes")
        trials["required"] = list(trials["properties"])
        definitions["FixTrials"] = trials
        return {"fixes": outcomes, "fix_trials": {"$ref": "#/$defs/FixTrials"}}


ANALYSES = (_Fixes("fixes", FixTable, order=5), Analysis("explain", Explanation, order=9))
