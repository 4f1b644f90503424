"""Causes: named where a fault is planted, silent on healthy pairs, two of them told apart."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch.analysis.causes import ANALYSIS
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.catalogue import catalogue
from mismatch.analysis.diagnosis.detector import (
    Detector,
    Evidence,
    Finding,
    Look,
    Repair,
    detectors,
)
from mismatch.analysis.diagnosis.ranking import Cause, Causes, diagnose
from mismatch.codec import from_json, to_json
from mismatch.pipeline.build import build_report
from mismatch.reports.sections.causes import section
from mismatch.types import NotTested, Routing, Scoring
from tests import drawn_pair as drawn
from tests.conftest import grid
from tests.made_run import make_run, spec
from tests.reports_fixture import make_report

BLOCKS = 120
TOOLS = Path(__file__).parents[2] / "tools"


def causes(case: Case) -> Causes:
    result = diagnose(case, detectors())
    assert result.failures == ()
    return result


def first(case: Case) -> Cause:
    return causes(case).ranked[0]


def healthy(seed: int, **how: float) -> Case:
    return drawn.draw(seed, **how).case()  # type: ignore[arg-type]


# ---------------------------------------------------------------- named, at three strengths


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("plant", "strengths", "cause", "side"),
    [
        (drawn.raw_logprobs, (0.6, 0.8, 0.9), "temperature-semantics", "engine"),
        (drawn.top_k, (2, 4, 8), "sampling-truncation", "engine"),
        (drawn.shifted, (1, -3, 30), "misalignment", None),
        (drawn.swapped_rows, (4, 16, 128), "row-pairing", None),
        (drawn.appended_ends, (0.02, 0.1, 1.0), "appended-eos", "engine"),
        (drawn.onset, (5, 10, 20), "onset", "engine"),
        (drawn.first_tokens, (20, 50, 100), "first-token", "trainer"),
        (drawn.other_weights, (3, 5, 10), "weights-differ", "trainer"),
        (drawn.other_function, (1.0, 1.5, 2.0), "function-differs", "trainer"),
        (drawn.rounded_logprobs, (7, 8, 11), "bf16-logprobs", "engine"),
    ],
)
def test_a_fault_is_named_first(
    plant: Callable[..., Case],
    strengths: tuple[float, ...],
    cause: str,
    side: str | None,
    seed: int,
) -> None:
    for strength in strengths:
        leading = first(plant(seed, strength))
        assert leading.id == cause, strength
        assert side in (None, leading.side), strength
        assert leading.effect is not None
        assert leading.effect.low is not None
        assert leading.effect.value > 0.01


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_softcap_within_the_rounding_is_seen_in_the_side_that_has_it(side: str) -> None:
    """Its distance from float32 is rounding's; that it follows the side's own law is not."""
    case = drawn.softcapped(0, 20, side)
    legs = [np.abs(logprobs - case.reference).mean() for logprobs in (case.left, case.right)]
    assert max(legs) < 1.3 * min(legs)
    (only,) = causes(case).ranked
    assert (only.id, only.side, only.alike[0]) == ("function-differs", side, "logit-softcap")
    others = {name: one for name, one in case.others.items() if name != "plain:bf16"}
    without = causes(replace(case, others=others))
    assert without.ranked == ()
    assert "error that follows a side's own law" in {one.what for one in without.not_tested}


def test_large_rounding_follows_no_law_of_its_own() -> None:
    """It lowers what is likely and raises what is not, in a plain forward as much; and the side
    that sampled is above float32 on average."""
    for seed in range(4):
        assert causes(healthy(seed, rounding=0.6, length=60)).ranked == ()


@pytest.mark.parametrize("part", grid(range(4), 1))
def test_a_healthy_pair_has_no_cause(part: int) -> None:
    alarms = []
    for seed in range(part, BLOCKS, 4):
        case = healthy(
            1000 + seed,
            rounding=(0.005, 0.02, 0.08, 0.2)[part],
            sharpness=(1.5, 3.0, 5.0)[seed % 3],
            length=(20, 40)[seed // 4 % 2],
        )
        alarms += [(seed, cause.id) for cause in causes(case).ranked]
    assert alarms == []


def test_the_named_numbers_are_those_that_were_planted() -> None:
    def value(case: Case, what: str) -> float:
        numbers = {each.what: each.value for each in first(case).evidence}
        return float(numbers[what])

    assert value(drawn.shifted(0, -17), "best lag") in (-17, 17)
    assert value(drawn.onset(0, 20, at=43), "position of the onset") == pytest.approx(43, abs=2)
    fitted = value(
        drawn.raw_logprobs(0, 0.8), "temperature of the trainer's law over the engine's, fitted"
    )
    assert fitted == pytest.approx(0.8, abs=0.05)


# ---------------------------------------------------------------- two at once


@pytest.mark.parametrize("times", [2.2, 3, 6, 10])
def test_raw_logprobs_do_not_hide_a_noisy_engine(times: float) -> None:
    result = causes(drawn.raw_logprobs_and_noise(0, 0.6, times))
    assert [(cause.id, cause.side, cause.status) for cause in result.ranked] == [
        ("temperature-semantics", "engine", "confirmed"),
        ("weights-differ", "engine", "suspected"),
    ]


def test_a_shift_does_not_hide_other_weights() -> None:
    plain, moved = drawn.other_weights(2, 10), drawn.shifted(2, 1)
    edges = np.cumsum([row.stop - row.start for row in plain.rows])[:-1]
    right = [np.roll(row, -1) for row in np.split(plain.right, edges)]
    case = replace(plain, right=np.concatenate(right))
    assert [cause.id for cause in causes(case).ranked] == ["misalignment", "weights-differ"]
    assert [cause.id for cause in causes(moved).ranked] == ["misalignment"]


def test_what_a_cause_brings_with_it_is_a_consequence_and_gets_no_advice() -> None:
    result = causes(drawn.shifted(0, 1))
    assert [cause.id for cause in result.ranked] == ["misalignment"]
    assert result.ranked[0].consequences
    text = " ".join(section(result, make_report()).sentences)
    assert catalogue()["misalignment"].mend in text
    for id in result.ranked[0].consequences:
        assert catalogue()[id].mend not in text


# ---------------------------------------------------------------- what sides state


def stating(case: Case, engine: dict[str, object], trainer: dict[str, object]) -> Case:
    return replace(
        case,
        engine=replace(case.engine, fingerprint=case.engine.fingerprint | engine),
        trainer=replace(case.trainer, fingerprint=case.trainer.fingerprint | trainer),
    )


@pytest.mark.parametrize(
    ("differ", "cause"),
    [
        (["lm_head.weight"], "tied-head-stale"),
        (["layers.0.mlp.experts.up"], "experts-differ"),
        (["layers.0.q_proj.weight"], "lora-scale"),
        (["layers.0.q_proj.weight", "norm.weight"], "stale-weights"),
    ],
)
def test_digests_give_a_difference_its_name_and_its_share(differ: list[str], cause: str) -> None:
    names = ["lm_head.weight", "layers.0.mlp.experts.up", "layers.0.q_proj.weight", "norm.weight"]
    same = {name: [1, 2, 3] for name in names}
    case = drawn.other_weights(0, 5)
    leading = first(
        stating(case, {"weights": same}, {"weights": same | {n: [9, 2, 3] for n in differ}})
    )
    assert (leading.id, leading.side) == (cause, "trainer")
    assert leading.effect is not None
    unsaid = first(case)  # evidence, never a precondition
    assert unsaid.id == "weights-differ"
    assert unsaid.effect == leading.effect


@pytest.mark.parametrize(("layers", "named"), [((0, 1), False), ((1,), True)])
def test_an_engines_own_layout_of_experts_is_no_cause(layers: tuple[int, ...], named: bool) -> None:
    names = [f"layers.{layer}.mlp.experts.up" for layer in range(2)]
    same = {name: [1, 2, 3, 4, 5] for name in names}
    other = same | {names[layer]: [1, 2, 3, 7, 5] for layer in layers}
    found = causes(stating(healthy(0), {"weights": other}, {"weights": same}))
    assert ("experts-differ" in {cause.id for cause in found.ranked}) == named


def test_resolved_settings_are_compared_field_by_field() -> None:
    one = {"rope_theta": 10000, "rms_norm_eps": 1e-5, "sliding_window": 128}
    case = drawn.other_function(0, 1.0)
    other = stating(case, {"config": one}, {"config": one | {"rope_theta": 40000.0}})
    assert first(other).id == "rope-config"
    same = stating(healthy(0), {"config": one}, {"config": {k: float(v) for k, v in one.items()}})
    assert causes(same).ranked == ()


def test_an_onset_at_the_stated_window_is_the_window() -> None:
    case = stating(drawn.onset(0, 20, at=40), {"sliding_window": 40}, {})
    assert first(case).id == "sliding-window"


@pytest.mark.parametrize("kept", [None, 1.0, 0.98])
def test_a_law_that_was_cut_for_sampling_alone_is_named_by_the_settings(kept: float | None) -> None:
    """SGLang scores the whole law: what it cut leaves no mark in any number."""
    case = stating(healthy(0), {"logprobs_truncated": False}, {})
    assert causes(case).ranked == ()
    cut = replace(case.rollout, sampling=replace(case.rollout.sampling, top_k=20))
    case = replace(case, rollout=cut)
    if kept is not None:
        extra = {"kept_mass": np.full(len(case.left), kept)}
        case = replace(case, trainer=replace(case.trainer, extra=extra))
    named = [(cause.id, cause.side) for cause in causes(case).ranked]
    assert named == ([] if kept == 1.0 else [("sampling-truncation", "engine")])
    renormalised = stating(case, {"logprobs_truncated": True}, {})
    assert causes(renormalised).ranked == ()  # that one is seen in the numbers


def test_tokens_of_a_cut_law_are_seen_though_both_sides_score_the_whole_one() -> None:
    """Four hundredths of a nat are nine times mean |delta|; no setting is stated."""
    made = drawn.draw(11, prompts=256, rounding=0.005)
    law = drawn.log_law(made.engine)
    least = np.sort(law, axis=1)[:, -17][:, None]
    kept = np.where(law >= least, law, -np.inf)
    made.sampled = kept - np.log(np.exp(kept).sum(axis=1, keepdims=True))
    named = first(made.case())
    assert (named.id, named.side) == ("sampling-law", "engine")
    assert "sampling-truncation" in named.alike
    surplus = next(item.value for item in named.evidence if "entropy" in item.what)
    assert 0.035 < float(surplus) < 0.0434


def test_the_trainers_own_softcap_is_no_other_law_of_the_sampler() -> None:
    case = drawn.softcapped(0, 5.0, rounding=0.005)
    assert float((case.right + case.trainer.entropy).mean()) > 0.05  # by the trainer's law
    assert "sampling-law" not in {cause.id for cause in causes(case).ranked}


def test_settings_in_use_are_no_cause_of_their_own() -> None:
    case = stating(
        healthy(0), {"quantization": "mxfp4", "prefix_caching": True}, {"autocast": "bf16"}
    )
    assert causes(case).ranked == ()


# ---------------------------------------------------------------- a side against itself


def with_pass(case: Case, name: str, moved: np.ndarray) -> Case:
    other = Scoring(name, case.trainer.token_ids, case.trainer.logprobs + moved, {})
    return replace(case, others=case.others | {name: other})


@pytest.mark.parametrize(
    ("name", "cause"),
    [("fsdp:regrouped", "microbatch-dependence"), ("fsdp:grad", "train-eval-paths")],
)
def test_a_trainer_that_moves_against_itself(name: str, cause: str) -> None:
    case = healthy(3)
    noise = np.random.default_rng(0).standard_normal(len(case.left))
    assert causes(with_pass(case, name, 0.005 * noise)).ranked == ()
    made = drawn.draw(3)
    good = drawn.log_law(made.trainer)
    made.trainer = made.trainer + 0.12 * made.rng.standard_normal(made.logits.shape)
    odd = made.case()
    ids = odd.trainer.token_ids
    moved = good[np.arange(len(ids)), ids] - odd.trainer.logprobs
    leading = first(with_pass(odd, name, moved))
    assert (leading.id, leading.side, leading.status) == (cause, "trainer", "confirmed")


def test_the_engines_own_rescoring_confirms_its_decode_path() -> None:
    made = drawn.draw(4)
    good = made.engine
    made.engine = good + 0.3 * made.rng.standard_normal(good.shape)
    case = made.case()
    ids = case.engine.token_ids
    prefill = drawn.log_law(good)[np.arange(len(ids)), ids]
    case = replace(
        case, others=case.others | {"vllm:prefill": Scoring("vllm:prefill", ids, prefill, {})}
    )
    leading = first(case)
    assert (leading.id, leading.side, leading.status) == (
        "decode-vs-prefill",
        "engine",
        "confirmed",
    )


# ---------------------------------------------------------------- routed experts


def routed(kind: str) -> Case:
    """Top-2 of 16 experts in 3 layers; near-ties flip, or a capture is wrong."""
    case, rng = healthy(5, prompts=24), np.random.default_rng(6)
    tokens = len(case.rollout.token_ids)
    scores = rng.standard_normal((tokens, 3, 16))
    other = scores + 0.02 * rng.standard_normal(scores.shape)
    if kind == "chance":
        other[:, 1] = rng.standard_normal((tokens, 16))
    if kind == "shifted":
        other = np.roll(other, 1, axis=0)

    def routing(values: np.ndarray) -> Routing:
        order = np.argsort(-values, axis=2)[:, :, :2].astype(np.uint8)
        top = -np.sort(-values, axis=2)
        margin = (top[:, :, 1] - top[:, :, 2]).astype(np.float32)
        return Routing((0, 1, 2), 16, order, np.ones(tokens, bool), None, margin)

    return replace(
        case,
        engine=replace(case.engine, routing=routing(scores)),
        trainer=replace(case.trainer, routing=routing(other)),
    )


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("near-ties", []),
        ("chance", ["corrupt-route-capture"]),
        ("shifted", ["shifted-route-capture"]),
    ],
)
def test_routes(kind: str, wanted: list[str]) -> None:
    assert [cause.id for cause in causes(routed(kind)).ranked] == wanted


# ---------------------------------------------------------------- the frame


def test_a_detector_that_fails_is_reported_and_ends_nothing() -> None:
    def broken(case: Case) -> Look:
        raise ValueError("no")

    failing = Detector("broken", "position", ("onset",), broken, order=1)
    result = diagnose(drawn.shifted(0, 1), [failing, *detectors()])
    assert [failure.detector for failure in result.failures] == ["broken"]
    assert result.ranked[0].id == "misalignment"
    assert any("broken" in warning for warning in section(result, make_report()).warnings)


def test_missing_data_is_not_tested_and_not_ruled_out() -> None:
    case = healthy(0)
    bare = replace(case, trainer=replace(case.trainer, entropy=None), others={})
    result = causes(bare)
    missing = {entry.what for entry in result.not_tested}
    assert {"temperature", "distance from float32", "routed experts"} <= missing
    assert all(entry.reason for entry in result.not_tested)
    looked = {entry.detector for entry in result.ruled_out}
    assert not looked & {"temperature", "far-side", "routes", "weights"}


def test_a_few_tokens_end_in_no_cause_and_no_error() -> None:
    for prompts in (1, 2):
        result = causes(healthy(0, prompts=prompts, length=2))
        assert result.ranked == ()


def test_equal_sides_have_nothing_to_explain() -> None:
    case = healthy(0)
    assert causes(replace(case, right=case.left.copy())).ranked == ()


def test_every_detector_is_found_and_its_causes_have_an_entry() -> None:
    names = [detector.id for detector in detectors()]
    assert len(names) == len(set(names)) >= 15
    for detector in detectors():
        assert set(detector.causes) <= set(catalogue()), detector.id
    for entry in catalogue().values():
        assert all((entry.title, entry.see, entry.why, entry.confirm, entry.mend)), entry.id


def test_named_causes_are_among_those_that_a_detector_declares() -> None:
    by_id = {detector.id: detector for detector in detectors()}
    for case in (drawn.onset(0, 10), drawn.other_weights(0, 5), drawn.shifted(0, 2)):
        for id, detector in by_id.items():
            look = detector.find(case)
            for finding in () if isinstance(look, NotTested) else look.findings:
                assert finding.cause in detector.causes, id
                assert set(finding.alike) <= set(catalogue()), id


def test_an_exact_repair_lets_a_second_cause_be_seen_and_a_curve_does_not() -> None:
    def half(exact: bool) -> Detector:
        def find(case: Case) -> Look:
            effect = case.share(case.delta / 2)
            repair = Repair(case.left, case.left + case.delta / 2, exact=exact)
            evidence = (Evidence("x", 1.0),)
            found = Finding("temperature-semantics", "engine", effect, evidence, repair=repair)
            return Look(evidence, (found,))

        return Detector("half", "semantics", ("temperature-semantics",), find, order=20)

    rest = [detector for detector in detectors() if detector.order >= 50]
    case = drawn.other_weights(0, 10)
    assert "weights-differ" in {cause.id for cause in diagnose(case, [half(True), *rest]).ranked}
    assert len(diagnose(case, [half(False), *rest]).ranked) == 1


# ---------------------------------------------------------------- in a report


def test_it_is_an_analysis_of_every_check(tmp_path: Path) -> None:
    report, _ = build_report(make_run(tmp_path / "run"), spec())
    result = report.result("causes")
    assert isinstance(result, Causes)
    assert ANALYSIS.id == "causes"
    document = json.loads(json.dumps(to_json(result), allow_nan=False))
    assert to_json(from_json(Causes, document)) == document


def test_the_section_puts_the_leading_cause_first_with_one_action_each() -> None:
    result = causes(drawn.raw_logprobs_and_noise(0, 0.6, 6))
    made = section(result, make_report())
    (every,) = [part.tables[0] for part in made.parts if part.id == "causes-ranked"]
    ids = [row[1].value for row in every.rows]  # type: ignore[union-attr]
    assert ids == [cause.id for cause in result.ranked]
    for sentence, cause in zip(made.sentences, result.ranked, strict=True):
        assert sentence.count(catalogue()[cause.id].mend.rstrip(".")) == 1
    assert {part.id for part in made.parts} >= {"causes-evidence", "causes-ruled-out"}
    assert section(causes(healthy(0)), make_report()).tables == ()


def test_every_cause_has_its_picture_or_a_reason_for_none() -> None:
    gallery = Path(__file__).parents[2] / "docs" / "images" / "gallery"
    drawn = {path.stem for path in gallery.glob("*.svg")} - {"healthy"}
    assert drawn == {id for id, entry in catalogue().items() if not entry.picture}


def test_the_page_is_what_the_tool_writes() -> None:
    spec = importlib.util.spec_from_file_location("cause_page", TOOLS / "cause_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.pages()
    for name, text in made.items():
        assert (module.DOCS / name).read_text("utf-8") == text, "run: python tools/cause_page.py"
    there = {f"causes/{path.name}" for path in (module.DOCS / "causes").glob("*.md")}
    assert there == made.keys() - {"causes.md"}
    assert there == {f"causes/{id}.md" for id in catalogue()}
    unread = {name for name, text in made.items() if "not read at the source" in text}
    assert unread == set()
    named = {name for entry in catalogue().values() for name in entry.frameworks}
    assert named == set(module.EVERYWHERE)


# ---------------------------------------------------------------- the engine in float32


def in_float32(strength: float, kv_noise: float = 0.0, at: int | None = None) -> Case:
    """The engine computes another function (from a position on), and rounds ``kv_noise`` more."""
    made = drawn.draw(7, length=60)
    odd = strength * made.rng.standard_normal(made.logits.shape)
    odd = odd if at is None else odd * (made.position >= at)[:, None]
    exact = made.logits + odd
    made.engine = made.engine + odd + kv_noise * made.rng.standard_normal(made.logits.shape)
    case = stating(made.case(), {"device": "cpu"}, {"device": "cpu"})
    ids = case.engine.token_ids
    logprobs = drawn.log_law(exact)[np.arange(len(ids)), ids]
    other = Scoring("vllm:fp32", ids, logprobs, {})
    return replace(case, others=case.others | {other.name: other})


@pytest.mark.parametrize("strength", [0.02, 0.1, 0.5])
def test_a_gap_in_float32_is_named_even_below_the_rounding(strength: float) -> None:
    leading = first(in_float32(strength))
    assert (leading.id, leading.side) == ("weights-differ", "engine")
    assert leading.effect is not None
    assert leading.effect.low is not None
    assert leading.effect.low > 0


def test_equal_implementations_have_no_gap() -> None:
    assert causes(in_float32(0.0)).ranked == ()


def test_a_gap_that_begins_somewhere_is_an_onset() -> None:
    case = in_float32(0.3, at=40)
    assert first(stating(case, {"sliding_window": 40}, {})).id == "sliding-window"
    assert first(case).id == "onset"


def test_without_levels_of_the_device_the_gap_is_not_judged() -> None:
    case = stating(in_float32(0.5), {"device": "H100"}, {"device": "H100"})
    assert "implementations in float32" in {entry.what for entry in causes(case).not_tested}


# ---------------------------------------------------------------- beside rounding, and destroyed


def changed(case: Case, left=None, right=None) -> Case:  # type: ignore[no-untyped-def]
    """The same run with other numbers of a side, in its scoring as well."""
    engine = replace(case.engine, logprobs=case.left if left is None else left)
    trainer = replace(case.trainer, logprobs=case.right if right is None else right)
    return Case.of(case.rollout, engine, trainer, case.others)


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_few_far_tokens_are_no_decode_path_and_no_other_weights(side: str) -> None:
    case = healthy(0)
    prefill = Scoring("vllm:prefill", case.engine.token_ids, case.left.copy(), {})
    case = replace(case, others={**case.others, "vllm:prefill": prefill})
    far = np.zeros(len(case.left))
    far[::200] = -1.0
    named = (
        changed(case, case.left + far)
        if side == "engine"
        else changed(case, None, case.right + far)
    )
    assert [(c.id, c.side) for c in causes(named).ranked] == [("scattered-tokens", side)]
    both = changed(case, case.left + far, case.right + np.roll(far, 7))
    assert causes(both).ranked == ()  # as flips of experts do


@pytest.mark.parametrize("offset", [-0.05, 0.05, -0.5])
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_constant_is_a_law_that_does_not_sum_to_one(offset: float, side: str) -> None:
    case = healthy(1)
    moved = (
        changed(case, case.left + offset)
        if side == "engine"
        else changed(case, None, case.right + offset)
    )
    assert [(c.id, c.side) for c in causes(moved).ranked] == [("unnormalised-law", side)]


def test_a_side_of_which_nothing_is_left_is_given_no_temperature_and_no_place() -> None:
    case = healthy(2)
    rng = np.random.default_rng(2)
    for level in (-1.0, -5.0):
        lost = changed(case, None, level - rng.exponential(1.0, len(case.right)))
        assert {c.id for c in causes(lost).ranked} <= {"side-off", "function-differs"}
        assert first(lost).side == "trainer"


@pytest.mark.parametrize("rounding", [0.02, 0.3])
def test_faults_of_single_tokens_are_named_beside_large_rounding(rounding: float) -> None:
    case = healthy(3, rounding=rounding)
    last = np.zeros(len(case.right), bool)
    last[[row.stop - 1 for row in case.rows]] = True
    exact = case.others["reference:fp32"]
    exact = replace(exact, logprobs=exact.logprobs - last)  # unlikely in float32 as well
    ended = changed(replace(case, others={exact.name: exact}), None, case.right - last)
    assert [(c.id, c.side) for c in causes(ended).ranked] == [("appended-eos", "engine")]
    mantissa, exponent = np.frexp(case.right)
    rounded = changed(case, None, np.ldexp(np.round(mantissa * 2**8) / 2**8, exponent))
    assert [(c.id, c.side) for c in causes(rounded).ranked] == [("bf16-logprobs", "trainer")]


def test_what_float32_is_certain_of_may_be_exactly_0() -> None:
    case = healthy(9)
    assert case.reference is not None
    certain = case.reference > np.log(0.99)
    exact = replace(
        case.others["reference:fp32"], logprobs=np.where(certain, -1e-7, case.reference)
    )
    case = replace(case, others={**case.others, exact.name: exact})
    rng = np.random.default_rng(9)
    lower = np.where(certain, case.right - rng.uniform(0, 0.5, len(certain)), case.right)
    off = changed(case, np.where(certain, 0.0, case.left), lower)
    assert "appended-eos" not in {cause.id for cause in causes(off).ranked}


def test_a_side_that_is_off_everywhere_is_not_off_at_its_first_tokens() -> None:
    """As a softcap at a low temperature is: worst at the first tokens, and off at all others."""
    made = drawn.draw(10)
    times = np.where(made.position - drawn.PROMPT < 2, 1.2, 0.06)[:, None]
    made.trainer = made.trainer + times * made.rng.standard_normal(made.logits.shape)
    leading = first(made.case())
    assert leading.id != "first-token"
    assert leading.side == "trainer"


def test_two_rows_in_a_noisy_run_are_paired_again() -> None:
    case = healthy(4, rounding=0.3)
    right, rows = case.right.copy(), case.rows
    for one, other in ((3, 40), (40, 77), (77, 3)):
        length = min(rows[one].stop - rows[one].start, rows[other].stop - rows[other].start)
        mine, its = rows[one].start, rows[other].start
        right[mine : mine + length] = case.right[its : its + length]
    assert first(changed(case, None, right)).id == "row-pairing"


def test_a_small_cause_behind_a_shift_is_named() -> None:
    """A tenth of a nat of the shift's whole nat: 4 % of the mismatch, and half of what is left."""
    plain = drawn.other_weights(2, 3)
    edges = np.cumsum([row.stop - row.start for row in plain.rows])[:-1]
    right = np.concatenate([np.roll(row, -1) for row in np.split(plain.right, edges)])
    ranked = causes(replace(plain, right=right)).ranked
    assert [cause.id for cause in ranked] == ["misalignment", "weights-differ"]
    assert ranked[1].effect is not None
    assert ranked[1].effect.value < 0.05


