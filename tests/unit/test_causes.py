"""Causes: named where a fault is planted, silent on healthy pairs, and what carries them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch.analysis.catalogue import catalogue
from mismatch.analysis.cause_results import Causes, Evidence
from mismatch.analysis.diagnosis.case import Case, Repair
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look, detectors
from mismatch.analysis.diagnosis.ranking import diagnose
from mismatch.codec import from_json, to_json
from mismatch.pipeline.build import build_report
from mismatch.reports.sections.causes import section
from mismatch.types import NotTested
from tests import drawn_pair as drawn
from tests.conftest import grid
from tests.diagnosed import causes, first, healthy
from tests.made_run import make_run, spec
from tests.reports_fixture import make_report
from tools import cause_page

BLOCKS = 120


# ---------------------------------------------------------------- named, at three strengths


@pytest.mark.parametrize("seed", grid([0, 1], 0))
@pytest.mark.parametrize(
    ("plant", "strengths", "cause", "side"),
    [
        (drawn.raw_logprobs, (0.6, 0.8, 0.9), "temperature-semantics", "engine"),
        (drawn.top_k, (2, 4, 8), "sampling-truncation", "engine"),
        (drawn.shifted, (1, -3, 30), "misalignment", None),
        (drawn.swapped_rows, (4, 16, 128), "row-pairing", None),
        (drawn.appended_ends, (0.02, 0.1, 1.0), "appended-eos", "engine"),
        (drawn.onset, (5, 10, 20), "onset", "engine"),
        (drawn.first_tokens, (50, 100, 200), "side-off", "trainer"),
        (drawn.other_weights, (3, 5, 10), "side-off", "trainer"),
        (drawn.other_function, (1.0, 1.5, 2.0), "side-off", "trainer"),
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


def capped_at(temperature: float, cap: float) -> Case:
    """The engine caps its logits, and both sides divide by the temperature."""
    made = drawn.draw(0)
    made.temperature, plain = temperature, made.trainer
    made.engine = cap * np.tanh(made.engine / cap)
    made.engine, made.trainer, made.logits = (
        each / temperature for each in (made.engine, made.trainer, made.logits)
    )
    made.sampled = drawn.log_law(made.engine)
    case = made.case()
    raw = drawn.log_law(plain)[np.arange(len(plain)), case.engine.token_ids]
    return replace(case, trainer=replace(case.trainer, extra={"logprobs_untempered": raw}))


def test_a_temperature_that_both_sides_apply_is_no_cause() -> None:
    """The trainer at T = 1 is farther off still, so that a softcap's fit is not the temperature."""
    leading = first(capped_at(2.0, 5))
    assert (leading.id, leading.side) == ("side-off", "either")
    leading = first(capped_at(1.3, 3))
    assert (leading.id, leading.side) == ("temperature-semantics", "either")
    assert leading.alike[0] == "logit-softcap"


def test_certain_tokens_are_no_padding_and_no_other_row() -> None:
    """Rows of near-certain tokens are near to each other, and 0 is what such a law gives."""
    made = drawn.draw(1, prompts=32, sharpness=24.0)
    confident = np.exp(drawn.log_law(made.logits)).max(axis=1, keepdims=True) ** 3
    odd = made.rng.standard_normal(made.logits.shape)
    made.trainer = made.trainer + 6.0 * confident * odd
    assert {cause.id for cause in causes(made.case()).ranked} == {"side-off"}


@pytest.mark.parametrize("number", [16, 40])
def test_few_zeros_among_those_of_a_sharp_law_are_padding(number: int) -> None:
    case = drawn.draw(1, prompts=32, sharpness=24.0).case()
    unsure = np.flatnonzero(case.kept & (case.left < np.log(0.9)))[::3][:number]
    assert len(unsure) == number < 0.5 * (case.right == 0).sum()
    zeroed = case.right.copy()
    zeroed[unsure] = 0.0
    trainer = replace(case.trainer, logprobs=zeroed)
    case = Case.of(case.rollout, case.engine, trainer, case.others)
    assert (first(case).id, first(case).side) == ("appended-eos", "trainer")


def test_a_law_that_was_cut_to_one_token_is_no_padding() -> None:
    case = drawn.top_k(0, 1)
    sampling = replace(case.rollout.sampling, top_k=1)
    kept = replace(case.trainer, extra={"kept_mass": np.exp(case.right)})
    cut = replace(case, rollout=replace(case.rollout, sampling=sampling), trainer=kept)
    assert first(case).id == "appended-eos"  # nothing says that it was cut
    assert "appended-eos" not in {cause.id for cause in causes(cut).ranked}


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
    onset = value(drawn.onset(0, 20, at=43), "position of the onset")
    assert onset == pytest.approx(43, abs=2)
    fitted = value(
        drawn.raw_logprobs(0, 0.8), "temperature of the trainer over that of the engine, fitted"
    )
    assert fitted == pytest.approx(0.8, abs=0.05)


