"""``report.json``: the report as plain data, schema ``mismatch.report/1``.

The JSON schema is shipped beside this module (:func:`schema`); the field list with meanings is
docs/report-json.md. Numbers are finite or null: JSON has no NaN, and readers choke on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

from mismatch.corrections.document import corrections_from_json, optional_corrections
from mismatch.errors import MismatchError
from mismatch.reports.engines_json import engines_from_json, engines_to_json
from mismatch.reports.fixes_json import fixes_from_json, fixes_to_json
from mismatch.reports.gradients_json import gradients_from_json, gradients_to_json
from mismatch.reports.growth_json import budget_from_json, forecast_from_json, growth_to_json
from mismatch.reports.kernels_json import optional_from_json, optional_kernels
from mismatch.reports.two_passes import two_passes_from_json, two_passes_to_json
from mismatch.types import Check, Comparison, Estimate, Judgement, Report, Verdict

SCHEMA = "mismatch.report/1"


def schema() -> dict[str, Any]:
    """The JSON schema of the document, as shipped in the package."""
    text = resources.files("mismatch.reports").joinpath("schema/report-1.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def report_to_json(report: Report) -> dict[str, Any]:
    """The report as JSON data: dicts, lists, strings, finite numbers, booleans and null."""
    return {
        "schema": SCHEMA,
        "verdict": _verdict(report.verdict),
        "model": report.model,
        "fingerprints": _plain(report.fingerprints),
        "comparisons": [_comparison(comparison) for comparison in report.comparisons],
        "noise_floor": [_noise(pair) for pair in report.noise_floor],
        "checks": [
            {"id": check.id, "status": check.status, "detail": check.detail, "fix": check.fix}
            for check in report.checks
        ],
        "not_tested": list(report.not_tested),
        "run": _plain(report.run),
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
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise MismatchError(
            f"not a {SCHEMA} document: its schema is {found!r}",
            "read it with the version of mismatch that wrote it, or run `mismatch check` again",
        )
    try:
        return _report(document)
    except (KeyError, TypeError, AttributeError) as error:
        raise MismatchError(
            f"incomplete {SCHEMA} document: {type(error).__name__}: {error}",
            "run `mismatch check` again; docs/report-json.md lists the fields",
        ) from error


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
        [_read_noise(entry) for entry in document["noise_floor"]],
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
                "value": _finite(judgement.value),
                "healthy": judgement.healthy,
                "critical": judgement.critical,
                "source": judgement.source,
                "inconclusive": judgement.inconclusive,
                "deciding_prompts": judgement.deciding_prompts,
            }
            for judgement in verdict.judgements
        ],
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {
        "value": _finite(estimate.value),
        "low": _finite(estimate.low),
        "high": _finite(estimate.high),
        "n_tokens": estimate.n_tokens,
        "n_sequences": estimate.n_sequences,
        "n_prompts": estimate.n_prompts,
        "flags": list(estimate.flags),
    }


def _estimates(estimates: dict[str, Estimate]) -> dict[str, Any]:
    return {name: _estimate(estimate) for name, estimate in estimates.items()}


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "rollout": comparison.rollout,
        "train": comparison.train,
        "sampled_by_left": comparison.sampled_by_left,
        "metrics": _estimates(comparison.metrics),
        "routing": _estimates(comparison.routing),
        "breakdowns": _plain(comparison.breakdowns),
    }


def _noise(pair: Comparison) -> dict[str, Any]:
    """A pair of the noise floor: neither side is "rollout" or "train", hence left and right."""
    return {
        "id": f"{pair.rollout} / {pair.train}",
        "left": pair.rollout,
        "right": pair.train,
        "sampled_by_left": pair.sampled_by_left,
        "metrics": _estimates(pair.metrics),
        "routing": _estimates(pair.routing),
    }


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """Any nesting of dicts, sequences, numpy scalars and arrays as JSON data."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # numpy
        return _plain(value.tolist())
    return str(value)


def _report(document: dict[str, Any]) -> Report:
    return Report(
        model=document["model"],
        verdict=Verdict(
            **{
                **document["verdict"],
                "judgements": tuple(
                    Judgement(**{**judgement, "value": _number(judgement["value"])})
                    for judgement in document["verdict"]["judgements"]
                ),
            }
        ),
        fingerprints=document["fingerprints"],
        comparisons=tuple(_read_comparison(entry) for entry in document["comparisons"]),
        noise_floor=tuple(_read_noise(entry) for entry in document["noise_floor"]),
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
        metrics=_read_estimates(entry["metrics"]),
        routing=_read_estimates(entry["routing"]),
        breakdowns=entry["breakdowns"],
    )


def _read_noise(entry: dict[str, Any]) -> Comparison:
    return Comparison(
        rollout=entry["left"],
        train=entry["right"],
        sampled_by_left=entry["sampled_by_left"],
        metrics=_read_estimates(entry["metrics"]),
        routing=_read_estimates(entry["routing"]),
    )


def _read_estimates(entries: dict[str, Any]) -> dict[str, Estimate]:
    return {
        name: Estimate(**{**entry, "value": _value(entry), "flags": tuple(entry["flags"])})
        for name, entry in entries.items()
    }


def _value(entry: dict[str, Any]) -> float:
    """JSON has no infinity: a null that is flagged as overflow was one."""
    if entry["value"] is None and "overflow" in entry["flags"]:
        return math.inf
    return _number(entry["value"])


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
