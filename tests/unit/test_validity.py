"""Whether a comparison is valid: what checks prove, refute, or leave open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch.analysis.diagnosis.pass_checks import distributions
from mismatch.analysis.validity import GAPS, POINTS, in_words, validity
from mismatch.types import Check, CheckStatus, Distributions, Report, Scoring
from tests.reports_fixture import make_report

VOCABULARY = next(point.what for point in POINTS if "vocabulary" in point.what)
IDS = sorted({id for point in POINTS for id in (*point.refuted_by, *sum(point.proven_by, ()))})


def report_of(default: CheckStatus, **status: CheckStatus) -> Report:
    given = {name.replace("_", "-"): value for name, value in status.items()}
    checks = tuple(Check(id, given.get(id, default), "") for id in IDS)
    return replace(make_report(), checks=checks)


def standings(report: Report) -> dict[str, Any]:
    return {each.what: each.standing for each in validity(report)}


def test_checks_that_passed_prove_every_point() -> None:
    assert set(standings(report_of("passed")).values()) == {"proven"}


@pytest.mark.parametrize("status", ["not_tested", "warning", "inconclusive"])
def test_what_was_not_decided_proves_nothing_and_says_what_would(status: CheckStatus) -> None:
    found = validity(report_of(status))
    assert {each.standing for each in found} == {"not proven"}
    assert all(each.how and not each.by for each in found)


@pytest.mark.parametrize(("point", "check"), [(p.what, id) for p in POINTS for id in p.refuted_by])
def test_one_failed_check_refutes_its_points_whatever_passed(point: str, check: str) -> None:
    report = report_of("passed", **{check: "failed"})
    found = next(each for each in validity(report) if each.what == point)
    assert (found.standing, found.by) == ("refuted", (check,))
    assert point in in_words(validity(report))


def test_two_gaps_in_float32_prove_weights_and_vocabulary_of_a_server() -> None:
    """Its digests are not known; equal values of one function in float32 are."""
    report = report_of("not_tested", **dict.fromkeys(GAPS, "passed"))
    proven = {point for point, standing in standings(report).items() if standing == "proven"}
    assert proven == {point.what for point in POINTS if GAPS in point.proven_by}
    half = report_of("not_tested", **{GAPS[0]: "passed"})
    assert standings(half)["weights"] == "not proven"


def test_equal_bits_in_every_token_are_no_proof_of_two_computations() -> None:
    report = report_of("passed")
    first = report.comparisons[0]
    largest = replace(first.metrics["k3_kl"], value=0.0)
    same = replace(first, metrics={**first.metrics, "logprob_abs_diff_max": largest})
    computed = replace(report, comparisons=(same, *report.comparisons[1:]))
    assert "tokens computed twice" not in standings(computed)
    facts = {**report.fingerprints, first.train: {"mode": "train", "code": "their own trainer"}}
    copied = replace(computed, fingerprints=facts)
    assert standings(copied)["tokens computed twice"] == "not proven"
    assert "tokens computed twice" not in standings(report)


def law_of(name: str, ids: int, missing: float = 0.0) -> Scoring:
    """A side with two uniform distributions, of whose probability a share is missing."""
    held = np.full((2, ids), np.log((1 - missing) / ids), np.float32)
    drawn, nats = np.zeros(2, np.int64), np.zeros(2)
    laws = Distributions(np.arange(2), held, vocabulary=ids)
    return Scoring(name, drawn, nats, fingerprint={}, distributions=laws)


@pytest.mark.parametrize(
    ("missing", "ids", "status"), [(0.0, 50, "passed"), (0.02, 50, "failed"), (0.0, 64, "failed")]
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_side_whose_probabilities_do_not_sum_to_1_over_the_vocabulary_is_refuted(
    missing: float, ids: int, status: CheckStatus, turned: bool
) -> None:
    """Padding of a head in its softmax takes probability from the ids that both sides have."""
    sides = [law_of("vllm:decode", 50), law_of("fsdp", ids, missing)]
    check = distributions(*sides[::-1] if turned else sides)
    assert check.status == status
    report = replace(report_of("passed"), checks=(check,))
    found = {each.what: each.standing for each in validity(report)}
    assert found[VOCABULARY] == {"passed": "proven"}.get(status, "refuted")
