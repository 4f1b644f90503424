"""Analyses as plug-ins: what a report holds beyond its comparisons, by id.

A new analysis of the core is two files: ``mismatch/analysis/ID.py`` with
``ANALYSIS = Analysis(…)``, and ``mismatch/reports/sections/ID.py`` with
``section(result, report)``. A feature names its analyses in its ``FEATURE`` and their sections
and chapters in the :class:`Analysis` (see :mod:`mismatch.plugins`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from mismatch.analysis.diagnosis.ranking import Cause
from mismatch.codec import from_json, schema_of, to_json
from mismatch.plugins import features, load
from mismatch.specs import CheckSpec
from mismatch.types import Check, Comparison, NotTested, Rollout, Scoring

R = TypeVar("R")

ELSEWHERE = ("mismatch.experiments.results",)  # analyses of passes beyond a check's own


@dataclass(frozen=True, slots=True)
class RunArtefacts:
    """What an analysis may read: the artefacts of a run.

    Attributes:
        decode, train: the two sides of the headline comparison, which is ``comparison``.
        usable: scoring name -> scoring, of all whose values can be trusted.
        refused: scoring name -> why not.
    """

    rollout: Rollout
    decode: Scoring
    train: Scoring
    comparison: Comparison
    usable: dict[str, Scoring]
    refused: dict[str, str]


@dataclass(frozen=True, slots=True)
class Analysis(Generic[R]):
    """One analysis: how its result is measured, and where it stands in a report.

    Attributes:
        id: its key in report.json.
        result: a frozen dataclass, written and read by :mod:`mismatch.codec`.
        measure: pure; None where the run does not ask for it.
        section: import string of the function that shows it, ``module:function``; "": one of the
            core's (``mismatch/reports/sections``).
        unseen: what a result could not see, for the report's list of what was not tested.
        order: of its key in report.json.
        from_run: reads the result from artefacts that a command of the feature left in a run
            directory; it is in the report whether or not anything was compared.
        checks: what a result adds to the checks that the verdict reads.
        causes: what a result that ``from_run`` read found to be wrong by running parts of both
            sides; only digests and resolved settings come before it.
        chapter: id of the chapter of the page that shows the section (``reports/sections``).
        of_pairs: it is also measured where ``mismatch compare`` takes any two scorings.
    """

    id: str
    result: type[R]
    measure: Callable[[RunArtefacts, CheckSpec], R | NotTested | None] = lambda run, spec: None
    section: str = ""
    unseen: Callable[[R], tuple[str, ...]] = lambda result: ()
    order: int = 100
    from_run: Callable[[Path, CheckSpec], R | None] = lambda run_dir, spec: None
    checks: Callable[[R], tuple[Check, ...]] = lambda result: ()
    causes: Callable[[R], tuple[Cause, ...]] = lambda result: ()
    chapter: str = "more"
    of_pairs: bool = False

    def write(self, result: R) -> dict[str, Any]:
        """Return the keys of report.json that hold it."""
        return {self.id: to_json(result)}

    def read(self, document: dict[str, Any]) -> R | None:
        """Return the inverse; None where the report does not have it."""
        entry = document.get(self.id)
        return None if entry is None else from_json(self.result, entry)

    def schema(self, definitions: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema of its keys."""
        return {self.id: schema_of(self.result, definitions)}


@cache
def analyses() -> tuple[Analysis[Any], ...]:
    """Return all of them, in the order of their keys in report.json."""
    import mismatch.analysis as room

    here = [f"{room.__name__}.{info.name}" for info in pkgutil.iter_modules(room.__path__)]
    modules = [import_module(name) for name in (*here, *ELSEWHERE) if name != __name__]
    found = [
        analysis
        for module in modules
        for analysis in getattr(module, "ANALYSES", [getattr(module, "ANALYSIS", None)])
        if analysis is not None
    ]
    for feature in features():
        if feature.analyses:
            found += load(feature.analyses)
    return tuple(sorted(found, key=lambda analysis: analysis.order))
