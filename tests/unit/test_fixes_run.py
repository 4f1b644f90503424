"""Running fixes without engines: what is shared, what is resumed, what a failure takes with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.applies import NEEDS
from mismatch.experiments.fixes.context import Context, ModelFacts
from mismatch.experiments.fixes.planning import plan_fixes
from mismatch.experiments.fixes.results import STATE, table_of, with_fixes
from mismatch.experiments.results import FixOutcome
from mismatch.experiments.scoring_passes import by_load
from mismatch.keys import TRAIN, WEIGHTS
from mismatch.pipeline.build import build_report
from mismatch.pipeline.fix_trials import FixRun, sampling_spec
from mismatch.processes.stages import Stages
from mismatch.reports.sections.fixes import ONLY_OF_THE_LOSS, sentences
from mismatch.run import store
from mismatch.run.directory import at_work
from mismatch.run.messages import pass_label, write_error
from mismatch.specs import CheckSpec, Pass
from mismatch.types import Check, Scoring
from tests import made_run

KILLED = "the train process was killed"
SHIFTS = {"fp32": 0.001, "fp16": 0.01, "fp32-lm-head": 0.03}  # of the trainer; 0.01 is the check's


class Quiet:
    """A narrator that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def stage(self, title: str) -> Iterator[Any]:
        yield lambda line: None

    def note(self, text: str) -> None:
        self.lines.append(text)


class Pretend(Stages):
    """Stages whose world and engine write invented numbers.

    Attributes:
        broken: variant ids whose pass fails, "!" before it: takes the world down.
        worlds: job names of every world that was started.
    """

    broken: frozenset[str] = frozenset()
    slow: frozenset[str] = frozenset()
    worlds: list[list[str]]

    def measure(
        self, passes: list[Pass], sample: bool = True, more: Any = (), prepare: Any = None
    ) -> None:
        allowed_s = prepare()
        if not more:
            return
        first = Pass(TRAIN, self.spec.train)  # kernels of the check first
        self.order = tuple(pass_ for pass_ in by_load([first, *more]) if pass_.optional)
        self.worlds.append([pass_.name for pass_ in self.order])
        for pass_ in self.order:
            name, place = pass_.name.removeprefix("fix:"), self.run_dir / pass_.folder
            if f"!{name}" in self.broken:
                raise MismatchError(KILLED, log="    line")
            if name in self.broken or not place.exists():  # no long sequence
                write_error(self.run_dir, pass_label(pass_.name), MismatchError("cannot run"))
            elif not (place / store.ROLLOUT).exists() or allowed_s == 0:
                continue
            else:
                self.score(place, pass_, SHIFTS.get(name, 0.001))

    def score(self, place: Path, pass_: Pass, shift: float) -> None:
        rollout = store.load_rollout(place)
        scores = made_run.scoring(pass_.name, rollout, shift)
        scores = replace(
            scores, fingerprint=scores.fingerprint | {"seconds": 2.0, "peak_bytes": [5, 7]}
        )
        store.save_scoring(place, scores, rollout, made_by=pass_.spec)


def sampled(self: Stages, *beside: Any) -> None:
    """What an engine of a fix leaves: other tokens, the same prompts."""
    if "engine-fp32" in str(self.run_dir):
        raise MismatchError("the engine refuses\nmore")
    rollout = made_run.rollout()
    spec = self.spec.rollout
    store.save_rollout(self.run_dir, rollout, made_by=spec)
    store.save_vocabulary(self.run_dir, {int(i): f"t{i}" for i in np.unique(rollout.token_ids)})
    decode = made_run.scoring("transformers:decode", rollout)
    store.save_scoring(self.run_dir, decode, rollout, made_by=spec)
    self.journal.seconds["rollout"] = 40.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return made_run.make_run(tmp_path / "run")


