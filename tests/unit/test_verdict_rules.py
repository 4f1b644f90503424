"""What was healthy and was not: broken runs that an earlier verdict passed, each by the real path.

Every run here is made of invented numbers with a known fault, written as the stages leave them,
and judged by ``build_report``. The cases of the review of the first verdict, and their tests (here
or in test_verdict_checks unless a file is named):

===========================================  ====================================================
case                                         test
===========================================  ====================================================
one token; 30 of 32 sequences empty          one_token_is_not_healthy, sequences_without_action…
no event in 192 tokens                       no_event_in_few_tokens…, the_bound_on_unseen_events…
greedy sampling                              greedy_tokens_are_nothing…, greedy_sampling_is_refused…
overflow of the ratio                        overflow_of_the_ratio_is_named
bias of 1 % on every token                   a_bias_of_one_percent…, a_warning_of_a_check_raises…
1 parameter of 300; other files' names;      checks_of_nothing_do_not_pass
  all responses truncated
experts swapped, transposed, rows permuted,  test_training_digest: moved_values_show
  gate and up de-interleaved (dig)
all layers permuted alike                    test_square: a_gap_names_the_engine_only_where…
one rank where two were asked for            fewer_ranks_than_asked_for_are_said
levels of the user's not applied (no         a_level_that_cannot_be_applied_is_an_error
  routing; another column; no exact KL)
quantile without an interval; NaN ends       a_quantile_without…, ends_that_are_no_numbers…
infinite exact KL                            an_infinite_exact_kl_is_the_worst_value
stored MXFP4 dequantised by the trainer      stored_mxfp4_that_the_trainer_dequantised…
server that does not say its dtype           a_server_that_does_not_say_its_dtype…
published faults and sound runs              published_runs_pass_where_they_were_sound
routes at random, shifted; replayed          routes_are_held_against_chance…, replayed_routes…
the same experts in every row                test_routing_store: refused as a corrupt capture
NaN in the gradient pass                     a_pass_with_nan_fails_the_run
regrouped pass off by 1 nat                  a_trainer_that_contradicts_itself…, the_worst_of…
stale report                                 a_report_older_than_its_scorings_is_refused
second engine off                            test_square: a_second_engine_is_held_against…
spike or one odd prompt                      test_metrics_inference: one_event_in_one_prompt…;
                                             test_levels: more_prompts_are_no_advice…
coverage of means, quantiles, shares         test_coverage, benchmarks/coverage.py
fix of 0.2 %; ranked by luck; null fixes     test_fixes_rank: half_a_percent…, lower_by_luck…,
                                             by_chance_a_false_claim…
few prompts with a spike in an upgrade (ag)  test_against: a_k3_that_grew_manyfold…
library: uint8, bf16, gradients, empty       test_metrics_inputs
===========================================  ====================================================
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.levels import column_for, exit_code, judge_one, verdict
from mismatch.analysis.thresholds import Level
from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.pipeline.build import build_report
from mismatch.reports.files import require_fresh, write_report
from mismatch.run import store
from mismatch.types import Check, Estimate, Sampling, Scoring
from tests.invented_run import facts, likely, noise, passes, report_of, sampled, saved, serious
from tests.made_run import spec


def test_a_sound_run_is_healthy(tmp_path):
    rollout = sampled()
    left = likely(rollout)
    right = left + noise(rollout, 0.005)
    others = {"fsdp:grad": right + noise(rollout, 0.004, 3)}
    report = report_of(saved(tmp_path / "a", rollout, left, right, others))
    assert passes(report)
    assert not serious(report)


# ---------------------------------------------------------------- every pass is judged


@pytest.mark.parametrize("name", ["fsdp:grad", "fsdp:regrouped", "fsdp:repeated", "reference:fp32"])
def test_a_pass_with_nan_fails_the_run(name, tmp_path):
    rollout = sampled()
    left = likely(rollout)
    broken = left.copy()
    broken[:50] = np.nan
    run = saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.005), {name: broken})
    report = report_of(run)
    assert report.verdict.status == "broken"
    assert "passes-finite" in serious(report)
    assert name in next(check.detail for check in report.checks if check.id == "passes-finite")


def test_nan_under_settings_that_the_user_added_warns(tmp_path):
    rollout = sampled()
    left = likely(rollout)
    broken = np.full(rollout.n_actions, np.nan)
    report = report_of(saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.005),
                             {"my-fp16": broken}))  # fmt: skip
    assert not passes(report)


@pytest.mark.parametrize(
    ("size", "status"),
    [(1.0, "failed"), (0.15, "failed"), (0.1, "warning"), (0.066, "warning"), (0.007, "warning"),
     (0.004, "passed")],
)  # fmt: skip
def test_a_trainer_that_contradicts_itself_is_not_healthy(size, status, tmp_path):
    """At 0.007 the two passes are 1.4 times as far apart as engine and trainer."""
    rollout = sampled()
    left = likely(rollout)
    right = left + noise(rollout, 0.005)
    other = {"fsdp:regrouped": right + noise(rollout, size, 9)}
    report = report_of(saved(tmp_path / "a", rollout, left, right, other))
    statuses = {check.id: check.status for check in report.checks}
    assert statuses["trainer-self-agreement"] == status
    assert passes(report) is (status == "passed" and not report.result("causes").ranked)


@pytest.mark.parametrize(
    ("name", "status"),
    [("fsdp:regrouped", "passed"), ("fsdp:repeated", "failed"), ("fsdp:alone", "failed")],
)
def test_only_other_batches_are_judged_beside_a_large_headline(name, status, tmp_path):
    """A packing leak or dropout moves the headline by as much as the pass that would show it."""
    rollout = sampled()
    left = likely(rollout)
    right = left + noise(rollout, 0.25)
    other = {name: right + noise(rollout, 0.2, 9)}
    report = report_of(saved(tmp_path / "a", rollout, left, right, other))
    found = {check.id: check.status for check in report.checks}
    assert found["trainer-self-agreement"] == status


def test_the_worst_of_the_trainers_passes_counts(tmp_path):
    """The pass with most clipping is sound; another is off on every token, within PPO's range."""
    rollout = sampled()
    left = likely(rollout)
    right = left + noise(rollout, 0.005)
    spiked, biased = right.copy(), right + 0.15
    spiked[:5] += 0.3
    status = {}
    for size, passed in (("far", biased), ("near", right + 0.05), ("same", right)):
        run = saved(tmp_path / size, rollout, left, right,
                      {"fsdp:repeated": spiked, "fsdp:grad": passed})  # fmt: skip
        check = {c.id: c for c in report_of(run).checks}["trainer-self-agreement"]
        status[size] = check.status
        assert check.status == "passed" or check.detail.startswith("fsdp:grad")
    assert status == {"far": "failed", "near": "warning", "same": "passed"}


