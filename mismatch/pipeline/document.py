"""``report.json``: the report as plain data, schema ``mismatch.report/1``.

The JSON schema is shipped beside this module (:func:`schema`); the field list with meanings is
docs/report-json.md. Numbers are finite or null: JSON has no NaN, and readers choke on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mismatch.analysis.corrections.document import corrections_from_json, optional_corrections
from mismatch.analysis.growth_document import budget_from_json, forecast_from_json, growth_to_json
from mismatch.experiments.engine_pair.document import engines_from_json, engines_to_json
from mismatch.experiments.fixes.document import fixes_from_json, fixes_to_json
from mismatch.experiments.gradients.document import gradients_from_json, gradients_to_json
from mismatch.experiments.kernels.document import optional_from_json, optional_kernels
from mismatch.json_values import (
    estimates_from_json,
    estimates_to_json,
    finite,
    packaged_schema,
    pair_from_json,
    pair_to_json,
    plain,
    read_document,
    verdict_from_json,
)
from mismatch.reports.two_passes import two_passes_from_json, two_passes_to_json
from mismatch.types import Check, Comparison, Report, Verdict

SCHEMA = "mismatch.report/1"


def schema() -> dict[str, Any]:
    """The JSON schema of the document, as shipped in the package."""
    return packaged_schema("report-1.json")


def report_to_json(report: Report) -> dict[str, Any]:
    """The report as JSON data: dicts, lists, strings, finite numbers, booleans and null."""
    return {
        "schema": SCHEMA,
        "verdict": _verdict(report.verdict),
        "model": report.model,
        "fingerprints": plain(report.fingerprints),
        "comparisons": [_comparison(comparison) for comparison in report.comparisons],
        "noise_floor": [_noise(pair) for pair in report.noise_floor],
        "checks": [
            {"id": check.id, "status": check.status, "detail": check.detail, "fix": check.fix}
            for check in report.checks
        ],
        "not_tested": list(report.not_tested),
        "run": plain(report.run),
        **optional_corrections(report.corrections),
        **growth_to_json(report),
        **two_passes_to_json(report.two_passes),
        **fixes_to_json(report.fixes),
        **engines_to_json(report.engines),
        **optional_kernels(report.kernels),
        **gradients_to_json(report.gradients),
    }


def report_from_json(document: Any) -> Report:
    """The inverse of :func:`report_to_json`; a null value becomes NaN again.

    Raises:
        MismatchError: not a report, a schema of another version, or a missing field (named).
    """
    return read_document(
        document, SCHEMA, _report, command="mismatch check", page="docs/report-json.md"
    )


def comparisons_to_json(
    comparisons: Sequence[Comparison], noise_floor: Sequence[Comparison]
) -> dict[str, Any]:
    """The part of a report that is measured and not judged, as ``comparison.json`` holds it."""
    return {
        "comparisons": [_comparison(comparison) for comparison in comparisons],
        "noise_floor": [_noise(pair) for pair in noise_floor],
    }


def comparisons_from_json(document: Any) -> tuple[list[Comparison], list[Comparison]]:
    """The inverse of :func:`comparisons_to_json`."""
    return (
        [_read_comparison(entry) for entry in document["comparisons"]],
        [pair_from_json(entry) for entry in document["noise_floor"]],
    )


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "status": verdict.status,
        "reason": verdict.reason,
        "levels": verdict.levels,
        "judgements": [
            {
                "metric": judgement.metric,
                "status": judgement.status,
                "value": finite(judgement.value),
                "healthy": judgement.healthy,
                "critical": judgement.critical,
                "source": judgement.source,
                "inconclusive": judgement.inconclusive,
                "deciding_prompts": judgement.deciding_prompts,
            }
            for judgement in verdict.judgements
        ],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "rollout": comparison.rollout,
        "train": comparison.train,
        "sampled_by_left": comparison.sampled_by_left,
        "metrics": estimates_to_json(comparison.metrics),
        "routing": estimates_to_json(comparison.routing),
        "breakdowns": plain(comparison.breakdowns),
    }


def _noise(pair: Comparison) -> dict[str, Any]:
    return {"id": f"{pair.rollout} / {pair.train}", **pair_to_json(pair)}


def _report(document: dict[str, Any]) -> Report:
    return Report(
        model=document["model"],
        verdict=verdict_from_json(document["verdict"]),
        fingerprints=document["fingerprints"],
        comparisons=tuple(_read_comparison(entry) for entry in document["comparisons"]),
        noise_floor=tuple(pair_from_json(entry) for entry in document["noise_floor"]),
        checks=tuple(Check(**entry) for entry in document["checks"]),
        not_tested=tuple(document["not_tested"]),
        run=document["run"],
        corrections=corrections_from_json(document.get("corrections")),
        budget=budget_from_json(document.get("budget")),
        two_passes=two_passes_from_json(document.get("two_passes")),
        forecast=forecast_from_json(document.get("forecast")),
        fixes=fixes_from_json(document),
        engines=engines_from_json(document),
        kernels=optional_from_json(document.get("kernels")),
        gradients=gradients_from_json(document.get("gradients")),
    )


def _read_comparison(entry: dict[str, Any]) -> Comparison:
    return Comparison(
        rollout=entry["rollout"],
        train=entry["train"],
        sampled_by_left=entry["sampled_by_left"],
        metrics=estimates_from_json(entry["metrics"]),
        routing=estimates_from_json(entry["routing"]),
        breakdowns=entry["breakdowns"],
    )