def fixed(run_dir: Path, *fixes: str, minutes: float | None = None, **kinds: Any) -> FixRun:
    """Run the fixes on a finished check."""
    spec = replace(spec_of(*fixes, minutes=minutes), noise_floor=kinds.get("square", False))
    context = Context(spec, ModelFacts(sinks=True, experts=8))
    with at_work(run_dir, "check", spec, "mismatch check") as journal:
        stages = Pretend(spec, run_dir, Quiet(), journal)
        stages.worlds = []
        stages.broken = kinds.get("broken", frozenset())
        run = FixRun(stages, plan_fixes(spec, context))
        run.measure([Pass(TRAIN, spec.train)])
        if run.plan.pairs:
            run.pairs(context)
        run.save()
    return run


def spec_of(*fixes: str, minutes: float | None = None) -> CheckSpec:
    return replace(made_run.spec(), fixes=fixes, budget_minutes=minutes)


@pytest.fixture(autouse=True)
def _pretend_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stages, "sample", sampled)


# ---------------------------------------------------------------- sharing and resuming


def test_one_world_scores_everything(run_dir: Path) -> None:
    run = fixed(run_dir, "fp32", "fp16", "fp32-lm-head", "engine-fp16")
    assert len(run.stages.worlds) == 1
    assert len(run.stages.worlds[0]) == 4
    assert (run_dir / "fixes/engine-fp16/scores/fix-engine-fp16.parquet").exists()


def test_loads_come_once_each_and_the_check_first() -> None:
    spec = made_run.spec()
    low, high = spec.train, replace(spec.train, dtype="fp32")
    names = {"fix:a": low, "fix:b": high, "fsdp": low, "reference:fp32": high, "fix:c": low}
    jobs = [Pass(n, t, "", "any" if n.startswith("fix:") else "") for n, t in names.items()]
    order = [pass_.name for pass_ in by_load(sorted(jobs, key=lambda pass_: pass_.optional))]
    assert order == ["fsdp", "fix:a", "fix:c", "reference:fp32", "fix:b"]


def test_what_is_there_is_not_made_again(run_dir: Path) -> None:
    fixed(run_dir, "fp32", "engine-fp16")
    again = fixed(run_dir, "fp32", "engine-fp16", "fp16")
    assert again.stages.worlds == [["fix:fp16"]]


def test_an_engine_is_asked_for_tokens_and_nothing_more() -> None:
    spec = replace(spec_of("engine-fp16"), rollout=replace(made_run.spec().rollout, exact_kl=512))
    variant = plan_fixes(spec, Context(spec)).variants[0]
    rollout = sampling_spec(variant).rollout
    assert (rollout.exact_kl, rollout.engine.prefill) == (0, False)
    assert rollout.sampling == spec.rollout.sampling
    assert rollout.prompts == spec.rollout.prompts


# ---------------------------------------------------------------- failures


def test_a_fix_that_fails_is_a_row_and_the_others_go_on(run_dir: Path) -> None:
    run = fixed(run_dir, "fp32", "fp16", "engine-fp32", broken=frozenset({"fp16"}))
    refused = "the engine refuses; see fixes/engine-fp32/logs/engine.log"
    assert run.failed == {"fp16": "cannot run", "engine-fp32": refused}
    table = table_of(run_dir, spec_of("fp32", "fp16", "engine-fp32"))
    assert [row.id for row in table.outcomes if row.measured] == ["fp32"]
    assert table.outcome("fp16").reason == "cannot run"
    assert table.outcome("fp16").applies
    assert table.outcome("fp16").significant is None


def test_a_fix_that_takes_the_world_down_is_dropped_and_the_world_started_again(
    run_dir: Path,
) -> None:
    run = fixed(run_dir, "fp16", "fp32", "fp32-lm-head", broken=frozenset({"!fp16"}))
    assert list(run.failed) == ["fp16"]
    assert run.failed["fp16"] == KILLED
    assert len(run.stages.worlds) == 2
    assert "fix:fp16" not in run.stages.worlds[1]