def test_noise_injected_into_the_second_pass_is_not_held_against_the_trainer(tmp_path):
    rollout = sampled()
    left = likely(rollout)
    run = saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.005))
    ids = rollout.token_ids[rollout.actions]
    planted = Scoring("fsdp:new", ids, left + noise(rollout, 0.5, 4),
                      facts("train", injected={"router-noise": 0.1, "seed": 0}))  # fmt: skip
    store.save_scoring(run, planted, rollout, made_by=spec().train)
    assert "trainer-self-agreement" not in serious(report_of(run))


# ---------------------------------------------------------------- too little data


def test_one_token_is_not_healthy(tmp_path):
    rollout = sampled(prompts=1, samples=1, response=1)
    left = likely(rollout)
    report = report_of(saved(tmp_path / "a", rollout, left, left + 0.001))
    assert not passes(report)
    assert "enough-data" in serious(report)
    assert all(item.status != "healthy" for item in report.verdict.judgements)


def test_sequences_without_action_tokens_are_counted(tmp_path):
    rollout = sampled(prompts=16, samples=2, response=40)
    mask = rollout.action_mask.copy()
    mask[rollout.offsets[2] :] = False
    rollout = replace(rollout, action_mask=mask)
    left = likely(rollout)
    report = report_of(saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.005)))
    assert not passes(report)
    assert "enough-data" in serious(report)
    few = replace(sampled(), action_mask=sampled().action_mask.copy())
    few.action_mask[few.offsets[-2] :] = False  # one of 256
    left = likely(few)
    run = saved(tmp_path / "b", few, left, left + noise(few, 0.005))
    assert "1 of 256" in next(c.detail for c in report_of(run).checks if c.id == "enough-data")


def test_no_event_in_few_tokens_is_no_proof(tmp_path):
    rollout = sampled(prompts=16, samples=1, response=20)
    left = likely(rollout)
    report = report_of(saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.005)))
    share = report.comparisons[0].metrics["ratio_outside_2"]
    assert (share.value, share.low) == (0.0, 0.0)
    assert share.high >= 3 / 320 * 0.99
    judged = {item.metric: item for item in report.verdict.judgements}["ratio_outside_2"]
    assert judged.status != "healthy"
    assert judged.inconclusive