def test_zeros_within_rows_that_carry_nothing_are_no_appended_tokens() -> None:
    """An engine whose distribution is sharper rounds to 0 where the other side is not certain."""
    case = healthy(0, rounding=0.5)
    last = {row.stop - 1 for row in case.rows}
    unsure = [n for n in np.flatnonzero(case.right < np.log(0.9)).tolist() if n not in last]
    near = [n for n in unsure if case.left[n] > np.log(0.5)][:5]
    zeroed = case.left.copy()
    zeroed[near] = 0.0
    case = Case.of(case.rollout, replace(case.engine, logprobs=zeroed), case.trainer, {})
    assert near
    assert "appended-eos" not in {cause.id for cause in causes(case).ranked}


# ---------------------------------------------------------------- two at once


@pytest.mark.parametrize("times", [2.2, 3, 6, 10])
def test_raw_logprobs_do_not_hide_a_noisy_engine(times: float) -> None:
    result = causes(drawn.raw_logprobs_and_noise(0, 0.6, times))
    assert [(cause.id, cause.side, cause.status) for cause in result.ranked] == [
        ("temperature-semantics", "engine", "confirmed"),
        ("side-off", "either", "suspected"),
    ]


def test_a_shift_does_not_hide_other_weights() -> None:
    plain, moved = drawn.other_weights(2, 10), drawn.shifted(2, 1)
    edges = np.cumsum([row.stop - row.start for row in plain.rows])[:-1]
    right = [np.roll(row, -1) for row in np.split(plain.right, edges)]
    case = replace(plain, right=np.concatenate(right))
    assert [cause.id for cause in causes(case).ranked] == ["misalignment", "side-off"]
    assert [cause.id for cause in causes(moved).ranked] == ["misalignment"]


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
    apart = replace(case.rollout, prompt_index=np.arange(case.rollout.n_sequences))
    ids = apart.token_ids.copy()  # a prompt each: no two samples of one
    ids[apart.offsets[:-1]] = 1000 + np.arange(apart.n_sequences)
    apart = replace(apart, token_ids=ids)
    trainer = replace(case.trainer, entropy=None)
    result = causes(replace(case, rollout=apart, trainer=trainer, others={}))
    missing = {entry.what for entry in result.not_tested}
    assert {"temperature", "distance from float32", "routed experts"} <= missing
    assert all(entry.reason for entry in result.not_tested)
    looked = {entry.detector for entry in result.ruled_out}
    assert not looked & {"temperature", "far-side", "routes", "weights"}


def test_a_few_tokens_end_in_no_cause_and_no_error() -> None:
    for prompts in (1, 2):
        result = causes(healthy(0, prompts=prompts, length=2))
        assert result.ranked == ()


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
            finding = Finding("temperature-semantics", "engine", effect, evidence, repair=repair)
            return Look(evidence, (finding,))

        return Detector("half", "semantics", ("temperature-semantics",), find, order=20)

    rest = [detector for detector in detectors() if detector.order >= 50]
    case = drawn.other_weights(0, 10)
    assert "side-off" in {cause.id for cause in diagnose(case, [half(True), *rest]).ranked}
    assert len(diagnose(case, [half(False), *rest]).ranked) == 1


# ---------------------------------------------------------------- in a report


def test_it_is_an_analysis_of_every_check(tmp_path: Path) -> None:
    report, _ = build_report(make_run(tmp_path / "run"), spec())
    result = report.result("causes")
    assert isinstance(result, Causes)
    document = json.loads(json.dumps(to_json(result), allow_nan=False))
    assert to_json(from_json(Causes, document)) == document


def test_the_section_puts_the_leading_cause_first_with_one_action_each() -> None:
    result = causes(drawn.raw_logprobs_and_noise(0, 0.6, 6))
    shown = section(result, make_report())
    (every,) = [part.tables[0] for part in shown.parts if part.id == "causes-ranked"]
    ids = [row[1].value for row in every.rows]  # type: ignore[union-attr]
    assert ids == [cause.id for cause in result.ranked]
    for sentence, cause in zip(shown.sentences, result.ranked, strict=True):
        assert sentence.count(catalogue()[cause.id].mend.rstrip(".")) == 1
    assert {part.id for part in shown.parts} >= {"causes-evidence", "causes-ruled-out"}
    assert section(causes(healthy(0)), make_report()).tables == ()


def test_every_cause_has_its_picture_or_a_reason_for_none() -> None:
    gallery = Path(__file__).parents[2] / "docs" / "images" / "gallery"
    drawn = {path.stem for path in gallery.glob("*.svg")} - {"healthy"}
    assert drawn == {id for id, entry in catalogue().items() if not entry.picture}


def test_every_cause_has_a_page_with_every_framework() -> None:
    pages = cause_page.pages()
    assert pages.keys() == {f"reference/causes/{id}.md" for id in catalogue()}
    assert all(f"(causes/{id}.md)" in cause_page.tables() for id in catalogue())
    unread = {name for name, text in pages.items() if "not read at the source" in text}
    assert unread == set()
    named = {name for entry in catalogue().values() for name in entry.frameworks}
    assert named == set(cause_page.EVERYWHERE)
