"""`mismatch score` takes from the run what its flags leave open."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from mismatch.cli.main import app
from mismatch.run import store
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec, to_dict


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """Run `mismatch score` on a run of a hub model; gives the spec that would be scored."""
    fields = {"model": "org/model", "revision": "abc", "trust_remote_code": True, "layers": 2}
    train, engine = TrainSpec(**fields), EngineSpec(**fields)
    spec = replace(CheckSpec(), rollout=RolloutSpec(engine=engine), train=train)
    store.write_json(tmp_path / "spec.json", to_dict(spec))
    seen = []
    monkeypatch.setattr("mismatch.pipeline.preflight.preflight_training", lambda *args, **_: None)
    monkeypatch.setattr(
        "mismatch.pipeline.commands.run_score", lambda spec, *args: seen.append(spec)
    )

    def score(*flags: str) -> TrainSpec:
        done = CliRunner().invoke(app, ["score", str(tmp_path), *flags])
        assert done.exit_code == 0, done.output
        return seen[-1].train

    return score


def test_the_runs_own_revision_is_scored(scored):
    train = scored("--trust-remote-code")
    assert (train.model, train.revision, train.trust_remote_code) == ("org/model", "abc", True)
    assert scored("--revision", "def", "--trust-run").revision == "def"


def test_another_model_brings_its_own_revision(scored):
    train = scored("--model", "tiny-gpt-oss")
    assert train.revision is None
    assert train.layers == 2  # the tokens are of those
    assert train.trust_remote_code is False


def test_the_effect_of_a_form_is_passed_on(tmp_path, scored, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "mismatch.pipeline.commands.run_score", lambda spec, *args: seen.append(spec)
    )
    flags = ["score", str(tmp_path), "--weights", "effect=mxfp4-rounded", "--trust-run"]
    assert CliRunner().invoke(app, flags).exit_code == 0
    assert seen[-1].weights_effect == "mxfp4-rounded"


def test_the_fixes_of_the_run_are_kept(tmp_path, monkeypatch):
    from mismatch.pipeline import commands as pipeline
    from mismatch.run.directory import load_spec

    tried = replace(CheckSpec(), fixes=("fp32",), budget_minutes=3.0, verdict="after-fixes")
    store.write_json(tmp_path / "spec.json", to_dict(tried))
    monkeypatch.setattr(store, "load_rollout", lambda run_dir: None)
    monkeypatch.setattr(pipeline.Stages, "measure", lambda self, passes, sample: None)
    pipeline.run_score(CheckSpec(), tmp_path, narrator=None)
    assert load_spec(tmp_path) == tried