def test_float32_passes_that_are_refused_or_take_the_world_down_cost_no_fix(run_dir: Path) -> None:
    """The one that ended the world is dropped, and not one that a kernel refused before it."""
    refused = [f"experts-implementation={name}" for name in ("eager", "grouped_mm", "batched_mm")]
    broken = frozenset({*(f"{name}:fp32" for name in refused), "!expert-memory:fp32"})
    run = fixed(run_dir, *refused, "expert-memory", broken=broken, square=True)
    assert run.stages.worlds[0][-2] == "fix:expert-memory:fp32"  # its long sequence is the last
    assert run.failed == {}
    assert all(map(run.scored, run.variants))
    assert run.not_exact == {"fix:expert-memory:fp32"}


def test_the_fix_that_was_at_work_is_the_one_that_is_dropped(run_dir: Path) -> None:
    """The world runs the check's own kernels first, in another order than the plan's."""
    run = fixed(
        run_dir, "expert-memory", "fp32", "fp32-lm-head", broken=frozenset({"!fp32-lm-head"})
    )
    assert run.stages.worlds[0][0] == "fix:fp32-lm-head"
    assert list(run.failed) == ["fp32-lm-head"]
    assert len(run.stages.worlds) == 2


def test_a_run_that_cannot_be_compared_says_how_it_ends_with_a_fix(run_dir: Path) -> None:
    """The trainer's logprobs are not finite: no change can be measured, and the report stands."""
    rollout = store.load_rollout(run_dir)
    bad = made_run.scoring(TRAIN, rollout)
    bad = replace(bad, logprobs=np.where(np.arange(len(bad.logprobs)) == 3, np.nan, bad.logprobs))
    store.save_scoring(run_dir, bad, rollout, made_by=made_run.spec().train)
    fixed(run_dir, "fp32", "fp16", broken=frozenset({"fp16"}))
    spec = replace(spec_of("fp32", "fp16"), verdict="after-fixes")
    report = with_fixes(build_report(run_dir, spec)[0], run_dir, spec, None)
    assert report.verdict.status == "broken"
    assert report.result("fixes") is not None
    assert report.result("fixes").best is None
    row = report.result("fixes").outcome("fp32")
    assert not row.measured
    assert "cannot be compared" in row.reason
    assert row.verdict_after is not None
    text = " ".join(sentences(report.result("fixes")))
    assert f"fp32 ({row.verdict_after.status})" in text
    assert "not measured: fp16." in text


def test_fixes_of_the_loss_alone_are_no_failure(run_dir: Path) -> None:
    fixed(run_dir, "tis")
    spec = spec_of("tis")
    report = with_fixes(build_report(run_dir, spec)[0], run_dir, spec, None)
    assert sentences(report.result("fixes")) == [ONLY_OF_THE_LOSS]


def test_a_check_that_fails_is_an_error(run_dir: Path) -> None:
    (run_dir / "scores/fsdp.parquet").unlink()
    with pytest.raises(MismatchError, match="killed"):
        fixed(run_dir, "fp16", broken=frozenset({"!fp16"}))


# ---------------------------------------------------------------- budget


def test_what_the_budget_does_not_allow_is_named(run_dir: Path) -> None:
    run_json = run_dir / "run.json"
    fixed(run_dir, "fp16")  # makes run.json
    journal = json.loads(run_json.read_text())
    journal["invocations"][-1]["seconds"] = {"rollout": 60.0}  # of the check's own engine
    run_json.write_text(json.dumps(journal))
    run = fixed(run_dir, "fp32", "engine-fp16", minutes=1.5)
    (left_out,) = run.left_out
    assert left_out.startswith("engine-fp16: ")
    assert "budget" in left_out
    assert [variant.id for variant in run.variants] == ["fp32"]
    again = fixed(run_dir, "fp32", "engine-fp16", minutes=3.0)
    assert again.left_out == []


def test_passes_beyond_the_budget_are_named(run_dir: Path) -> None:
    run = fixed(run_dir, "fp32", "fp16", minutes=1e-9)
    assert [text.partition(":")[0] for text in run.left_out] == ["fp32", "fp16"]


# ---------------------------------------------------------------- the table


