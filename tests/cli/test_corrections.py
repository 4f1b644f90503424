"""`mismatch corrections` on a run directory."""

import json

import pytest
from typer.testing import CliRunner

from mismatch.cli.main import app
from mismatch.errors import MismatchError
from tests.made_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("corrections") / "run", shift=0.3)


def invoke(run, *flags):
    done = CliRunner().invoke(app, ["corrections", str(run), *flags])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_everything_is_said_on_a_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke(run, "--cis-lambda", "0")
    assert "TIS, token" in text
    assert "rollout_correction:" in text
    assert "vllm_importance_sampling_mode" in text
    assert "at most 1.35" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 84  # long setting lines are not broken


def test_bounds_reach_the_weights(run):
    """delta is 0.3 everywhere: rho = 1.35."""

    def tis(*flags):
        document = json.loads(invoke(run, "--format", "json", *flags))
        assert document["schema"] == "mismatch.corrections/2"
        return {preview["id"]: preview for preview in document["previews"]}

    assert tis()["tis-token"]["weight_max"] == pytest.approx(1.3498588)
    assert tis("--cap", "1.2")["tis-token"]["weight_max"] == 1.2
    assert tis("--mask-cap", "1.2")["mis-token"]["kept_tokens"] == 0.0
    assert tis("--band", "0.9", "1.1")["icepop"]["kept_tokens"] == 0.0
    assert tis()["geometric"]["kept_sequences"] == 0.0
    assert tis("--geometric", "0.7", "1.4")["geometric"]["kept_sequences"] == 1.0
    assert tis("--sequence-cap", "9")["trl-sequence-mask"]["kept_tokens"] == 1.0  # exp(1.8) = 6.05
    assert tis("--sequence-cap", "6")["trl-sequence-mask"]["kept_tokens"] == 0.0
    assert tis("--m2po", "0.08")["m2po"]["kept_tokens"] == 0.0  # 0.3 squared is 0.09
    assert tis("--m2po", "0.1")["m2po"]["kept_tokens"] == 1.0
    assert tis("--gspo", "0.7", "1.4")["gspo"]["weight_max"] == pytest.approx(1.3498588)
    assert tis("--ipo", "1e-9")["ipo"]["kept_tokens"] == 0.0
    assert tis("--dppo-tv", "1")["dppo-tv"]["kept_tokens"] == 1.0
    assert tis("--dppo-kl", "9")["dppo-kl"]["kept_tokens"] == 1.0


def test_batch(run):
    assert json.loads(invoke(run, "--format", "json", "--batch", "4096"))["batch"] == 4096


def test_bad_bounds_and_missing_runs_are_refused(run, tmp_path):
    with pytest.raises(MismatchError, match=r"\b5 to 0\.5"):
        invoke(run, "--band", "5", "0.5")
    with pytest.raises(MismatchError, match="no run in"):
        invoke(tmp_path / "none")
    with pytest.raises(MismatchError):
        invoke(run, "--scoring", "other")