def test_what_the_data_cannot_tell_apart_is_a_side_that_is_off() -> None:
    """Without tokens that the context makes likely, function and weights leave one mark."""
    made = drawn.draw(5, sharpness=0.4)
    made.trainer = made.trainer + 0.1 * made.rng.standard_normal(made.logits.shape)
    leading = first(made.case())
    assert (leading.id, leading.side) == ("side-off", "trainer")
    assert {"stale-weights", "rope-config"} <= set(leading.alike)


def in_dtypes(engine: str, trainer: str, fault: float = 0.0, seed: int = 0) -> Case:
    """A pair of which a side in "fp32" does not round; the trainer's function may be another."""
    made = drawn.draw(seed)
    confident = np.exp(drawn.log_law(made.logits)).max(axis=1, keepdims=True) ** 3
    made.engine = made.logits.copy() if engine == "fp32" else made.engine
    made.trainer = made.logits.copy() if trainer == "fp32" else made.trainer
    made.trainer += fault * confident * made.rng.standard_normal(made.logits.shape)
    return stating(made.case(), {"dtype": engine}, {"dtype": trainer})


def test_in_float32_small_faults_are_named_on_their_side() -> None:
    assert causes(in_dtypes("fp32", "fp32")).ranked == ()
    leading = first(in_dtypes("fp32", "fp32", fault=0.05))
    assert (leading.id, leading.side) == ("function-differs", "trainer")


