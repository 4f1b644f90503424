"""Fixes that a run measured confirm its causes or rule them out, and confirm no wrong one."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mismatch.analysis.catalogue import catalogue
from mismatch.analysis.cause_results import Cause, Causes
from mismatch.analysis.causes import cause_checks, with_causes
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import diagnose
from mismatch.analysis.levels import verdict
from mismatch.codec import to_json
from mismatch.experiments.confirmation import applied, settled
from mismatch.experiments.fixes.results import STATE, STATE_SCHEMA
from mismatch.experiments.results import Experiment, Explanation
from mismatch.keys import FIX, Key
from mismatch.pipeline import explain
from mismatch.pipeline.commands import run_compare
from mismatch.pipeline.document import report_from_json, report_to_json
from mismatch.pipeline.fix_trials import FixRun
from mismatch.reports.html import to_html
from mismatch.reports.markdown import to_markdown
from mismatch.reports.sections import page
from mismatch.reports.sections.causes import sentences
from mismatch.reports.sections.headline import answers
from mismatch.reports.terminal import print_page
from mismatch.run import store
from mismatch.run.directory import load_spec
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec, to_dict
from mismatch.types import Report, Scoring
from tests import drawn_pair as drawn
from tests.reports_fixture import make_report
from tests.unit.test_explanation import experiment_of, suspected
from tests.unit.test_fixes_run import Quiet

SPEC = CheckSpec(
    rollout=RolloutSpec(engine=EngineSpec(engine="vllm", model="m", prefill=False)),
    train=TrainSpec(model="m", attention="no-sinks"),
    fixes=("attention-sinks",),
)
NO_SINKS = {"honours_sinks": False, "attention": "no-sinks"}
Left = Mapping[str, float | str]  # fix -> share of delta that it leaves, or why it failed


def without_sinks(seed: int = 0, strength: float = 1.0, **facts: object) -> Case:
    case = drawn.other_function(seed, strength)
    stated = case.trainer.fingerprint | (facts or NO_SINKS)
    return replace(case, trainer=replace(case.trainer, fingerprint=stated))


def saved(run_dir: Path, case: Case, left: Left, spec: CheckSpec = SPEC) -> Path:
    """A run on disk, with what its fixes left: each scales the trainer's error."""
    run_dir.mkdir()
    spec = replace(spec, fixes=tuple(left))
    store.write_json(run_dir / "spec.json", to_dict(spec))
    store.save_rollout(run_dir, case.rollout, made_by=spec.rollout)
    store.save_vocabulary(run_dir, {n: f"t{n}" for n in range(drawn.VOCABULARY + 1)})
    store.save_scoring(run_dir, stating(case.engine, "decode"), case.rollout, made_by=spec.rollout)
    for scoring in (case.trainer, *case.others.values()):
        store.save_scoring(run_dir, stating(scoring, "train"), case.rollout, made_by=spec.train)
    for id, share in left.items():
        if isinstance(share, float):
            fixed = replace(case.trainer, name=Key.of(FIX, id),
                            logprobs=case.left + share * case.delta)  # fmt: skip
            store.save_scoring(run_dir, stating(fixed, "train"), case.rollout, made_by=spec.train)
    tried(run_dir, [
        {"id": id, "place": "", "failed": share if isinstance(share, str) else ""}
        for id, share in left.items()
    ])  # fmt: skip
    return run_dir


def stating(scoring: Scoring, mode: str) -> Scoring:
    facts = {"mode": mode, "engine": "vllm", "logprobs_temperature": 1.0, "seconds": 2.0}
    return replace(scoring, fingerprint=facts | scoring.fingerprint)


def tried(run_dir: Path, variants: list[dict[str, Any]], estimators: tuple[str, ...] = ()) -> None:
    (run_dir / STATE).parent.mkdir(exist_ok=True)
    document = {"schema": STATE_SCHEMA, "variants": variants, "refused": [], "left_out": [],
                "estimators": list(estimators), "seconds": 5.0}  # fmt: skip
    store.save_document(run_dir, STATE, document, schema=STATE_SCHEMA)


