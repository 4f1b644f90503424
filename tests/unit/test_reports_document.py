"""report.json: what is written is read back, validates, and broken documents are refused."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from mismatch.analysis.displaced import Bound
from mismatch.analysis.square import judged
from mismatch.errors import MismatchError
from mismatch.pipeline.document import headline_of, report_from_json, report_to_json, schema
from mismatch.types import Report
from tests.reports_fixture import (
    estimate,
    make_empty_report,
    make_failing_report,
    make_report,
    square_of,
)


def reports() -> list[Report]:
    return [make_report(), make_failing_report()[0], make_empty_report()[0]]


def validate(document: Any) -> None:
    jsonschema.Draft202012Validator(schema()).validate(document)


@pytest.mark.parametrize("report", reports(), ids=["healthy", "failing", "empty"])
def test_round_trip_through_strict_json(report: Report) -> None:
    document = report_to_json(report)
    text = json.dumps(document, allow_nan=False)
    validate(json.loads(text))
    assert report_from_json(json.loads(text)) == report


def test_the_layout_that_readers_rely_on() -> None:
    document = report_to_json(make_report())
    first = document["comparisons"][0]
    assert (first["rollout"], first["train"], first["sampled_by_left"]) == (
        "vllm:decode",
        "fsdp",
        True,
    )
    k3 = first["metrics"]["k3_kl"]
    assert k3["low"] < k3["value"] < k3["high"]
    assert (k3["n_sequences"], k3["n_prompts"]) == (64, 16)
    assert first["metrics"]["logprob_abs_diff_max"]["low"] is None
    noise = {entry["id"]: entry for entry in document["noise_floor"]}
    assert noise["fsdp / fsdp:regrouped"]["metrics"]["logprob_abs_diff_mean"]["value"] == 3e-4


def test_numbers_are_finite_or_null() -> None:
    report = make_report()
    odd = estimate(1.0, None)
    metrics = {"k3_kl": replace(odd, value=math.nan), "ratio_max": replace(odd, value=math.inf)}
    comparison = replace(report.comparisons[0], metrics=metrics)
    fingerprints = {
        "fsdp": {
            "resident": np.array([0.5, 0.5]),
            "rank": np.int64(1),
            "odd": (math.inf, {"b", "a"}),
        }
    }
    document = report_to_json(replace(report, comparisons=(comparison,), fingerprints=fingerprints))
    json.dumps(document, allow_nan=False)
    validate(document)
    written = document["comparisons"][0]["metrics"]
    assert written["k3_kl"]["value"] is None
    assert written["ratio_max"]["value"] is None
    assert document["fingerprints"]["fsdp"] == {
        "resident": [0.5, 0.5],
        "rank": 1,
        "odd": [None, ["a", "b"]],
    }
    assert math.isnan(report_from_json(document).comparisons[0].metrics["k3_kl"].value)


def broken() -> list[tuple[str, list[Any], Any]]:
    """(what, path to change, new value); ``...`` removes the entry."""
    return [
        ("schema version", ["schema"], "mismatch.report/1"),
        ("no headline", ["headline"], ...),
        ("no verdict", ["verdict"], ...),
        ("unknown status", ["verdict", "status"], "fine"),
        ("value as text", ["comparisons", 0, "metrics", "k3_kl", "value"], "0.1"),
        ("no n_prompts", ["comparisons", 0, "metrics", "k3_kl", "n_prompts"], ...),
        ("check status", ["checks", 0, "status"], "ok"),
        ("reason as number", ["not_tested"], [1]),
    ]


@pytest.mark.parametrize(("what", "path", "value"), broken(), ids=[item[0] for item in broken()])
def test_broken_documents_do_not_validate(what: str, path: list[Any], value: Any) -> None:
    document = copy.deepcopy(report_to_json(make_report()))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


@pytest.mark.parametrize("document", [None, [], {}, {"schema": "mismatch.report/1"}, "text"])
def test_another_schema_is_refused_by_name(document: Any) -> None:
    with pytest.raises(MismatchError, match=r"mismatch\.report/3") as error:
        report_from_json(document)
    assert error.value.fix


def test_additions_are_allowed_by_the_schema() -> None:
    document = report_to_json(make_report()) | {"surprise": 1}
    document["comparisons"][0]["more"] = 1
    validate(document)


def test_the_headline_is_flat_and_says_what_most_look_up() -> None:
    report = make_failing_report()[0]
    headline = report_to_json(report, ["do this"])["headline"]
    assert not any(isinstance(value, dict | list) for value in headline.values())
    k3 = report.comparisons[0].metrics["k3_kl"]
    assert (headline["k3_kl"], headline["k3_kl_low"]) == (k3.value, k3.low)
    assert (headline["status"], headline["exit_code"]) == (report.verdict.status, 1)
    assert report_to_json(report, ["do this"])["next"] == ["do this"]
    square = replace(square_of(), findings=(judged(square_of(3.0).legs[0], Bound(1.2, 1.2)),))
    assert headline_of(report.with_analyses(square=square)).side_at_fault == "engine"


def test_names_can_be_read_by_jq_and_digests_by_javascript() -> None:
    report = make_report()
    first = report.comparisons[0]
    odd = first.metrics | {"ratio_outside_1.02": estimate(0.1)}
    fingerprints = {"fsdp": {"weights": {"w": [2**60 + 1, 0, 0]}, "dtype": "bf16"}}
    report = replace(report, comparisons=(replace(first, metrics=odd),), fingerprints=fingerprints)
    document = report_to_json(report)
    names = set(document["comparisons"][0]["metrics"]) | set(first.routing)
    assert {"k1_kl", "ratio_outside_1_02"} <= names
    assert all(name.isidentifier() for name in names)
    digest = document["fingerprints"]["fsdp"]["weights"]
    assert isinstance(digest, str)
    assert report_from_json(document).comparisons[0].metrics == odd


@pytest.mark.parametrize("missing", ["verdict", "comparisons", "checks", "run"])
def test_a_missing_field_is_named(missing: str) -> None:
    document = report_to_json(make_report())
    del document[missing]
    with pytest.raises(MismatchError, match=missing):
        report_from_json(document)


def test_an_overflow_is_still_infinite_after_the_round_trip() -> None:
    """JSON has no infinity; read back as no number, it would lose its verdict."""
    report = make_report()
    comparison = report.comparisons[0]
    broken = replace(
        comparison.metrics["k3_kl"], value=math.inf, low=None, high=None, flags=("overflow",)
    )
    metrics = comparison.metrics | {"k3_kl": broken}
    report = replace(report, comparisons=(replace(comparison, metrics=metrics),))
    document = json.loads(json.dumps(report_to_json(report), allow_nan=False))
    assert document["comparisons"][0]["metrics"]["k3_kl"]["value"] is None
    assert report_from_json(document).comparisons[0].metrics["k3_kl"].value == math.inf
