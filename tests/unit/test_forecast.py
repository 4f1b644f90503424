"""The length forecast knows the answer of an AR(1), says how far it reaches, and when to doubt."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.cli.main import app
from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.autocovariance import below, capped_ess
from mismatch.metrics.forecast import Forecast, grid, length_forecast
from mismatch.pipeline.document import report_from_json, report_to_json
from mismatch.reports.formatting import percent, times, wording
from mismatch.reports.sections import corrections as shown
from tests.conftest import grid as cases
from tests.made_run import make_run
from tests.reports_fixture import make_report

PROMPTS, SAMPLES, TOKENS, SD = 64, 4, 128, 0.01


def ar1(
    seed: int, phi: float, tokens: int = TOKENS, sequences: int = PROMPTS * SAMPLES
) -> np.ndarray:
    """Stationary AR(1) of standard deviation SD, mean -SD²/2, [sequences, tokens]."""
    rng = np.random.default_rng(seed)
    noise = SD * math.sqrt(1 - phi**2) * rng.normal(size=(sequences, tokens))
    deltas = np.empty((sequences, tokens))
    deltas[:, 0] = SD * rng.normal(size=sequences)
    for t in range(1, tokens):
        deltas[:, t] = phi * deltas[:, t - 1] + noise[:, t]
    return deltas - SD**2 / 2


def variance(length: int, phi: float) -> float:
    """Of the sum of ``length`` terms of that AR(1)."""
    own = length * (1 + phi) / (1 - phi)
    return SD**2 * (own - 2 * phi * (1 - phi**length) / (1 - phi) ** 2)


def forecast(delta: np.ndarray, target: int = 16_384, samples: int = SAMPLES) -> Forecast:
    sequences, tokens = delta.shape
    return length_forecast(
        delta.ravel(),
        sequence=np.repeat(np.arange(sequences), tokens),
        prompt=np.arange(sequences) // samples,
        target=target,
    )


@pytest.mark.slow
@pytest.mark.parametrize("phi", cases([-0.4, 0.0, 0.8], 0.8))
def test_the_spread_of_an_ar1_is_known_at_every_length(phi: float) -> None:
    held = near = 0
    for seed in range(12):
        got = forecast(ar1(seed, phi))
        for row in got.rows[-1:]:
            truth = math.sqrt(variance(row.length, phi))
            assert row.spread.low is not None
            assert row.spread.high is not None
            held += row.spread.low <= truth <= row.spread.high
            near += abs(row.spread.value / truth - 1) < 0.1
    assert held >= 9  # of 12, at 95 %
    assert near >= 11


def test_effective_sizes_and_rejection_follow_from_the_spread() -> None:
    got = forecast(ar1(0, 0.3), target=8192)
    last = got.rows[-1]
    assert (last.length, got.reach) == (8192, 64.0)
    assert last.ess_untruncated.value == pytest.approx(math.exp(-(last.spread.value**2)))
    assert last.ess_untruncated.low <= last.ess_untruncated.value <= last.ess_untruncated.high
    # By simulation, of the mean and variance that the forecast found.
    draw = np.random.default_rng(0).normal(got.mean.value * 8192, last.spread.value, 400_000)
    weight = np.exp(np.minimum(draw, math.log(2)))
    assert last.ess.value == pytest.approx(weight.mean() ** 2 / (weight**2).mean(), abs=3e-3)
    assert last.truncated.value == pytest.approx((draw > math.log(2)).mean(), abs=3e-3)
    assert last.outside.value == pytest.approx((np.abs(draw) > math.log(2)).mean(), abs=3e-3)
    kept = (draw / 8192 > math.log(0.999)) & (draw / 8192 < math.log(1.001))
    assert last.geo_rejected.value == pytest.approx(1 - kept.mean(), abs=3e-3)


def test_within_the_data_it_agrees_with_the_metrics_of_a_run() -> None:
    delta = 5 * ar1(1, 0.5, sequences=4000)
    got = forecast(delta, target=TOKENS)
    (row,) = got.rows
    sequence = np.repeat(np.arange(4000), TOKENS)
    assert got.reach == 1.0
    assert row.ess.value == pytest.approx(METRICS["ess_seq"](delta.ravel(), sequence), abs=0.02)
    spread = METRICS["seq_logratio_std"](delta.ravel(), sequence)
    assert row.spread.value == pytest.approx(spread, rel=0.03)


def test_capped_ess_in_closed_form() -> None:
    rng = np.random.default_rng(0)
    for mean, var in ((0.0, 0.5), (-2.0, 4.0), (3.0, 1.0)):
        weight = np.exp(np.minimum(rng.normal(mean, math.sqrt(var), 500_000), math.log(2)))
        ess = float(capped_ess(np.array(mean), np.array(var)))
        assert ess == pytest.approx(weight.mean() ** 2 / (weight**2).mean(), rel=0.02)
    for edge in (-3.0, 0.0, 0.7, 40.0):
        exact = 0.5 * math.erfc(-edge / math.sqrt(2 * 4.0))
        assert float(below(edge, np.array(0.0), np.array(4.0))) == pytest.approx(exact, abs=1e-7)
    assert math.isnan(float(below(0.0, np.array(0.0), np.array(0.0))))


@pytest.mark.parametrize("variance", [1.0, 27.0, 300.0, 6200.0, 1e4])
@pytest.mark.parametrize("drift", [-0.5, -0.4, 0.0])
def test_capped_ess_is_right_where_hardly_anything_is_left(variance, drift) -> None:
    """Against sums of logarithms over a grid: values down to 1e-1000 come out as what they are."""
    mean = drift * variance
    away = np.linspace(-3 * variance - 60, 3 * variance + 60, 400_001)
    size = -((away - mean) ** 2) / (2 * variance)
    log_weight = np.minimum(away, math.log(2))
    moments = [np.logaddexp.reduce(size + k * log_weight) for k in (0, 1, 2)]
    exact = 2 * moments[1] - moments[2] - moments[0]
    ess = float(capped_ess(np.array(mean), np.array(variance)))
    assert ess == pytest.approx(math.exp(exact), rel=1e-3, abs=1e-300)


def test_effective_shares_never_grow_with_the_length() -> None:
    for seed, offset in enumerate((-0.3, -0.02, 0.0, 0.05)):
        got = forecast(ar1(seed, 0.5) * 20 + offset)
        for name in ("ess", "ess_untruncated"):
            values = [getattr(row, name) for row in got.rows]
            for part in ("value", "low", "high"):
                ends = np.array([getattr(value, part) for value in values])
                assert (np.diff(ends) <= 0).all(), (name, part)


@pytest.mark.slow
def test_intervals_reach_to_a_common_part_that_is_too_small_to_be_seen() -> None:
    """Whole responses are off by 2.5e-4 a token: nothing at 128 tokens, everything at 16,384."""
    size, common, covered = 0.005, 2.5e-4, 0
    truth = math.sqrt(16_384 * size**2 + (common * 16_384) ** 2)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        delta = size * rng.normal(size=(PROMPTS * SAMPLES, TOKENS))
        delta += common * rng.normal(size=(PROMPTS * SAMPLES, 1)) - 0.5 * size**2
        last = forecast(delta, target=16_384).rows[-1]
        covered += last.spread.low <= truth <= last.spread.high
        assert last.ess_untruncated.low <= 0.05
    assert covered >= 10


def test_a_sample_never_shows_less_than_one_sequence() -> None:
    got = forecast(20 * ar1(0, 0.8))
    floor = 1 / (PROMPTS * SAMPLES)
    assert got.floor == floor
    assert got.rows[-1].ess_untruncated.value == floor
    assert got.rows[-1].ess_untruncated.low == floor
    assert f"1/{PROMPTS * SAMPLES} ({percent(floor)})" in " ".join(shown.forecast_sentences(got))


def test_it_is_checked_on_positions_that_the_fit_did_not_see() -> None:
    got = forecast(ar1(0, 0.5))
    assert got.check is not None
    assert (got.check.fitted, got.check.length) == (64, 128)
    assert got.check.error.low < 0.05
    assert got.check.error.high > -0.05
    assert "check-failed" not in got.flags
    assert got.check.predicted == pytest.approx(got.check.observed, rel=0.15)
    assert got.observed[-1] == (128, pytest.approx(got.check.observed))


def test_late_positions_that_are_worse_fail_the_check() -> None:
    delta = ar1(0, 0.2)
    delta[:, TOKENS // 2 :] *= 3.0
    got = forecast(delta)
    assert "check-failed" in got.flags
    assert got.check.error.high < -0.3
    assert f"Caution: {wording('cautions')['check-failed']}." in shown.forecast_sentences(got)


def test_what_whole_responses_share_grows_with_the_length_itself() -> None:
    """A bias per response of SD/2: at 1,024 tokens it is 16 times the tokens' own spread."""
    bias = 0.5 * SD * np.random.default_rng(3).normal(size=(PROMPTS * SAMPLES, 1))
    got = forecast(ar1(0, 0.0) + bias, target=1024)
    truth = math.sqrt(1024 * SD**2 + (1024 * 0.5 * SD) ** 2)
    row = got.rows[-1]
    assert "persistent" in got.flags
    assert got.persistent == pytest.approx((0.5 * SD) ** 2, rel=0.3)
    assert row.spread.low <= truth <= row.spread.high
    alone = [forecast(ar1(seed, 0.0), target=1024) for seed in range(6)]
    assert sum("persistent" in forecast.flags for forecast in alone) <= 1


