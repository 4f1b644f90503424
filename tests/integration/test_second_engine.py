"""A second engine scores the tokens of a run, and any two scorings compare."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mismatch.run import store
from tests.command import mismatch

from .conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.grid]


@pytest.fixture(scope="module")
def scored(default_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of vLLM whose tokens the transformers engine has scored as well."""
    run = tmp_path_factory.mktemp("second") / "run"
    shutil.copytree(default_run.directory, run)
    done = mismatch("score", run, "--engine", "transformers", timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def test_the_second_engine_scores_the_first_ones_tokens(scored: Path) -> None:
    ours, theirs = (store.load_scoring(scored, f"{n}:prefill") for n in ("vllm", "transformers"))
    assert np.array_equal(ours.token_ids, theirs.token_ids)
    size = np.abs(ours.logprobs - theirs.logprobs).mean()
    assert 0 < size < 0.02
    assert theirs.fingerprint["engine"] == "transformers"


def test_the_two_engines_compare_and_the_report_judges_the_second(scored: Path) -> None:
    sides = ("--left", "vllm:prefill", "--right", "transformers:prefill")
    done = mismatch("compare", scored, *sides, "--format", "json")
    assert done.returncode in (0, 1), done.stderr
    headline = json.loads(done.stdout)["comparisons"][0]
    assert (headline["rollout"], headline["train"]) == (sides[1], sides[3])
    assert mismatch("compare", scored).returncode == 0
    report = json.loads((scored / "report.json").read_text())
    checks = {check["id"]: check["status"] for check in report["checks"]}
    assert checks["excess-other-engine"] == "passed"


def test_what_is_there_is_not_replaced_and_flags_of_the_other_side_are_refused(
    scored: Path,
) -> None:
    before = (scored / store.scoring_file("transformers:prefill")).read_bytes()
    again = mismatch("score", scored, "--engine", "transformers")
    assert (again.returncode, "--name" in again.stderr) == (2, True)
    assert (scored / store.scoring_file("transformers:prefill")).read_bytes() == before
    wrong = mismatch("score", scored, "--engine", "transformers", "--attention", "eager")
    assert (wrong.returncode, "--attention" in wrong.stderr) == (2, True)
    alone = mismatch("score", scored, "--engine-arg", "seed=1")
    assert (alone.returncode, "--engine NAME" in alone.stderr) == (2, True)