@pytest.mark.parametrize(("prompts", "least"), [(4, 0.95), (16, 0.95)])
def test_the_bound_on_unseen_events_covers(prompts, least):
    """Events at a rate that mostly shows none; heavier in some prompts than in others."""
    n, rate, covered, unseen = prompts * 256, 3e-4, 0, 0
    sequence, prompt = np.repeat(np.arange(prompts * 4), 64), np.repeat(np.arange(prompts), 4)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        delta = 0.02 * np.repeat(np.exp(rng.normal(0, 0.4, prompts)), 256) * rng.normal(size=n)
        delta[rng.random(n) < rate] = 1.0
        estimate = Estimator(sequence, prompt, seed=0, resamples=50).one(
            METRICS["ratio_outside_2"], {"delta": delta}
        )
        if estimate.value == 0.0:
            unseen += 1
            covered += estimate.high >= rate
    assert unseen > 50
    assert covered / unseen >= least


# ---------------------------------------------------------------- warnings, columns, stale reports


def test_a_bias_of_one_percent_on_every_token_is_not_healthy(tmp_path):
    rollout = sampled()
    left = likely(rollout)
    run = saved(tmp_path / "a", rollout, left, left - 0.0095 + noise(rollout, 0.001),
                  engine={"logprobs_truncated": False})  # fmt: skip
    report = report_of(run)
    assert report.verdict.status == "broken"  # a constant is what a law cut on one side leaves
    assert {"importance-ratio", "truncation"} <= set(serious(report))
    assert exit_code(report.verdict) == 1


def test_a_warning_of_a_check_raises_the_verdict():
    judged = judge_one("k3_kl", Estimate(1e-4, 9e-5, 1.1e-4, 9999, 256, 64), Level(1e-3, 1e-2, ""))
    warned = Check("alignment", "warning", "weak")
    assert verdict([judged], [], "bf16 dense").status == "healthy"
    assert verdict([judged], [warned], "bf16 dense").status == "tolerable"


def test_stored_mxfp4_that_the_trainer_dequantised_is_judged_by_its_computation():
    engine = {"dtype": "bf16", "quantization": "mxfp4", "weights_form": "as-stored", "moe": True}
    trainer = {"dtype": "bf16", "weights_form": "as-stored", "moe": True}
    assert column_for(engine, trainer) == "bf16 MoE"
    assert column_for(engine | {"weights_form": "mxfp4"}, trainer) == "quantised"
    assert column_for(engine | {"quantization": "fp8"}, trainer) == "quantised"
    assert column_for(engine | {"kv_cache_dtype": "fp8"}, trainer) == "quantised"
    assert column_for(engine | {"quantization": False}, trainer) == "bf16 MoE"


@pytest.mark.parametrize("trainer", ["fp32", "bf16"])
def test_a_server_that_does_not_say_its_dtype_is_not_judged(trainer, tmp_path):
    assert column_for({"engine": "server", "dtype": None}, {"dtype": trainer}) is None
    rollout = sampled(prompts=16)
    left = likely(rollout)
    run = saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.005), None,
                  {"dtype": None}, {"dtype": trainer})  # fmt: skip
    judged = report_of(run).verdict
    assert (judged.status, judged.judgements, judged.levels) == ("inconclusive", (), "not judged")


def test_greedy_tokens_are_nothing_to_judge(tmp_path):
    rollout = sampled(prompts=16, sampling=Sampling(temperature=0.0, max_tokens=60))
    left = likely(rollout)
    run = saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.005))
    with pytest.raises(MismatchError, match="--temperature 0"):
        report_of(run)


def test_overflow_of_the_ratio_is_named(tmp_path):
    rollout = sampled(prompts=16)
    left = likely(rollout)
    right = left + noise(rollout, 0.005)
    left[0], right[0] = -900.0, -0.5
    report = report_of(saved(tmp_path / "a", rollout, left, right))
    check = next(c for c in report.checks if c.id == "importance-ratio")
    assert check.status == "failed"
    assert "prompts" not in check.detail


@pytest.mark.slow
def test_a_report_older_than_its_scorings_is_refused(tmp_path):
    rollout = sampled(prompts=16)
    left = likely(rollout)
    run = saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.005))
    write_report(run, *build_report(run, spec()))
    require_fresh(run)
    ids = rollout.token_ids[rollout.actions]
    again = Scoring("fsdp", ids, left + noise(rollout, 0.5), facts("train"))
    store.save_scoring(run, again, rollout, made_by=spec().train)
    with pytest.raises(MismatchError, match=r"fsdp\.parquet"):
        require_fresh(run)
    write_report(run, *build_report(run, spec()))
    require_fresh(run)


def test_greedy_sampling_is_refused_before_an_engine_starts():
    from mismatch.pipeline.preflight import preflight_rollout

    greedy = replace(spec().rollout, sampling=Sampling(temperature=0.0))
    with pytest.raises(MismatchError, match="--temperature 0"):
        preflight_rollout(greedy)