def test_heavy_tails_are_flagged_and_light_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    heavy = SD * rng.standard_t(2.2, (PROMPTS * SAMPLES, TOKENS))
    lone = ar1(0, 0.0)
    lone[3, 7] = 2.0  # one token with more variance than all others together
    for delta in (heavy, lone):
        got = forecast(delta)
        assert "heavy-tail" in got.flags
        assert f"Caution: {wording('cautions')['heavy-tail']}." in shown.forecast_sentences(got)
    light = forecast(ar1(0, 0.0))
    assert "heavy-tail" not in light.flags
    assert light.tail_index > forecast(heavy).tail_index


def test_the_reach_beyond_the_data_is_said() -> None:
    far, near = forecast(ar1(0, 0.0)), forecast(ar1(0, 0.0), target=200)
    assert "beyond-check" in far.flags
    assert "beyond-check" not in near.flags
    assert far.reach == pytest.approx(128)
    assert times(128) in " ".join(shown.forecast_sentences(far))
    inside = forecast(ar1(0, 0.0), target=64)
    assert inside.reach < 1
    assert "2×" not in " ".join(shown.forecast_sentences(inside))  # how far it is validated


@pytest.mark.parametrize(
    ("shape", "samples"),
    [((256, 20), 4), ((20, 500), 4), ((256, 500), 64)],
    ids=["tokens", "sequences", "prompts"],
)
def test_too_little_is_not_enough(shape: tuple[int, int], samples: int) -> None:
    got = forecast(SD * np.random.default_rng(0).normal(size=shape), samples=samples)
    assert got.rows == ()
    assert got.missing
    report = make_report().with_analyses(forecast=got)
    part = shown.forecast(got, report)
    assert part.sentences[0] == f"No forecast: {got.missing}."
    assert part.tables == part.figures == ()
    assert report_from_json(report_to_json(report)).result("forecast") == got


