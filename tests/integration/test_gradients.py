"""What a missing sink does to the policy gradient, on the tokens that vLLM sampled.

A finished run is asked for its gradients, so that nothing is sampled or scored again.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from mismatch.experiments.gradients.files import gradient_facts, load_batch, load_gradients
from mismatch.experiments.gradients.types import Gradients

from .conftest import Run
from .test_fixes import resumed

pytestmark = pytest.mark.slow
FLAGS = ("--gradients", "--gradient-prompts", "4", "--fix", "attention-sinks,fp32-lm-head")


@pytest.fixture(scope="module")
def without_sinks(no_sinks_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    target = tmp_path_factory.mktemp("gradients") / "no-sinks"
    run = resumed(no_sinks_run.directory, target, *FLAGS)
    assert (run.code, run.report["verdict"]["status"]) == (1, "broken"), run.output
    return run


@pytest.fixture(scope="module")
def gradients(without_sinks: Run) -> dict[str, Gradients]:
    return {g.name: g for g in load_gradients(without_sinks.directory)}


def cosine(gradient: Gradients) -> float:
    assert gradient.dot is not None
    assert gradient.squared_norm_reference is not None
    return float(
        gradient.dot.sum()
        / np.sqrt(gradient.squared_norm.sum() * gradient.squared_norm_reference.sum())
    )


def test_the_fix_turns_the_gradient_back(
    gradients: dict[str, Gradients],
) -> None:
    broken, mended = gradients["fsdp"], gradients["fix:attention-sinks"]
    assert cosine(broken) < 0.95
    assert cosine(mended) > 0.99
    # A finer head after the wrong kernel mends nothing.
    assert cosine(gradients["fix:fp32-lm-head"]) < 0.95


def test_sinks_that_are_ignored_get_no_gradient(
    gradients: dict[str, Gradients],
) -> None:
    broken, mended = gradients["fsdp"], gradients["fix:attention-sinks"]
    sinks = broken.groups.index("sinks")
    assert broken.squared_norm_reference is not None
    assert mended.dot is not None
    assert broken.squared_norm[sinks] == 0.0 < broken.squared_norm_reference[sinks]
    size = np.sqrt(mended.squared_norm[sinks] * broken.squared_norm_reference[sinks])
    assert mended.dot[sinks] / size > 0.95


def test_the_run_says_what_the_gradients_rest_on(without_sinks: Run) -> None:
    batch = load_batch(without_sinks.directory)
    assert batch is not None
    assert batch.failed == {}
    assert len(batch.prompts) == 4
    assert batch.sequences == 8
    facts = gradient_facts(without_sinks.directory, "fsdp")
    assert facts["world_size"] == 2
    assert "no-sinks" in facts["attention"]
    # The scorings are those of the run that was asked.
    assert "rollout: there already" in without_sinks.output


def test_the_report_says_what_the_gradient_lost(without_sinks: Run) -> None:
    section = json.loads((without_sinks.directory / "report.json").read_text("utf-8"))["gradients"]
    rows = {row["id"]: row for row in section["rows"]}
    whole = {id: rows[id]["groups"][0]["cosine"] for id in ("baseline", "attention-sinks")}
    assert whole["baseline"]["value"] < 0.95
    assert whole["attention-sinks"]["value"] > 0.99
    sinks = next(group for group in rows["baseline"]["groups"] if group["group"] == "sinks")
    assert sinks["cosine"] is None
    assert sinks["norm"] == sinks["norm_ratio"]["value"] == 0.0
