"""The functions of the package: what the notebook and the documentation show, and wrong input."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mismatch
from mismatch.errors import MismatchError

ROOT = Path(mismatch.__file__).parents[1]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, one after another; runs/ is made in the working directory."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "score_pair.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["found"].shared[0].values == ("3",)
    run = names["run"]
    assert run.verdict.status in ("inconclusive", "unfit")
    assert run.metrics["k3_kl"] == pytest.approx(
        mismatch.load(run.directory).report.comparisons[0].metrics["k3_kl"].value
    )
    assert len(run.tokens) == 200 * 60
    assert "<iframe" in run._repr_html_()
    assert run.to_html().startswith("<!doctype html>")


def test_tensors_keep_the_digits_that_they_have(tmp_path: Path) -> None:
    rollout = [-torch.rand(60, dtype=torch.float64) for _ in range(24)]
    train = [row + 1e-9 for row in rollout]
    run = mismatch.score_pair(rollout, train, out=tmp_path / "run", dtype="fp32")
    assert run.metrics["logprob_abs_diff_max"] == pytest.approx(1e-9, rel=1e-4)
    half = [row.bfloat16() for row in rollout]
    same = mismatch.score_pair(half, half, out=tmp_path / "half")
    assert same.metrics["logprob_abs_diff_max"] == 0


def test_rows_of_different_lengths_and_a_mask(tmp_path: Path) -> None:
    rollout = [[-0.5] * (20 + row % 3) for row in range(40)]
    train = [[value - 0.01 for value in row] for row in rollout]
    mask = [[1] * 10 + [0] * (len(row) - 10) for row in rollout]
    run = mismatch.score_pair(rollout, train, mask, out=tmp_path / "run", dtype="fp32")
    assert len(run.tokens) == 400
    assert run.metrics["logprob_abs_diff_mean"] == pytest.approx(0.01)
    same = mismatch.score_pair(rollout, rollout, mask, out=tmp_path / "same")
    assert same.metrics["logprob_abs_diff_mean"] == 0
    comparison = run.compare(same)
    assert comparison.metrics


def test_two_flat_arrays_are_one_response_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rollout = -np.linspace(0.1, 1, 500)
    run = mismatch.score_pair(rollout, rollout + 0.01, dtype="fp32")
    assert run.metrics["logprob_abs_diff_mean"] == pytest.approx(0.01)
    assert run.verdict.status in repr(run)
    with pytest.raises(KeyError, match="k3_kl"):
        run.metrics["k3"]
    kept = run.directory
    assert kept.exists()
    del run
    assert not kept.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_dump_is_judged_as_by_the_command(tmp_path: Path) -> None:
    row = {"rollout_logprobs": [0.0, -0.5, -0.25], "train_logprobs": [0.0, -0.5, -0.25]}
    row |= {"token_ids": [1, 2, 3], "action_mask": [0, 1, 1]}
    dump = tmp_path / "dump.jsonl"
    dump.write_text("\n".join([json.dumps(row)] * 20))
    run = mismatch.postmortem(dump, out=tmp_path / "run")
    assert run.directory == tmp_path / "run"
    assert run.metrics["logprob_abs_diff_max"] == 0


def test_completion_finds_the_functions() -> None:
    assert set(dir(mismatch)) == set(mismatch.__all__)
    assert {"model", "engine", "python", "num_prompts", "fix"} <= set(
        inspect.signature(mismatch.check).parameters
    )


def test_wrong_input_is_an_error_with_its_fix(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="1 train_logprobs"):
        mismatch.score_pair([[-0.1, -0.2]], [[-0.1]], out=tmp_path / "a")
    with pytest.raises(MismatchError, match="1 rows"):
        mismatch.score_pair([[-0.1], [-0.2]], [[-0.1]], out=tmp_path / "a")
    with pytest.raises(MismatchError, match="no-such-flag"):
        mismatch.check(model="tiny-gpt-oss", no_such_flag=1, out=tmp_path / "b")
    with pytest.raises(MismatchError, match=r"report\.json"):
        mismatch.load(tmp_path)
    with pytest.raises(AttributeError):
        mismatch.nothing  # noqa: B018


def test_the_examples_of_the_page_name_what_there_is() -> None:
    page = (ROOT / "docs" / "start" / "python.md").read_text()
    names = set(re.findall(r"mismatch\.(\w+)\(", page))
    assert names <= set(mismatch.__all__)
    assert {"check", "load", "score_pair"} <= names


def test_a_number_of_the_arrays_is_that_of_the_metric() -> None:
    from mismatch.metrics import k3_kl

    delta = np.array([0.1, -0.2, 0.0])
    assert k3_kl(delta) == pytest.approx(float(np.mean(np.exp(delta) - 1 - delta)))