@pytest.mark.parametrize(("engine", "trainer"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_side_that_alone_rounds_is_the_precision(engine: str, trainer: str) -> None:
    coarse = "engine" if trainer == "fp32" else "trainer"
    (only,) = causes(in_dtypes(engine, trainer)).ranked
    assert (only.id, only.side) == ("precision", coarse)
    assert only.effect is not None
    assert only.effect.value > 0.95


def test_a_fault_in_float32_is_told_from_the_rounding_of_the_other_side() -> None:
    leading = first(in_dtypes("bf16", "fp32", fault=0.2))
    assert (leading.id, leading.side) == ("function-differs", "trainer")


def test_autocast_around_float32_is_named_where_it_is_stated() -> None:
    case = stating(in_dtypes("fp32", "bf16"), {"dtype": "fp32"}, {"dtype": "fp32"})
    assert first(case).id in ("precision", "side-off")
    stated = stating(case, {}, {"autocast": "bf16"})
    assert [(c.id, c.side) for c in causes(stated).ranked] == [("trainer-autocast", "trainer")]


def leaking(seed: int, budget: int) -> Case:
    """Rows in packs of so many tokens; all but the first row of a pack are far off."""
    case = healthy(seed)
    right, rng, used = case.right.copy(), np.random.default_rng(seed), budget
    for row, length in zip(case.rows, np.diff(case.rollout.offsets), strict=True):
        used += int(length)
        if used > budget:
            used = int(length)
            continue
        right[row] -= rng.exponential(1.0, row.stop - row.start)
    return changed(case, None, right)


def test_noise_from_pass_to_pass_is_the_trainers_own() -> None:
    """Both passes are as far from float32 as from each other: a plain forward is the yardstick."""
    case, rng = healthy(8), np.random.default_rng(8)
    noisy = [np.minimum(case.right + 0.1 * rng.standard_normal(len(case.right)), -1e-6)
             for _ in range(2)]  # fmt: skip
    again = replace(case.trainer, name="fsdp:repeated", logprobs=noisy[1])
    case = changed(replace(case, others={**case.others, again.name: again}), None, noisy[0])
    leading = first(case)
    assert (leading.id, leading.side, leading.status) == ("nondeterminism", "trainer", "confirmed")


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_a_pack_that_see_each_other_are_named(seed: int) -> None:
    (only,) = causes(leaking(seed, 1200)).ranked
    assert (only.id, only.side) == ("packing-leak", "trainer")
    # Rows that agree at places of no order are no packs.
    case, right = healthy(seed), healthy(seed).right.copy()
    for number, row in enumerate(case.rows):
        if number not in (0, 3, 40, 44, 90):
            right[row] -= np.random.default_rng(number).exponential(1.0, row.stop - row.start)
    assert "packing-leak" not in {cause.id for cause in causes(changed(case, None, right)).ranked}


def test_a_decode_that_flipped_in_a_few_prompts_is_no_path_of_its_own() -> None:
    case = healthy(6)
    for rows, named in ((case.prompt < 4, []), (case.prompt % 2 == 0, ["decode-vs-prefill"])):
        rng = np.random.default_rng(6)
        left = case.left + rows * rng.uniform(-0.4, 0.4, len(case.left))
        prefill = Scoring("vllm:prefill", case.engine.token_ids, case.right.copy(), {})
        others = {**case.others, "vllm:prefill": prefill}
        moved = changed(replace(case, others=others), np.minimum(left, -1e-6))
        ids = [cause.id for cause in causes(moved).ranked]
        assert [id for id in ids if id == "decode-vs-prefill"] == named


def test_other_weights_are_not_named_that_the_float32_passes_exclude() -> None:
    """The engine started in float32 agrees with the reference: its weights are no cause."""
    case = healthy(7)
    assert case.reference is not None
    blind = changed(case, np.minimum(case.reference + 4 * (case.left - case.reference), -1e-6))
    assert [(c.id, c.side) for c in causes(blind).ranked] == [("weights-differ", "engine")]
    exact = Scoring("vllm:fp32", case.engine.token_ids, case.reference, {})
    seen = replace(blind, others={**blind.others, exact.name: exact})
    assert [(c.id, c.side) for c in causes(seen).ranked] == [("side-off", "engine")]