def reported(run_dir: Path) -> Report:
    """Its causes and what fixes say of them, without all other analyses."""
    spec = load_spec(run_dir)
    causes = diagnose(explain.case_of(run_dir, spec), detectors())
    bare = replace(make_report(), analyses={}).with_analyses(causes=causes)
    return explain.with_explanation(bare, run_dir, spec)


def compared(run_dir: Path) -> Report:
    """As `mismatch compare` reports it."""
    return run_compare(run_dir, Quiet())  # type: ignore[arg-type]


def first(report: Report) -> Cause:
    return report.result("causes").ranked[0]


def explanation_of(report: Report) -> Explanation:
    explanation = report.result("explain")
    assert isinstance(explanation, Explanation)
    return explanation


# ---------------------------------------------------------------- what a fix confirms


def test_a_measured_fix_confirms_the_cause_that_it_takes_out(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", without_sinks(), {"attention-sinks": 0.05, "fp32": 0.97})
    report = reported(run)
    cause = first(report)
    assert (cause.id, cause.status, cause.side) == ("attention-sinks", "confirmed", "trainer")
    assert cause.effect is not None
    assert cause.effect.value == pytest.approx(0.95)  # by ablation: what its fix left
    evidence = {item.what: item.value for item in cause.evidence}
    assert evidence[f"share removed by {cause.id}"] == pytest.approx(0.95)
    assert explanation_of(report).confirmed == ("attention-sinks",)
    assert [experiment.seconds for experiment in explanation_of(report).experiments] == [2.0]


def test_a_fix_that_an_experiment_measured_is_not_called_unmeasured(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", without_sinks(), {"attention-sinks": 0.05})
    report = reported(run)
    fix = answers(replace(report, verdict=replace(report.verdict, status="unfit")))[0]
    assert (fix.question, fix.text) == ("Fix", catalogue()["attention-sinks"].mend)


def test_every_form_of_the_report_says_so(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", without_sinks(), {"attention-sinks": 0.05})
    report = compared(run)
    document = json.loads(json.dumps(report_to_json(report)))
    assert document["causes"]["ranked"][0]["status"] == "confirmed"
    assert document["explain"]["confirmed"] == ["attention-sinks"]
    read = report_from_json(document)
    assert read.result("explain") == explanation_of(report) == explanation_of(reported(run))
    console = Console(width=200, record=True, file=io.StringIO())
    print_page(page(read), console)
    html = to_html(read, store.load_tokens(run))
    for text in (to_markdown(read), console.export_text(), html):
        told_there = " ".join(text.split()).replace("Confirmed by", "confirmed by")
        assert re.search("confirmed by (?:fix|experiment)", told_there)
        assert "suspected, --explain" not in told_there


def test_a_stated_cause_has_the_share_of_its_fix_and_something_else_has_the_rest(
    tmp_path: Path,
) -> None:
    """The kernel does ignore the sinks, and the mismatch comes from elsewhere."""
    report = reported(saved(tmp_path / "run", without_sinks(), {"attention-sinks": 0.99}))
    seen, stated = report.result("causes").ranked
    assert (seen.id, seen.status, seen.side) == ("side-off", "suspected", "trainer")
    assert seen.effect.value > 0.8
    assert (stated.id, stated.status) == ("attention-sinks", "of little weight")
    assert stated.effect.value == pytest.approx(0.01)
    assert [experiment.outcome for experiment in explanation_of(report).experiments] == [
        "of little weight"
    ]
    assert explanation_of(report).ruled_out == explanation_of(report).confirmed == ()
    _, text = sentences(report.result("causes"), report)
    entry = catalogue()[stated.id]
    assert stated.status in text
    assert entry.mend in text
    assert entry.confirm not in text  # that was done


def test_what_stays_as_a_cause_is_not_said_to_be_ruled_out(tmp_path: Path) -> None:
    """Another cause that could have been the same, behind the stated one."""
    run = saved(tmp_path / "run", without_sinks(), {"attention-sinks": 0.99})
    causes = diagnose(explain.case_of(run, SPEC), detectors())
    other = suspected("grows-with-position", "trainer", "attention-sinks").ranked[0]
    two = replace(causes, ranked=(*causes.ranked, other))
    stays = [
        replace(experiment, outcome="ruled out")
        for experiment in explanation_of(reported(run)).experiments
    ]
    after, _, ruled_out = applied(two, stays)
    assert "attention-sinks" in {cause.id for cause in after.ranked}
    assert "attention-sinks" not in ruled_out


def test_a_fix_that_leaves_the_mismatch_rules_a_look_alike_out(tmp_path: Path) -> None:
    case = without_sinks(attention="sdpa")  # it says nothing of sinks
    report = reported(saved(tmp_path / "run", case, {"attention-sinks": 0.99}))
    cause = first(report)
    assert (cause.id, cause.status) == ("side-off", "suspected")
    assert "attention-sinks" not in cause.alike
    assert explanation_of(report).ruled_out == ("attention-sinks",)


def test_what_could_not_be_measured_is_said_and_decides_nothing(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", without_sinks(), {"attention-sinks": "out of memory"})
    report = reported(run)
    assert (first(report).id, first(report).status) == ("attention-sinks", "suspected")
    (experiment,) = explanation_of(report).experiments
    assert (experiment.outcome, experiment.reason, experiment.gone) == (
        "not run",
        "out of memory",
        None,
    )


def test_a_fix_whose_numbers_are_not_finite_decides_nothing(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", without_sinks(), {"attention-sinks": 0.05})
    case = without_sinks()
    numbers = np.array(case.left)
    numbers[3] = np.nan
    broken = replace(case.trainer, name=Key.of(FIX, "attention-sinks"), logprobs=numbers)
    store.save_scoring(run, stating(broken, "train"), case.rollout, made_by=SPEC.train)
    report = reported(run)
    assert first(report).status == "suspected"
    assert "finite" in explanation_of(report).experiments[0].reason


def test_an_engine_that_sampled_anew_is_compared_by_prompt(tmp_path: Path) -> None:
    def quantised(rounding: float) -> Case:
        draw = drawn.draw(1)
        draw.engine = draw.engine + drawn.rounded(draw.rng, draw.logits, rounding)
        draw.engine_facts = {"kv_cache_dtype": "fp8"}
        return draw.case()

    engine = replace(SPEC.rollout.engine, args=(("kv_cache_dtype", "fp8"),))
    spec = replace(SPEC, rollout=replace(SPEC.rollout, engine=engine), train=TrainSpec(model="m"))
    run = saved(tmp_path / "run", quantised(0.3), {"bf16-kv-cache": "not yet"}, spec)
    assert first(reported(run)).id == "fp8-kv"
    folder, after = "fixes/bf16-kv-cache", drawn.draw(2).case()  # other tokens of the same prompts
    store.save_rollout(run / folder, after.rollout, made_by=spec.rollout)
    fixed = replace(after.trainer, name=Key.of(FIX, "bf16-kv-cache"))
    for scoring in (stating(after.engine, "decode"), stating(fixed, "train")):
        store.save_scoring(run / folder, scoring, after.rollout, made_by=spec.rollout)
    tried(run, [{"id": "bf16-kv-cache", "place": folder, "failed": ""}])
    report = reported(run)
    assert (first(report).id, first(report).status) == ("fp8-kv", "confirmed")
    (experiment,) = explanation_of(report).experiments
    assert not experiment.same_tokens
    assert experiment.gone is not None
    assert experiment.gone.n_prompts == 64


# ---------------------------------------------------------------- what it does not


def test_a_healthy_run_with_fixes_names_nothing(tmp_path: Path) -> None:
    left: Left = {"fp32": 0.4, "plain-attention": 0.1, "attention-sinks": 0.1}
    case = drawn.draw(3).case()
    report = reported(saved(tmp_path / "run", case, left, replace(SPEC, train=TrainSpec("m"))))
    assert report.result("causes").ranked == ()
    assert report.result("explain") is None


def test_another_fix_that_helps_confirms_nothing(tmp_path: Path) -> None:
    """Replayed routes and float32 take out what a missing sink did to them, and not the sink."""
    left: Left = {"router-replay=ids": 0.5, "fp32": 0.5, "fp32+engine-fp32": 0.01}
    report = reported(saved(tmp_path / "run", without_sinks(), left))
    assert (first(report).id, first(report).status) == ("attention-sinks", "suspected")
    assert report.result("explain") is None


def test_a_correction_of_the_loss_confirms_nothing(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", without_sinks(), {"tis": "x"})
    tried(run, [], estimators=("tis",))
    report = reported(run)
    assert first(report).status == "suspected"
    assert report.result("explain") is None


def test_plain_attention_confirms_neither_of_two_faults(tmp_path: Path) -> None:
    """It takes out all that a kernel may do wrong, whichever of it was suspected."""
    packed = replace(SPEC, train=replace(SPEC.train, layout="packing"))
    run = saved(tmp_path / "run", without_sinks(), {"plain-attention": 0.02}, packed)
    cause = first(reported(run))
    assert (cause.id, cause.status, cause.side) == ("attention-sinks", "suspected", "trainer")
    normal = {item.what: item.normal for item in cause.evidence}
    (both,) = [normal[what] for what in normal if what.endswith(" plain-attention")]
    assert "packing-leak" in both


def test_another_kernel_in_place_of_the_users_own_names_no_sinks(tmp_path: Path) -> None:
    own = replace(SPEC, train=TrainSpec("m", attention="user.kernels:flash", layout="packing"))
    case = without_sinks(attention="user.kernels:flash")
    run = saved(tmp_path / "run", case, {"attention-sinks": 0.02}, own)
    cause = first(reported(run))
    assert (cause.id, cause.status, cause.side) == ("side-off", "confirmed", "trainer")
    assert {"attention-sinks", "packing-leak"} <= set(cause.alike)
    assert "rope-config" not in cause.alike


def test_float32_confirms_no_part_of_the_trainers_precision() -> None:
    """A head in bf16 goes with it, and so does everything else that is rounded."""
    head = suspected("bf16-lm-head", "trainer")
    assert applied(head, [experiment_of("fp32", 0.95)])[1] == ()
    assert applied(head, [experiment_of("fp32-lm-head", 0.95)])[1] == ("bf16-lm-head",)
    whole = suspected("precision", "trainer", "bf16-lm-head")
    assert applied(whole, [experiment_of("fp32", 0.95)])[1] == ("precision",)


def test_a_small_cause_is_not_ruled_out_under_a_large_one() -> None:
    """Errors add in quadrature: 30 % of the whole hides behind 70 %, and 5 % of it goes alone."""
    small = suspected("bf16-lm-head", "trainer", effect=0.3).ranked[0]
    large = suspected("attention-sinks", "trainer", effect=0.65)
    both = replace(large, ranked=(*large.ranked, small))
    masked = [experiment_of("fp32-lm-head", 0.05, 0.01)]
    assert [experiment.outcome for experiment in settled(both, masked)] == ["undecided"]
    after, _, ruled_out = applied(both, masked)
    assert ({cause.id for cause in after.ranked}, ruled_out) == (
        {"attention-sinks", "bf16-lm-head"}, (),
    )  # fmt: skip
    nothing = [experiment_of("fp32-lm-head", 0.0, 0.01)]
    assert [experiment.outcome for experiment in settled(both, nothing)] == ["ruled out"]
    assert applied(both, nothing)[2] == ("bf16-lm-head",)


def test_where_each_has_its_own_fix_both_are_confirmed_with_their_shares() -> None:
    small = suspected("bf16-lm-head", "trainer", effect=0.3).ranked[0]
    large = suspected("attention-sinks", "trainer", effect=0.65)
    both = replace(large, ranked=(*large.ranked, small))
    after, confirmed, _ = applied(
        both, [experiment_of("fp32-lm-head", 0.8), experiment_of("attention-sinks", 0.5)]
    )
    assert set(confirmed) == {"attention-sinks", "bf16-lm-head"}
    shares = [(c.id, c.effect.value) for c in after.ranked if c.effect is not None]
    assert shares == [("bf16-lm-head", 0.8), ("attention-sinks", 0.5)]  # by what goes with them


# ---------------------------------------------------------------- beside --explain


def explained(run: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[str]:
    """Explain a run whose world scores nothing; return the ids that it was asked to score."""
    asked: list[str] = []

    def measure(trials: FixRun, passes: list[Any], sample: bool) -> None:
        asked.extend(variant.id for variant in trials.pending())
        if error is not None:
            raise error

    monkeypatch.setattr(FixRun, "measure", measure)
    monkeypatch.setattr("mismatch.experiments.explanation.PROBES", {})
    monkeypatch.setattr(explain, "score_in_float32", lambda stages: None)
    journal = SimpleNamespace(seconds={}, entry={"command": ""})
    spec = replace(load_spec(run), explain=True)
    stages: Any = SimpleNamespace(spec=spec, run_dir=run, narrator=Quiet(), journal=journal)
    explain.explain(stages, broken=False)
    store.write_json(run / "spec.json", to_dict(spec))
    return asked


def test_explain_makes_nothing_that_a_fix_has_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows stand once, and its failure is not tried again."""
    run = saved(tmp_path / "run", without_sinks(), {"attention-sinks": 0.05})
    assert explained(run, monkeypatch, None) == []
    assert store.load_document(run, explain.STATE)["experiments"] == []
    explanation = explanation_of(reported(run))
    assert [experiment.id for experiment in explanation.experiments] == ["attention-sinks"]
    assert explanation.confirmed == ("attention-sinks",)
    failed = saved(tmp_path / "failed", without_sinks(), {"attention-sinks": "cannot run"})
    assert "attention-sinks" not in explained(failed, monkeypatch, None)


def test_an_error_that_nobody_foresaw_ends_experiments_and_not_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(tmp_path / "run", without_sinks(), {"fp32": 0.9})
    assert explained(run, monkeypatch, KeyError("planted")) != []
    rows = store.load_document(run, explain.STATE)["experiments"]
    assert rows
    assert all(
        row["reason"].startswith("KeyError") and explain.LOG in row["reason"] for row in rows
    )
    assert "planted" in (run / explain.LOG).read_text()


@pytest.mark.parametrize("asked", [True, False])
def test_only_a_run_without_explain_is_told_to_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    run = saved(tmp_path / "run", without_sinks(), {"fp32": 0.9})
    if asked:
        explained(run, monkeypatch, KeyError("planted"))
    report = compared(run)
    assert first(report).status == "suspected"
    console = Console(width=200, record=True, file=io.StringIO())
    print_page(page(report), console, details=False)
    for text in (to_markdown(report), console.export_text(), json.dumps(report_to_json(report))):
        assert ("--explain confirms" in text) != asked


@pytest.mark.parametrize(("left", "word"), [(0.05, "confirmed"), (1.0, "ruled out")])
def test_the_check_of_causes_and_the_verdict_say_what_experiments_did(
    left: float, word: str
) -> None:
    cause = Cause("norm-eps", "suspected", "trainer", None, ())
    before = Causes((cause,), (), (), (), 0.1, 0.0)
    after = replace(before, ranked=(replace(cause, status="confirmed"),) if left < 1 else ())
    warned = cause_checks(before)
    report = replace(
        make_report(), checks=tuple(warned), verdict=verdict((), warned, None)
    ).with_analyses(causes=before)
    report = with_causes(report, after, explained=True)
    (check,) = report.checks
    assert word in check.detail
    assert "--explain" not in check.fix
    assert report.verdict.correctness is not None
    assert check.detail in report.verdict.correctness.reason
    assert report.result("causes") == after


def test_a_fix_stands_for_the_experiment_that_had_no_time(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", without_sinks(), {"attention-sinks": 0.05})
    own = Experiment("attention-sinks", "trainer", ("attention-sinks",), reason="budget")
    document = {"schema": explain.STATE_SCHEMA, "experiments": to_json([own]), "seconds": 7.0}
    store.save_document(run, explain.STATE, document, schema=explain.STATE_SCHEMA)
    store.write_json(run / "spec.json", to_dict(replace(SPEC, explain=True)))
    assert [experiment.outcome for experiment in explanation_of(reported(run)).experiments] == [
        "confirmed"
    ]
