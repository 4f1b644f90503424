"""`mismatch fixes`: the list, one fix, and what applies."""

import json

import pytest
from typer.testing import CliRunner

from mismatch.cli.main import app
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.catalogue import FIXES, HIDES
from mismatch.models import resolve_model
from mismatch.run import store
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec, to_dict

MODEL = ("--model", "tiny-gpt-oss")


def invoke(*arguments):
    done = CliRunner().invoke(app, ["fixes", *arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def listed(*arguments):
    document = json.loads(invoke("--format", "json", *arguments))
    assert document["schema"] == "mismatch.fixes/1"
    return {row["id"]: row for row in document["fixes"]}


def test_all_are_listed_by_side_and_nothing_is_said_of_a_model(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke()
    assert all(f"  {fix.id} " in text for fix in FIXES)
    assert "applies here" not in text
    assert "not here" not in text
    assert "--fix all" in text
    assert list(listed()) == [fix.id for fix in FIXES]
    assert {row["applies"] for row in listed().values()} == {None}
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_model_decides_what_applies():
    rows = listed(*MODEL)
    assert rows["fp32-lm-head"]["applies"]
    assert not rows["attention-sinks"]["applies"]
    assert "already" in rows["attention-sinks"]["reason"]
    assert rows["tis"]["applies"]
    text = invoke(*MODEL)
    assert "✓ applies here" in text
    assert "– not here" in text
    assert "Which apply depends" not in text


def test_the_flags_of_the_check_decide_too(tmp_path):
    file = tmp_path / "check.toml"
    file.write_text('attention = "no-sinks"\ntemperature = 0.7\nlayout = "packing"\n')
    rows = listed(*MODEL, "--config", str(file))
    assert rows["attention-sinks"]["applies"]
    assert rows["temperature"]["reason"] != listed(*MODEL)["temperature"]["reason"]
    assert rows["no-packing"]["applies"]
    file.write_text('model = "tiny-gpt-oss"\nengine-arg = "kv_cache_dtype=fp8"\n')
    assert listed("--config", str(file))["bf16-kv-cache"]["applies"]


def test_a_run_decides_too(tmp_path):
    for attention, applies in (("no-sinks", True), ("auto", False)):
        model = resolve_model("tiny-gpt-oss")
        engine = EngineSpec(model=model)
        train = TrainSpec(model=model, attention=attention)
        spec = CheckSpec(rollout=RolloutSpec(engine), train=train)
        store.write_json(tmp_path / "spec.json", to_dict(spec))
        assert listed("--like", str(tmp_path))["attention-sinks"]["applies"] == applies
    with pytest.raises(MismatchError, match="--like RUN"):
        invoke("--like", str(tmp_path), *MODEL)


def test_of_two_values_one_may_apply():
    row = listed(*MODEL)["router-replay"]
    assert row["applies"]
    assert "ids+weights" in row["reason"]


def test_one_fix_in_detail():
    text = invoke("fp32-lm-head", *MODEL)
    for title in ("What it changes", "When it makes things worse", "How to try it", "Evidence"):
        assert title in text
    assert "GRPOConfig(cast_lm_head_to_fp32=True)" in text
    assert "✓ applies here" in text
    assert "second-hand" in text
    row = listed("fp32-lm-head")["fp32-lm-head"]
    assert {setting["framework"] for setting in row["settings"]} >= {"verl", "TRL"}
    assert row["worse"]
    assert row["evidence"]


def test_the_override_hides():
    assert listed("on-policy-ratio")["on-policy-ratio"]["hides"]
    assert HIDES.partition(":")[0] in " ".join(invoke("on-policy-ratio").split())


def test_an_unknown_fix_is_refused_with_the_list():
    with pytest.raises(MismatchError, match="no fix 'magic'"):
        invoke("magic")