def test_identical_sides_need_no_forecast() -> None:
    assert "0 everywhere" in forecast(np.zeros((256, 100))).missing


def test_long_responses_alone_do_not_decide_how_far_the_data_reach() -> None:
    """One response of 4,000 tokens among short ones: 32 have to be as long."""
    lengths = np.r_[np.full(255, 100), 4000]
    got = length_forecast(
        SD * np.random.default_rng(0).normal(size=lengths.sum()),
        sequence=np.repeat(np.arange(256), lengths),
        prompt=np.arange(256) // 4,
    )
    assert got.longest == 100


def test_grid_doubles_up_to_the_target() -> None:
    assert grid(100, 900) == [100, 200, 400, 800, 900]
    assert grid(128, 512) == [128, 256, 512]
    assert grid(128, 50) == [50]


def test_bad_input_is_named() -> None:
    sequence, prompt = np.repeat(np.arange(4), 3), np.arange(4)
    with pytest.raises(MismatchError, match=r"\b2 .*finite"):
        length_forecast(np.r_[np.nan, np.inf, np.zeros(10)], sequence=sequence, prompt=prompt)
    with pytest.raises(MismatchError, match="length of 0"):
        length_forecast(np.zeros(12), sequence=sequence, prompt=prompt, target=0)
    with pytest.raises(MismatchError, match="in order"):
        length_forecast(np.zeros(12), sequence=sequence[::-1], prompt=prompt)
    with pytest.raises(MismatchError, match=r"\b5 .*\b12 "):
        length_forecast(np.zeros(5), sequence=sequence, prompt=prompt)
    with pytest.raises(EmptyComparison):
        length_forecast(np.zeros(0), sequence=sequence[:0], prompt=prompt)


# ------------------------------------------------------------ in a report


def test_budget_and_forecast_survive_the_json(tmp_path: Path) -> None:
    report = make_report()
    document = json.loads(json.dumps(report_to_json(report), allow_nan=False))
    back = report_from_json(document)
    assert (back.result("budget"), back.result("forecast")) == (
        report.result("budget"),
        report.result("forecast"),
    )
    del document["budget"], document["forecast"]
    old = report_from_json(document)
    assert (old.result("budget"), old.result("forecast")) == (None, None)
    assert "budget" not in report_to_json(old)


def test_the_pictures_show_forecast_and_data() -> None:
    report = make_report()
    (kept,) = (f.draw() for f in shown.forecast(report.result("forecast"), report).figures)
    assert "geometric bounds" in kept
    assert "4,096" in kept


def test_the_flag_sets_the_length_of_an_existing_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")

    def forecast() -> Any:
        return json.loads((run / "report.json").read_text())["forecast"]

    assert app(["compare", str(run)], standalone_mode=False) == 1
    assert forecast()["target"] == 16_384
    assert app(["compare", str(run), "--forecast-length", "512"], standalone_mode=False) == 1
    assert forecast()["target"] == 512
    assert forecast()["missing"] in " ".join(capsys.readouterr().out.split())
    with pytest.raises(MismatchError, match="--forecast-length"):
        app(["compare", str(run), "--forecast-length", "0"], standalone_mode=False)
