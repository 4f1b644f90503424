"""The self-test: faults reach the copy and never the source, and what is named is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import diagnose
from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError
from mismatch.models import resolve_model
from mismatch.models.planted import plant
from mismatch.pipeline.selftest import FAULTS, SelfTest, _attempt, judged
from tests import drawn_pair as drawn
from tests.texts import numbers

TINY = Path(resolve_model("tiny-gpt-oss"))


def tensors(directory: Path) -> dict[str, object]:
    by_name = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            by_name |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return by_name


def changed(directory: Path) -> set[str]:
    before, after = tensors(TINY), tensors(directory)
    assert before.keys() == after.keys()
    return {name for name in before if not before[name].equal(after[name])}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.checkpoint], ids=lambda f: f.id
)
def test_a_planted_checkpoint_differs_where_the_fault_is(tmp_path: Path, fault) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in TINY.iterdir()}
    planted = plant(TINY, tmp_path / "planted", fault.id, fault.sizes[0])
    names = changed(planted)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (TINY, planted)]
    if fault.id in ("norm-eps", "rope", "window"):
        assert names == set()
        assert configs[0] != configs[1]
    else:
        assert configs[0] == configs[1]
        assert names
        mark = {"swapped-experts": ".experts.", "no-sinks": "sinks"}
        assert all(mark.get(fault.id, ".layers.") in name for name in names)
    assert {path.name: path.stat().st_mtime_ns for path in TINY.iterdir()} == before


def test_what_a_model_lacks_cannot_be_planted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    plant(TINY, source, "window", 0.5)
    config = json.loads((source / "config.json").read_text())
    del config["sliding_window"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(MismatchError, match="which window"):
        plant(source, tmp_path / "target", "window", 0.5)


def tempered(temperature: float) -> Case:
    """A healthy pair at a temperature, with the trainer's untempered numbers beside."""
    pair = drawn.draw(0)
    raw = drawn.log_law(pair.trainer)
    pair.engine, pair.trainer, pair.logits = (
        logits / temperature for logits in (pair.engine, pair.trainer, pair.logits)
    )
    case = pair.case()
    ids = case.engine.token_ids
    rollout = replace(
        case.rollout, sampling=replace(case.rollout.sampling, temperature=temperature)
    )
    extra = {"logprobs_untempered": raw[np.arange(len(ids)), ids]}
    return replace(case, rollout=rollout, trainer=replace(case.trainer, extra=extra))


def test_without_a_temperature_there_is_nothing_to_leave_out(tmp_path: Path) -> None:
    by_fault = {row.fault: row for row in judged(drawn.draw(0).case(), tmp_path, {}).faults}
    assert by_fault["temperature"].found is None
    assert numbers(by_fault["temperature"].reason) == [1]


def test_faults_of_the_record_are_named(tmp_path: Path) -> None:
    result = judged(tempered(0.8), tmp_path, {"window": "no window"})
    assert result.clean == ()
    by_fault = {row.fault: row for row in result.faults}
    assert by_fault.keys() == {fault.id for fault in FAULTS if not fault.turns}
    for fault in FAULTS:
        if fault.turns:
            continue
        tried = by_fault[fault.id]
        if fault.record is None:
            assert tried.found is None
            assert tried.reason
        else:
            assert tried.found, fault.id
            assert tried.attempts[0].named == fault.causes[0]
            assert tried.smallest in fault.sizes
    assert by_fault["window"].reason == "no window"
    assert result.caught
    assert from_json(SelfTest, to_json(result)) == result


def test_faults_of_later_turns_are_planted_where_there_are_some(tmp_path: Path) -> None:
    case = drawn.turned(drawn.draw(0, prompts=16, length=60).case())
    result = judged(case, tmp_path, {})
    assert result.clean == ()
    by_fault = {row.fault: row for row in result.faults}
    for fault in FAULTS:
        if fault.turns and fault.record is not None and fault.id != "later-routes":
            assert by_fault[fault.id].found, fault.id
            assert by_fault[fault.id].attempts[0].named == fault.causes[0]
    assert by_fault["later-routes"].found is None
    assert "experts" in by_fault["later-routes"].reason
    assert by_fault["later-context"].found is None  # no checkpoint was scored here