def test_the_table_finds_what_was_planted(run_dir: Path) -> None:
    """A trainer that is 0.01 off everywhere: fp32 is 0.001 off, the head makes it 0.03."""
    fixed(run_dir, "fp32", "fp16", "fp32-lm-head", "no-packing", "tis", "on-policy-ratio")
    spec = spec_of("fp32")
    table = table_of(run_dir, spec)
    assert [row.id for row in table.outcomes] == ["fp32", "fp16", "fp32-lm-head", "no-packing"]
    assert [row.outcome for row in table.outcomes] == ["better", "none", "worse", None]
    best = table.outcomes[0]
    assert best.before["logprob_abs_diff_mean"].value == pytest.approx(0.01)
    assert best.after["logprob_abs_diff_mean"].value == pytest.approx(0.001)
    assert best.changes["logprob_abs_diff_mean"].value == pytest.approx(-0.009)
    assert best.paired is not None
    assert best.difference is None
    assert (best.cost.seconds, best.cost.peak_bytes) == (2.0, 7)
    assert table.best == table.best_together == "fp32"
    assert table.outcomes[-1].reason == NEEDS["packing"][1]
    assert [(row.id, row.hides) for row in table.estimators] == [
        ("tis", False),
        ("on-policy-ratio", True),
    ]


def test_new_tokens_have_a_difference_and_no_paired_interval(run_dir: Path) -> None:
    fixed(run_dir, "engine-fp16")
    (row,) = table_of(run_dir, spec_of("engine-fp16")).outcomes
    assert row.paired is None
    assert row.difference is not None
    assert row.difference.value < 0
    assert row.cost.seconds == 42.0  # the engine and the pass


def test_pairs_of_what_helps_are_tried(run_dir: Path) -> None:
    run = fixed(run_dir, "all")
    pairs = [variant.id for variant in run.variants if len(variant.chosen) > 1]
    assert len(run.stages.worlds) == 2
    assert all(name.removeprefix("fix:") in pairs for name in run.stages.worlds[1])


@pytest.mark.parametrize(
    ("shift", "healed", "best"),
    [(0.0005, False, "both"), (0.00095, False, "single"), (0.0005, True, "single")],
)
def test_a_combination_has_to_add_something(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, shift: float, healed: bool, best: str
) -> None:
    """Half the mismatch of the best single fix is worth it, 95 % is not, and HEALTHY is enough."""
    monkeypatch.setattr(FixOutcome, "heals", healed)
    both = "fp32+micro-batch=512"
    monkeypatch.setitem(SHIFTS, both, shift)
    fixed(run_dir, "fp32", both)
    table = table_of(run_dir, spec_of("fp32", both))
    assert table.best == "fp32"
    assert table.best_together == {"both": both, "single": "fp32"}[best]


@pytest.mark.parametrize("verdict", ["as-is", "after-fixes"])
def test_the_verdict_after_fixes_is_that_of_the_best(run_dir: Path, verdict: Any) -> None:
    fixed(run_dir, "fp32")
    spec = replace(spec_of("fp32"), verdict=verdict)
    report, _ = build_report(run_dir, spec)
    final_report = with_fixes(report, run_dir, spec, None)
    assert final_report.result("fixes") is not None
    after = final_report.result("fixes").outcome("fp32").verdict_after
    assert after is not None
    if verdict == "as-is":
        assert final_report.verdict == report.verdict
        assert final_report.result("fixes").verdict_as_is is None
    else:
        assert final_report.verdict.reason == f"after fp32: {after.reason}"
        assert final_report.verdict.status == after.status
        assert final_report.result("fixes").verdict_as_is == report.verdict


