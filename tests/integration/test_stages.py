"""The verbs on their own: what `check` does in one go can be done apart, here and elsewhere."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mismatch.models import EMBEDDED
from mismatch.run import store

from .conftest import TINY_RUN, TINY_SAMPLING, Run

pytestmark = pytest.mark.slow


def mismatch(verb: str, *arguments: object, cwd: Path, of: Path | None = None) -> str:
    """What a command printed; it ended with 0, or as the report of the run ``of`` says."""
    done = subprocess.run(
        [sys.executable, "-m", "mismatch", verb, *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if of is None:
        assert done.returncode == 0, done.stdout
    else:
        Run(of, done.returncode, done.stdout).require_judged()
    return done.stdout


@pytest.fixture(scope="module")
def made_apart(tmp_path_factory):
    """Rolled out "here", moved, then scored "elsewhere" with a copy of the model."""
    here, elsewhere = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("elsewhere")
    mismatch("rollout", *TINY_SAMPLING, "--out", "run", cwd=here)
    assert not list((here / "run").glob("scores/fsdp*"))
    shutil.move(here / "run", elsewhere / "run")
    model = shutil.copytree(EMBEDDED["tiny-gpt-oss"], elsewhere / "model")
    mismatch(
        "score", "run", "--model", model, "--nproc-per-node", 1, "--depth", "quick", cwd=elsewhere
    )
    return elsewhere / "run"


def test_stages_apart_give_the_numbers_of_check(made_apart, tiny_run):
    output = mismatch("compare", "run", cwd=made_apart.parent, of=made_apart)
    assert output.strip().splitlines()[-1].startswith("verdict: ")
    apart, other = (json.loads((r / "report.json").read_text()) for r in (made_apart, tiny_run))
    assert apart["comparisons"] == other["comparisons"]
    assert apart["noise_floor"] == other["noise_floor"]
    first = apart["run"]["earlier_commands"][0].split()
    assert first[:4] == ["mismatch", "rollout", "--model", "tiny-gpt-oss"]


def test_what_is_scored_already_is_not_scored_again(made_apart):
    before = {p: p.stat().st_mtime_ns for p in made_apart.glob("scores/*")}
    model = made_apart.parent / "model"
    output = mismatch(
        "score",
        "run",
        "--model",
        model,
        "--nproc-per-node",
        1,
        "--depth",
        "quick",
        cwd=made_apart.parent,
    )
    assert "there already" in output
    assert {p: p.stat().st_mtime_ns for p in made_apart.glob("scores/*")} == before


def test_two_runs_of_the_same_tokens_are_compared(made_apart, tiny_run, tmp_path):
    """The same weights, kernels and tokens, one rank against two: equal to the last bit."""
    pair = tmp_path / "pair"
    mismatch("compare", made_apart, tiny_run, "--out", pair, cwd=tmp_path, of=pair)
    report = json.loads((pair / "report.json").read_text())
    (comparison,) = report["comparisons"]
    assert (comparison["rollout"], comparison["train"]) == ("run/fsdp", "tiny/fsdp")
    assert comparison["metrics"]["logprob_abs_diff_max"]["value"] == 0
    assert report["run"]["n_tokens"] == store.load_rollout(tiny_run).n_actions
    mismatch("report", pair, cwd=tmp_path, of=pair)


@pytest.mark.grid
def test_a_second_scoring_of_the_run_stands_beside_the_first(tiny_run, tmp_path):
    run = shutil.copytree(tiny_run, tmp_path / "run")
    flags = ("--name", "fp32", "--train-dtype", "fp32", "--nproc-per-node", "1")
    mismatch("score", run, *flags, cwd=tmp_path)
    mismatch("compare", run, cwd=tmp_path, of=run)
    report = json.loads((run / "report.json").read_text())
    pairs = [(c["rollout"], c["train"]) for c in report["comparisons"]]
    assert pairs[0] == ("transformers:decode", "fsdp")
    assert pairs[-1] == ("transformers:decode", "fp32")
    named = store.load_scoring(run, "fp32").logprobs
    reference = store.load_scoring(run, "reference:fp32").logprobs
    np.testing.assert_allclose(named, reference, atol=1e-5)
    assert json.loads((run / "spec.json").read_text())["train"]["dtype"] == "bf16"


def test_token_texts_are_readable(tiny_run):
    tokens = store.load_tokens(tiny_run)
    assert tokens["token"].str.len().gt(0).all()
    assert not tokens["token"].str.contains("\ufffd").any()
    assert not tokens["token"].str.fullmatch(r"<\d+>").any()
    first = tokens["token"][tokens["token"].str.contains(r"\w")].iloc[0].strip()
    assert first in (tiny_run / "report.html").read_text()


def test_the_printed_command_line_is_kept(tiny_run):
    (command,) = json.loads((tiny_run / "run.json").read_text())["invocations"]
    assert command["command"].startswith("mismatch check")
    assert command["command"].endswith(" ".join(TINY_RUN))
    assert command["timings"]["engine"].keys() >= {"ready", "generate", "prefill"}
    assert command["timings"]["train"].keys() >= {"ready", "fsdp", "reference:fp32"}
