"""`--gradients`: of a new run, of a finished one, and where it means nothing."""

from dataclasses import replace

import pytest

from mismatch.cli.flags import Flags
from mismatch.cli.session import dry_run, stored_spec
from mismatch.errors import MismatchError
from mismatch.models import resolve_model
from mismatch.pipeline.commands import run_score
from mismatch.run import store
from mismatch.run.directory import load_spec, require_same_spec
from mismatch.specs import to_dict
from tests.made_run import make_run, spec


def flags(given=(), **values):
    base = {"resume": None, "gradients": False, "gradient_prompts": 16, **values}
    options = Flags(base)
    options.explicit = frozenset(given)
    return options


def test_a_finished_run_is_asked_for_them_as_well(tmp_path):
    run = make_run(tmp_path / "run")
    new_spec = stored_spec(flags(("resume", "gradients"), resume=str(run), gradients=True))
    assert new_spec == replace(load_spec(run), gradients=True)
    require_same_spec(run, new_spec)  # what is there stays
    other = flags(("resume", "gradients", "attention"), resume=str(run), gradients=True)
    assert stored_spec(other) is None  # another flag says what to run


def test_what_is_not_given_again_stays_the_runs(tmp_path):
    run = make_run(tmp_path / "run")
    more = flags(("resume", "gradient_prompts"), resume=str(run), gradient_prompts=8)
    with pytest.raises(MismatchError, match="takes no gradient"):
        stored_spec(more)
    asked = replace(spec(), gradients=True, gradient_prompts=4)
    store.write_json(run / "spec.json", to_dict(asked))
    again = flags(("resume", "gradients"), resume=str(run), gradients=True)
    assert stored_spec(again) == asked
    assert stored_spec(more) == replace(asked, gradient_prompts=8)


def test_a_scoring_beside_the_trainer_has_none(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(MismatchError, match=r"--gradients.*'other'"):
        run_score(replace(spec(), gradients=True), run, None, "other")
    assert "gradients" not in store.scoring_names(run)


def test_specs_of_earlier_versions_have_none(tmp_path):
    run = make_run(tmp_path / "run")
    old = to_dict(spec())
    for name in ("gradients", "gradient_prompts"):
        del old[name]
    store.write_json(run / "spec.json", old)
    assert load_spec(run) == spec()


def test_the_plan_is_shown_without_running_it(monkeypatch, capsys):
    planned = type("Planned", (), {"fits": True})()
    monkeypatch.setattr("mismatch.doctor.plan.plan", lambda asked, **more: planned)
    monkeypatch.setattr("mismatch.doctor.show.print_plan", lambda *shown: None)
    asked = replace(spec(), gradients=True)
    model = resolve_model("tiny-gpt-oss")
    asked = replace(asked, train=replace(asked.train, model=model, attention="no-sinks"))
    assert dry_run(asked) == 0
    shown = capsys.readouterr().out
    assert "16 prompts" in shown
    names = ("reference", "baseline", "attention-sinks", "router-replay=ids")
    assert ", ".join(names) in shown
    # 2.2 million parameters, 4 bytes each: two copies over two ranks; the reference's copy.
    assert shown.count("8 MiB") == 2
    assert dry_run(spec()) == 0
    assert "gradients" not in capsys.readouterr().out


def test_a_runs_fixes_stay_where_none_are_named(tmp_path):
    run = make_run(tmp_path / "run")
    old_spec = replace(spec(), fixes=("fp16",), budget_minutes=9.0)
    store.write_json(run / "spec.json", to_dict(old_spec))
    as_is, after = "as-is", "after-fixes"
    base = {"resume": str(run), "fix": None, "budget_minutes": None, "verdict": as_is}
    less = flags(("resume", "budget_minutes"), **{**base, "budget_minutes": 5.0})
    assert stored_spec(less) == replace(old_spec, budget_minutes=5.0)
    judged = flags(("resume", "verdict"), **{**base, "verdict": after})
    assert stored_spec(judged) == replace(old_spec, verdict="after-fixes")
    other = flags(("resume", "fix"), **{**base, "fix": ["fp32"]})
    assert stored_spec(other) == replace(old_spec, fixes=("fp32",), budget_minutes=None)