@pytest.mark.parametrize("status", ["warning", "failed"])
def test_what_the_run_found_of_its_weights_holds_after_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Any
) -> None:
    """Passes that the fix did not make may have excused a digest, or found a fault."""
    made = made_run.scoring

    def scoring(name: str, *rest: Any) -> Scoring:
        scored = made(name, *rest)
        held = {"weights": {"A_log": [1, 2, 3 + (name == "transformers:decode")]}}
        return replace(scored, fingerprint=scored.fingerprint | held)

    monkeypatch.setattr(made_run, "scoring", scoring)
    run_dir = made_run.make_run(tmp_path / "run")
    fixed(run_dir, "fp32", "engine-fp16")
    report, _ = build_report(run_dir, spec_of("fp32", "engine-fp16"))
    check = Check("weights-as-loaded", status, "A_log")
    checks = [check if each.id == check.id else each for each in report.checks]
    report = replace(report, checks=tuple(checks))
    seen: dict[str, Any] = {}
    plain = ScoredRollout.verdict

    def verdict(self: ScoredRollout, *rest: Any) -> Any:
        seen[self.train.name] = check in rest[2]
        return plain(self, *rest)

    monkeypatch.setattr(ScoredRollout, "verdict", verdict)
    table = with_fixes(report, run_dir, spec_of("fp32", "engine-fp16"), None).result("fixes")
    # Another engine, started for its fix, may not have the fault.
    assert seen == {"fix:fp32": True, "fix:engine-fp16": status == "warning"}
    reason = table.outcome("fp32").verdict_after.reason
    assert ("A_log" in reason) == (status == "failed")


STALE = {"model.layers.0.self_attn.q_proj.weight": [7, 7, 7]}
FORMED = {"model.layers.0.self_attn.q_proj.weight": [8, 8, 8]}


@pytest.mark.parametrize(("engine", "status"), [(FORMED, "warning"), (STALE, "failed")])
def test_a_weight_that_is_stale_behind_a_form_is_no_better_after_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, list[int]], status: str
) -> None:
    plain = made_run.scoring

    def scoring(name: str, *rest: Any) -> Scoring:
        held, form = ({"model.layers.0.self_attn.q_proj.weight": [1, 2, 3]}, "as-stored")
        if name in (WEIGHTS, "transformers:decode"):
            held, form = (FORMED if name == WEIGHTS else engine), "fp8-rounded"
        made = plain(name, *rest)
        facts = {"weights": held, "weights_form": form, "seconds": 1.0}
        return replace(made, fingerprint=made.fingerprint | facts)

    monkeypatch.setattr(made_run, "scoring", scoring)
    run_dir = made_run.make_run(tmp_path / "run")
    rollout = store.load_rollout(run_dir)
    store.save_scoring(run_dir, scoring(WEIGHTS, rollout), rollout, made_by=made_run.spec().train)
    fixed(run_dir, "fp32")
    report, _ = build_report(run_dir, spec_of("fp32"))
    (check,) = (each for each in report.checks if each.id == "weights-as-loaded")
    assert check.status == status
    after = with_fixes(report, run_dir, spec_of("fp32"), None).result("fixes").outcome("fp32")
    assert ("weights-as-loaded" in after.verdict_after.reason) == (status == "failed")


def test_without_a_fix_that_helps_the_verdict_stays(run_dir: Path) -> None:
    fixed(run_dir, "fp16")
    spec = replace(spec_of("fp16"), verdict="after-fixes")
    report, _ = build_report(run_dir, spec)
    final_report = with_fixes(report, run_dir, spec, None)
    assert final_report.verdict == report.verdict
    assert final_report.result("fixes") is not None
    assert final_report.result("fixes").best is None


def test_scorings_of_fixes_stay_out_of_the_checks_own_report(run_dir: Path) -> None:
    before, _ = build_report(run_dir, made_run.spec())
    fixed(run_dir, "fp32", "fp32-lm-head")
    after, _ = build_report(run_dir, made_run.spec(), again=True)
    assert after.comparisons == before.comparisons
    assert after.fingerprints.keys() == before.fingerprints.keys()


def test_a_run_without_fixes_has_no_table(run_dir: Path) -> None:
    report, _ = build_report(run_dir, made_run.spec())
    assert with_fixes(report, run_dir, made_run.spec(), None) is report
    assert not (run_dir / STATE).exists()
