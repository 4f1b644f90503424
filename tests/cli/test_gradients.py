"""`--gradients`: of a new run, and of a finished one."""

from dataclasses import replace

from mismatch.cli.flags import Flags
from mismatch.cli.options import FEATURE_FLAGS
from mismatch.cli.session import stored_spec
from mismatch.cli.to_spec import extras
from mismatch.run import store
from mismatch.run.directory import load_spec, require_same_spec
from mismatch.specs import to_dict
from tests.made_run import make_run, spec


def flags(given=(), **values):
    defaults = {option.name: option.default for option in FEATURE_FLAGS}
    options = Flags({"resume": None, **defaults, **values})
    options.explicit = frozenset(given)
    return options


def test_a_finished_run_is_asked_for_them_as_well(tmp_path):
    run = make_run(tmp_path / "run")
    new_spec = stored_spec(flags(("resume", "gradients"), resume=str(run), gradients=16))
    assert new_spec == replace(load_spec(run), extras=(("gradients", 16),))
    require_same_spec(run, new_spec)  # what is there stays
    other = flags(("resume", "gradients", "attention"), resume=str(run), gradients=16)
    assert stored_spec(other) is None  # another flag says what to run


def test_what_is_not_given_again_stays_the_runs(tmp_path):
    run = make_run(tmp_path / "run")
    asked = replace(spec(), extras=(("gradients", 4),))
    store.write_json(run / "spec.json", to_dict(asked))
    assert stored_spec(flags(("resume",), resume=str(run))) == asked
    more = flags(("resume", "gradients"), resume=str(run), gradients=8)
    assert stored_spec(more).extra("gradients") == 8
    assert extras(flags()) == ()


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
