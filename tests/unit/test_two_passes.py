"""Two forward passes: known ratios give known shares, and what was injected is said everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from mismatch.analysis.results import AS_RUN, OVERRIDE, REPLAY
from mismatch.analysis.two_passes import mark_injected, measure_pass, two_passes
from mismatch.codec import from_json
from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.scoring_passes import reference_of, training_passes
from mismatch.facts import injections_in_words
from mismatch.keys import NEW, NEW_REPLAYED, REGROUPED, REPLAYED, TRAIN
from mismatch.metrics.ppo_passes import ratios
from mismatch.models.config import is_moe
from mismatch.models.moe import parse_injections, require_routes
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.processes.workers.train import left_out, replay_source
from mismatch.reports.section import cell_text
from mismatch.reports.sections import page
from mismatch.reports.sections import two_passes as section
from mismatch.run.store import save_rollout, save_scoring
from mismatch.specs import CheckSpec, EngineSpec, Pass, RolloutSpec, TrainSpec, to_dict
from mismatch.types import Report, Routing, Scoring, Verdict
from tests.made_run import rollout
from tests.reports_fixture import make_report, make_tokens
from tests.texts import numbers

ROLLOUT = rollout()
ACTIONS = ROLLOUT.n_actions
NOISE = (("router-noise", 0.05),)


# ---------------------------------------------------------------- the numbers


def _measure(old: np.ndarray, new: np.ndarray, differs: Any = None) -> Any:
    sequence = np.arange(len(old)) % 8
    return measure_pass(
        AS_RUN, "fsdp:new", old, new, sequence=np.sort(sequence), prompt=np.arange(8) // 2,
        differs=differs,
    )  # fmt: skip


def test_ratios_are_those_of_a_trainer_in_float32() -> None:
    old = np.array([-1.0, -2.0, -3.0, -0.5])
    # The last difference is no difference in float32: a trainer's ratio is 1 there.
    new = old + np.array([0.0, np.log(1.5), -np.log(2.0), 1e-12])
    assert ratios(old, new) == pytest.approx([1.0, 1.5, 0.5, 1.0], rel=1e-6)
    assert ratios(old, new)[[0, 3]].tolist() == [1.0, 1.0]


def test_known_ratios_give_known_shares() -> None:
    old = np.full(16, -2.0)
    off = np.zeros(16)
    off[:4] = np.log([1.5, 1.1, 0.9, 0.5])
    measured = _measure(old, old + off)
    values = {name: estimate.value for name, estimate in measured.metrics.items()}
    assert values["ratio_not_one"] == 4 / 16
    assert values["ratio_clipped"] == 2 / 16
    assert values["ratio_off_mean"] == pytest.approx((0.5 + 0.1 + 0.1 + 0.5) / 16, rel=1e-6)
    assert values["ratio_off_max"] == pytest.approx(0.5, rel=1e-6)
    assert values["logprob_abs_diff_mean"] == pytest.approx(np.abs(off).mean())
    assert measured.metrics["ratio_off_max"].low is None
    assert measured.metrics["ratio_off_mean"].low is not None
    assert measured.routing == {}


def test_flips_are_counted_by_layer_and_by_token() -> None:
    differs = np.zeros((16, 4), bool)
    differs[0, :2] = differs[1, 3] = True
    measured = _measure(np.full(16, -1.0), np.full(16, -1.0), differs)
    assert measured.routing["routing_disagree_layer"].value == 3 / 64
    assert measured.routing["routing_disagree_any"].value == 2 / 16


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        ([], [], EmptyComparison, "no action tokens"),
        ([-1.0], [-1.0, -2.0], MismatchError, r"\b1 tokens.*\b2"),
        ([-1.0], [np.nan], MismatchError, "not finite"),
    ],
)
def test_bad_input_is_named(old: list[float], new: list[float], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        ratios(np.array(old), np.array(new))


def test_a_ratio_that_overflows_is_no_ratio_of_two_passes() -> None:
    with pytest.raises(MismatchError, match=r"\b1 tokens overflows"):
        _measure(np.full(16, -200.0), np.r_[-1.0, np.full(15, -200.0)])


# ---------------------------------------------------------------- from scorings


def _scoring(name: str, shift: np.ndarray | float, ids: int = 0, **facts: Any) -> Scoring:
    base = -1.0 - np.random.default_rng(0).exponential(1.0, ACTIONS)
    tokens = len(ROLLOUT.token_ids)
    draw = np.random.default_rng(5)
    experts = np.stack([draw.permutation(8)[:2] for _ in range(tokens)])[:, None]
    experts = (experts + ids) % 8
    routing = Routing((0,), 8, experts.astype(np.uint8), np.ones(tokens, bool))
    facts = {"mode": "train", "moe": True, "device": "cpu", **facts}
    actions = ROLLOUT.token_ids[ROLLOUT.actions]
    return Scoring(name, actions, base + shift, facts, routing=routing)


def _scorings(**injected: Any) -> dict[str, Scoring]:
    replay = {"mode": "ids", "source": TRAIN, "rows_replayed": 9, "rows_own": 0, "overruled": 3}
    facts = {"injected": {**injected, "seed": 0}} if injected else {}
    name = NEW if injected else REGROUPED
    scorings = [
        _scoring(TRAIN, 0.0),
        _scoring(name, 0.01, ids=1, **facts),
        _scoring(NEW_REPLAYED, 0.004, replay=replay, **facts),
    ]
    return {scoring.name: scoring for scoring in scorings}


NOISY = {"router-noise": 0.05}


def test_variants_of_a_run_with_replay() -> None:
    result = two_passes(CheckSpec(inject=NOISE), ROLLOUT, _scorings(**NOISY))
    assert result is not None
    assert [variant.id for variant in result.variants] == [AS_RUN, REPLAY, OVERRIDE]
    assert [variant.scoring for variant in result.variants] == [NEW, NEW_REPLAYED, None]
    plain, replayed, override = result.variants
    assert plain.metrics["ratio_off_mean"].value == pytest.approx(np.expm1(0.01), rel=1e-4)
    assert replayed.metrics["ratio_off_mean"].value == pytest.approx(np.expm1(0.004), rel=1e-4)
    assert plain.routing["routing_disagree_any"].value == 1.0
    assert replayed.routing["routing_disagree_any"].value == 0.0
    assert override.metrics == {}  # 1 by construction is no measurement
    assert result.injected == "router-noise=0.05 (seed 0)"
    assert result.notes == ()


def test_variants_of_a_plain_run() -> None:
    scorings = _scorings()
    del scorings[NEW_REPLAYED]
    result = two_passes(CheckSpec(), ROLLOUT, scorings)
    assert result is not None
    assert [variant.id for variant in result.variants] == [AS_RUN, OVERRIDE]
    assert result.injected == ""
    assert any("--two-passes" in note for note in result.notes)
    assert any("--inject router-noise=SIGMA" in note for note in result.notes)
    assert two_passes(CheckSpec(two_passes=False), ROLLOUT, scorings) is None
    assert two_passes(CheckSpec(), ROLLOUT, {TRAIN: scorings[TRAIN]}) is None


def test_a_replayed_pass_of_another_noise_is_not_taken() -> None:
    scorings = _scorings(**NOISY) | {REGROUPED: _scoring(REGROUPED, 0.0)}
    scorings[NEW_REPLAYED] = _scoring(NEW_REPLAYED, 0.004, injected={"router-noise": 9, "seed": 0})
    result = two_passes(CheckSpec(inject=NOISE), ROLLOUT, scorings)
    assert result is not None
    assert result.named(REPLAY) is None


def test_the_verdict_says_what_was_injected_and_where() -> None:
    clean = Verdict("healthy", "all within", "bf16 MoE", ())
    assert mark_injected(clean, _scorings()) == clean
    marked = mark_injected(clean, _scorings(**NOISY))
    assert marked.reason.startswith(f"{clean.reason}; ")
    assert "router-noise=0.05 (seed 0)" in marked.reason
    assert "fsdp:new and fsdp:new-replayed" in marked.reason
    assert marked.status == "healthy"


# ---------------------------------------------------------------- the passes of a check


@pytest.fixture
def moe(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text('{"num_local_experts": 8, "model_type": "gpt_oss"}')
    return str(tmp_path)


def _spec(model: str, **fields: Any) -> CheckSpec:
    train = fields.pop("train", {})
    engine = EngineSpec(model=model, **fields.pop("engine", {}))
    return CheckSpec(RolloutSpec(engine), TrainSpec(model=model, **train), **fields)


def _names(spec: CheckSpec) -> set[str]:
    return {pass_.name for pass_ in training_passes(spec)}


def test_by_default_no_pass_is_added(moe: str) -> None:
    extra = {NEW, NEW_REPLAYED, REPLAYED}
    assert not _names(_spec(moe)) & extra
    assert _names(_spec(moe, two_passes=True)) & extra == {NEW_REPLAYED, REPLAYED}
    assert _names(_spec(moe, inject=NOISE)) & extra == {NEW, NEW_REPLAYED}
    assert _names(_spec(moe, two_passes=True, noise_floor=False)) == {
        TRAIN, REGROUPED, NEW_REPLAYED, REPLAYED,
    }  # fmt: skip
    replaying = {"replay_routing": "ids"}  # both passes replay the engine anyway
    assert not _names(_spec(moe, two_passes=True, train=replaying)) & extra
    assert not _names(_spec(moe, two_passes=True, train={"routing": False})) & extra


def test_noise_goes_into_the_new_passes_only(moe: str) -> None:
    spec = _spec(moe, inject=NOISE, two_passes=True, seed=7)
    passes = {pass_.name: pass_.spec for pass_ in training_passes(spec)}
    noisy = {name for name, pass_ in passes.items() if pass_.inject}
    assert noisy == {NEW, NEW_REPLAYED}
    assert passes[NEW].inject_seed == 7
    assert passes[NEW].micro_batch_tokens < passes[TRAIN].micro_batch_tokens
    assert passes[NEW_REPLAYED].replay_source == TRAIN
    assert passes[REPLAYED].replay_source is None  # the engine's
    replaying = replace(spec.train, replay_routing="ids")
    assert reference_of(replaying).replay_routing is None


def test_a_side_pass_without_routes_is_left_out_and_an_asked_one_refused(tmp_path: Path) -> None:
    save_rollout(tmp_path, ROLLOUT)
    silent = replace(_scoring("transformers:decode", 0.0), routing=None)
    for scoring in (silent, _scoring(TRAIN, 0.0)):
        save_scoring(tmp_path, scoring, ROLLOUT)
    spec = TrainSpec(replay_routing="ids")
    assert left_out(tmp_path, ROLLOUT, Pass(REPLAYED, spec))
    assert not left_out(tmp_path, ROLLOUT, Pass(NEW_REPLAYED, replace(spec, replay_source=TRAIN)))
    assert not left_out(tmp_path, ROLLOUT, Pass("mine", spec))
    with pytest.raises(MismatchError, match="--replay-routing ids: transformers:decode"):
        replay_source(tmp_path, ROLLOUT, spec)


def test_a_spec_with_injections_survives_json(moe: str) -> None:
    spec = _spec(moe, inject=NOISE, train={"inject": NOISE, "replay_routing": "ids"})
    assert from_json(CheckSpec, json.loads(json.dumps(to_dict(spec)))) == spec


def test_what_cannot_be_replayed_is_refused_before_anything_starts(
    moe: str, tmp_path: Path
) -> None:
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text('{"model_type": "llama", "num_experts": 0}')
    assert (is_moe(moe), is_moe(str(dense)), is_moe("nobody/nothing")) == (True, False, None)
    require_routes(_spec(moe, inject=NOISE, train={"replay_routing": "ids"}))
    cases: list[tuple[CheckSpec, str]] = [
        (_spec(str(dense), train={"replay_routing": "ids"}), "is dense"),
        (_spec(str(dense), inject=NOISE), "--inject: .* is dense"),
        (_spec(moe, inject=NOISE, two_passes=False), "--no-two-passes leaves out"),
        (_spec(moe, train={"replay_routing": "ids"}, engine={"routing": False}), "not captured"),
        (_spec(moe, train={"replay_routing": "ids+weights"}), "vllm gives the ids"),
    ]
    for spec, says in cases:
        with pytest.raises(MismatchError, match=says):
            require_routes(spec)


def test_injections_are_read_from_flags() -> None:
    assert parse_injections(None) == ()
    assert parse_injections(["router-noise=5e-2"]) == NOISE
    assert injections_in_words(NOISE) == "router-noise=0.05"
    for bad in ("router-noise", "router-noise=", "router-noise=-1", "router-noise=nan", "x=1"):
        with pytest.raises(MismatchError, match="--inject"):
            parse_injections([bad])
    with pytest.raises(MismatchError, match="given twice"):
        parse_injections(["router-noise=1", "router-noise=2"])


# ---------------------------------------------------------------- the report


def _report(**injected: Any) -> Report:
    result = two_passes(CheckSpec(), ROLLOUT, _scorings(**injected))
    return make_report(make_tokens()).with_analyses(two_passes=result)


def test_the_section_holds_every_variant_and_warns_of_noise() -> None:
    report = _report(**NOISY)
    shown = section.section(report.result("two_passes"), report)
    (table,) = shown.tables
    plain, replayed, override = table.cells()
    assert [row[0].value for row in (plain, replayed, override)] == [
        "as it runs", "with router replay", "on-policy override",
    ]  # fmt: skip
    assert cell_text(plain[5], table.columns[5]) == "100 %"
    assert replayed[5].value == "replayed"
    assert [cell.value for cell in override[1:6]] == [None] * 5  # 1 by construction
    assert cell_text(override[6], table.columns[6]) == cell_text(plain[6], table.columns[6])
    assert "router-noise=0.05 (seed 0)" in shown.warnings[0]
    (falls,) = [sentence for sentence in shown.sentences if "falls" in sentence]
    assert 60 in numbers(falls)


def test_a_warning_is_read_first() -> None:
    careful = [answer for answer in page(_report(**NOISY)).answers if answer.question == "Careful"]
    assert "router-noise=0.05" in careful[0].text


def test_a_run_without_noise_says_nothing_of_injections() -> None:
    report = _report()
    assert section.section(report.result("two_passes"), report).warnings == ()
    without = report.with_analyses(two_passes=None)
    assert "two_passes" not in [
        shown.id for chapter in page(without).sections for shown in chapter.parts
    ]


def test_passes_that_agree_bit_for_bit_need_no_remedy() -> None:
    scorings = {name: _scoring(name, 0.0) for name in (TRAIN, REGROUPED)}
    result = two_passes(CheckSpec(), ROLLOUT, scorings)
    assert result is not None
    sentences = section.sentences(result)
    assert sentences == [section.EQUAL, section.NO_FLIP]


def test_the_document_keeps_them_and_fulfils_its_schema() -> None:
    report = _report(**NOISY)
    document = json.loads(json.dumps(report_to_json(report), allow_nan=False))
    Draft202012Validator(schema()).validate(document)
    assert document["two_passes"]["injected"] == "router-noise=0.05 (seed 0)"
    assert report_from_json(document).result("two_passes") == report.result("two_passes")
    del document["two_passes"]  # written by an earlier version
    Draft202012Validator(schema()).validate(document)
    assert report_from_json(document).result("two_passes") is None