def graded(case: Case, expected: tuple[str, ...], side: str | None = "trainer", **how):
    return _attempt(expected, side, 1.0, case, how.get("without", frozenset()))


def test_a_kind_of_cause_is_noticed_and_not_caught() -> None:
    moved = drawn.other_weights(0, 10)
    assert graded(moved, ("stale-weights",)).grade == "noticed"
    assert not graded(moved, ("stale-weights",)).caught
    assert graded(moved, ("stale-weights",)).right_side
    assert graded(moved, ("weights-differ",)).grade == "first"
    assert graded(moved, ("weights-differ",), "engine").right_side is False
    assert graded(moved, ("stale-weights",), without=frozenset({"weights-differ"})).grade == (
        "missed"
    )
    assert graded(drawn.draw(0).case(), ("stale-weights",)).grade == "missed"


def test_a_second_cause_is_among_the_first_three() -> None:
    case = drawn.raw_logprobs_and_noise(0, 0.6, 6)
    attempt = graded(case, ("weights-differ",), "engine")
    assert (attempt.grade, attempt.rank, attempt.caught) == ("top three", 2, True)
    assert attempt.right_side


def test_what_the_sides_state_leaves_one_name_and_numbers_alone_a_kind() -> None:
    fault = next(fault for fault in FAULTS if fault.id == "stale-weights")
    assert "weights-differ" in fault.expected(frozenset())
    assert "weights-differ" not in fault.expected(frozenset({"weights"}))
    for fault in FAULTS:
        assert not {"function-differs", "weights-differ", "side-off"} & set(fault.causes)
        assert "side-off" not in fault.expected(frozenset())


def test_a_stated_difference_gives_its_name_to_the_mark_that_it_leaves() -> None:
    """Other parameters move another law: by numbers alone "another function"."""
    for case, kind in ((drawn.other_function(0, 2.0), "function-differs"),
                       (drawn.other_weights(0, 10), "weights-differ")):  # fmt: skip
        assert [c.id for c in diagnose(case, detectors()).ranked] == [kind]
        stated = [{"config": {"rms_norm_eps": 1e-5 * n}} for n in (1, 2)]
        sides = (case.engine, case.trainer)
        engine, trainer = (
            replace(side, fingerprint={**side.fingerprint, **facts})
            for side, facts in zip(sides, stated, strict=True)
        )
        ranked = diagnose(replace(case, engine=engine, trainer=trainer), detectors()).ranked
        assert [(c.id, c.side) for c in ranked] == [("norm-eps", "trainer")]
        assert ranked[0].effect is not None


def test_one_fault_that_is_missed_is_enough_and_none_planted_is_no_success(tmp_path: Path) -> None:
    result = judged(drawn.draw(0).case(), tmp_path, {})
    missed = replace(result.faults[-1], found=False, smallest=None)
    assert not replace(result, faults=(*result.faults[:-1], missed)).caught
    assert not replace(result, faults=()).caught
    unplanted = tuple(row for row in result.faults if row.found is None)
    assert not replace(result, faults=unplanted).caught


def test_the_exit_code_says_whether_all_were_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mismatch.pipeline.selftest as pipeline
    from mismatch.cli.main import app

    result = judged(drawn.draw(0).case(), tmp_path, {})
    for caught, shown in ((0, result), (1, replace(result, faults=()))):
        monkeypatch.setattr(pipeline, "run_selftest", lambda *rest, shown=shown: shown)
        flags = ["--model", "tiny-gpt-oss", "--engine", "transformers", "--json"]
        out = ["--out", str(tmp_path / f"run{caught}")]
        done = CliRunner().invoke(app, ["selftest", *flags, *out], standalone_mode=False)
        assert done.return_value == caught, done.output
        document = json.loads(done.stdout)
        assert document["schema"] == "mismatch.selftest/1"
        assert document["caught"] is (caught == 0)
