"""Every semantic check is proved by the fault that it exists for; a clean pair passes them all."""

from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.diagnosis import declared, semantics
from mismatch.analysis.diagnosis.loaded_weights import weights_as_loaded
from mismatch.attempts import Attempts
from mismatch.types import Estimate, Rollout, Sampling, Scoring
from tests.texts import numbers

VOCABULARY, PROMPT, RESPONSE, EOS = 40, 3, 14, 1


def law(rng, temperature=1.0):
    """A random next-token law per token, and the ids drawn from it at a temperature."""
    logits = rng.normal(0, 2, (16 * RESPONSE, VOCABULARY))
    logits[:, EOS] = -30  # only the last token of a sequence stops, planted below
    scaled = logits / temperature
    logprobs = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
    ids = np.array([rng.choice(VOCABULARY, p=np.exp(row)) for row in logprobs])
    return logits, logprobs, ids


def make(temperature=1.0, noise=0.01, seed=0):
    """A rollout of 16 sequences of 8 prompts and its two scorings, which differ by noise."""
    rng = np.random.default_rng(seed)
    logits, logprobs, ids = law(rng, temperature)
    ids[RESPONSE - 1 :: RESPONSE] = EOS
    sampled = logprobs[np.arange(len(ids)), ids]
    length = PROMPT + RESPONSE
    token_ids = np.repeat(np.arange(16) // 2 + 100, length).reshape(16, length)
    token_ids[:, PROMPT:] = ids.reshape(16, RESPONSE)
    mask = np.zeros((16, length), bool)
    mask[:, PROMPT:] = True
    rollout = Rollout(
        token_ids=token_ids.ravel(),
        offsets=np.arange(17) * length,
        action_mask=mask.ravel(),
        turn=mask.ravel().astype(int),
        prompt_index=np.arange(16) // 2,
        finish_reason=("stop",) * 16,
        sampling=Sampling(temperature=temperature, samples_per_prompt=2),
        fingerprint={},
    )
    files = {"model.safetensors": "aa", "config.json": "bb"}
    weights = {"lm_head.weight": [1, 2, 3], "model.norm.weight": [4, 5, 6]}
    shared = {
        "logprobs_temperature": temperature,
        "logprobs_truncated": False,
        "source_files": files,
        "weights": weights,
    }
    effective = {"temperature": temperature, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    engine = {**shared, "stop_token_ids": [EOS], "bos_token_id": 2, "sampling": effective}
    left = Scoring("vllm:decode", ids, sampled, engine)
    extra = {}
    if temperature != 1:
        full = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        extra["logprobs_untempered"] = full[np.arange(len(ids)), ids]
    noisy = np.minimum(sampled + rng.normal(0, noise, len(ids)), 0)
    trainer = {**shared, "attention": "sink-sdpa", "honours_sinks": True}
    right = Scoring("fsdp", ids, noisy, trainer, extra=extra)
    return rollout, left, right


def ratio(left, right, half=0.01, flags=()):
    value = float(np.exp(right.logprobs - left.logprobs).mean())
    return Estimate(value, value - half, value + half, 192, 16, 8, flags)


def statuses(rollout, left, right, attempts=None, **kwargs):
    sides, attempts = (rollout, left, right), attempts or Attempts()
    checks = semantics.input_checks(*sides)
    checks += semantics.semantic_checks(*sides, ratio(left, right, **kwargs), attempts)
    return {check.id: check for check in checks}


def assert_only(checks, *expected):
    assert {id for id, check in checks.items() if check.status == "failed"} == set(expected)
    for id in expected:
        assert checks[id].detail
        assert checks[id].fix


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_clean_pair_passes_every_check(temperature):
    checks = statuses(*make(temperature))
    assert checks.pop("sampling-law").status == "not_tested"  # there are no entropies
    assert {check.status for check in checks.values()} == {"passed"}
    assert len(checks) == 14


def test_other_token_ids_fail():
    rollout, left, right = make()
    ids = right.token_ids.copy()
    ids[30] += 1
    check = semantics.same_token_ids(rollout, left, replace(right, token_ids=ids))
    assert check.status == "failed"
    assert "sequence 2" in check.detail


def test_a_missing_token_fails():
    rollout, left, right = make()
    short = replace(right, token_ids=right.token_ids[:-1], logprobs=right.logprobs[:-1])
    assert semantics.same_token_ids(rollout, left, short).status == "failed"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_missing_logprobs_fail(value):
    rollout, left, right = make()
    logprobs = right.logprobs.copy()
    logprobs[5] = value
    check = semantics.missing_logprobs(rollout, left, replace(right, logprobs=logprobs))
    assert check.status == "failed"
    assert "1 of 224" in check.detail


@pytest.mark.parametrize("shift", [-1, 1])
def test_an_off_by_one_fails_alignment(shift):
    rollout, left, right = make()
    shifted = replace(right, logprobs=np.roll(right.logprobs, shift))
    check = semantics.alignment(rollout, left, shifted)
    assert check.status == "failed"
    assert f"best lag is {shift:+d}" in check.detail


def test_shuffled_rows_fail_in_alignment():
    rollout, left, right = make()
    shuffled = np.random.default_rng(1).permutation(right.logprobs)
    assert semantics.alignment(rollout, left, replace(right, logprobs=shuffled)).status == "failed"


def test_weak_correlation_of_near_values_is_a_warning():
    """Where all tokens are nearly certain, rounding alone leaves no more."""
    rollout, left, right = make()
    near = left.logprobs - left.logprobs.mean()
    sides = [replace(side, logprobs=-0.1 + 0.01 * near) for side in (left, right)]
    mixed = np.random.default_rng(1).permutation(sides[1].logprobs)
    found = semantics.alignment(rollout, sides[0], replace(sides[1], logprobs=mixed))
    assert found.status == "warning"


def test_raw_logprobs_at_another_temperature_fail():
    rollout, left, right = make(temperature=0.7)
    raw = replace(
        left,
        logprobs=right.extra["logprobs_untempered"],
        fingerprint=left.fingerprint | {"logprobs_temperature": 1.0},
    )
    checks = statuses(rollout, raw, right, half=0.02)
    assert checks["temperature"].status == "failed"
    assert "processed_logprobs" in checks["temperature"].fix


def test_an_engine_that_lies_about_its_temperature_is_caught_by_the_data():
    rollout, left, right = make(temperature=0.7)
    liar = replace(left, logprobs=right.extra["logprobs_untempered"])
    assert semantics.temperature(rollout, liar, right).status == "failed"


def test_renormalised_truncation_fails_and_explains_the_ratio():
    rollout, left, right = make()
    kept = np.full(len(left.logprobs), 0.9)
    cut = replace(
        left,
        logprobs=left.logprobs - np.log(0.9),
        fingerprint=left.fingerprint | {"logprobs_truncated": True},
    )
    rollout = replace(rollout, sampling=replace(rollout.sampling, top_p=0.9))
    effective = left.fingerprint["sampling"] | {"top_p": 0.9}
    cut = replace(cut, fingerprint=cut.fingerprint | {"sampling": effective})
    checks = statuses(rollout, cut, replace(right, extra={"kept_mass": kept}))
    assert_only(checks, "truncation")
    assert "0.9000" in checks["truncation"].detail
    assert checks["importance-ratio"].status == "passed"


def test_a_one_sided_delta_is_truncation_though_nobody_declared_it():
    rollout, left, right = make()
    cut = replace(right, logprobs=left.logprobs - 0.05)
    assert semantics.truncation(rollout, left, cut).status == "failed"


def test_a_ratio_that_excludes_one_fails():
    rollout, left, right = make()
    off = replace(right, logprobs=right.logprobs - 0.1)
    check = semantics.importance_ratio(rollout, left, off, ratio(left, off))
    assert check.status == "failed"


def test_a_heavy_tail_makes_the_ratio_check_a_warning():
    rollout, left, right = make()
    off = replace(right, logprobs=right.logprobs - 0.1)
    check = semantics.importance_ratio(rollout, left, off, ratio(left, off, flags=("heavy-tail",)))
    assert check.status == "warning"


def test_ratios_that_spread_both_ways_are_a_mismatch_and_no_wrong_law():
    """What unlikely tokens would add to the mean was never sampled: it falls short of 1."""
    rollout, left, right = make(noise=0.3)
    short = replace(right, logprobs=right.logprobs - 0.15)
    mean = ratio(left, short)
    assert mean.high < 1
    assert semantics.importance_ratio(rollout, left, short, mean).status == "warning"


def test_padding_with_zero_fails():
    rollout, left, right = make()
    logprobs = left.logprobs.copy()
    logprobs[RESPONSE - 1 :: RESPONSE] = 0.0
    assert (
        semantics.zero_logprobs(rollout, replace(left, logprobs=logprobs), right).status == "failed"
    )


def test_a_certain_token_may_have_logprob_zero():
    rollout, left, right = make()
    a, b = left.logprobs.copy(), right.logprobs.copy()
    a[3], b[3] = 0.0, -1e-7
    check = semantics.zero_logprobs(rollout, replace(left, logprobs=a), replace(right, logprobs=b))
    assert check.status == "passed"


@pytest.mark.parametrize(("value", "status"), [(0.02, "failed"), (1e-5, "warning")])
def test_positive_logprobs(value, status):
    rollout, left, right = make()
    logprobs = right.logprobs.copy()
    logprobs[0] = value
    assert (
        semantics.positive_logprobs(rollout, left, replace(right, logprobs=logprobs)).status
        == status
    )


@pytest.mark.parametrize("odd", [{"repetition_penalty": 1.1}, {"min_new_tokens": 4}])
def test_a_parameter_from_generation_config_fails(odd):
    rollout, left, right = make()
    effective = left.fingerprint["sampling"] | odd
    left = replace(left, fingerprint=left.fingerprint | {"sampling": effective})
    assert_only(statuses(rollout, left, right), "sampling-parameters")


def test_a_dropped_eos_fails():
    rollout, left, right = make()
    ids = rollout.token_ids.copy()
    ids[rollout.offsets[4] - 1] = 7
    check = declared.special_tokens(replace(rollout, token_ids=ids), left, right)
    assert check.status == "failed"
    assert "sequence 3" in check.detail


def test_an_appended_eos_fails():
    rollout, left, right = make()
    logprobs = right.logprobs.copy()
    logprobs[RESPONSE - 1 :: RESPONSE] = -9.0  # the trainer finds the EOS most unlikely
    sampled = left.logprobs.copy()
    sampled[RESPONSE - 1 :: RESPONSE] = -0.1
    check = declared.special_tokens(
        rollout, replace(left, logprobs=sampled), replace(right, logprobs=logprobs)
    )
    assert check.status == "failed"
    assert numbers(check.detail)[0] == pytest.approx(8.9, rel=0.01)  # on the stop tokens


def test_an_eos_in_the_middle_fails():
    rollout, left, right = make()
    ids = rollout.token_ids.copy()
    ids[rollout.offsets[2] + PROMPT + 2] = EOS
    check = declared.special_tokens(replace(rollout, token_ids=ids), left, right)
    assert check.status == "failed"


def test_a_doubled_bos_fails():
    rollout, left, right = make()
    ids = rollout.token_ids.copy()
    ids[rollout.offsets[:-1]] = ids[rollout.offsets[:-1] + 1] = 2
    check = declared.special_tokens(replace(rollout, token_ids=ids), left, right)
    assert check.status == "failed"
    assert numbers(check.detail) == [rollout.n_sequences]


def test_a_kernel_that_ignores_sinks_fails_and_comes_first():
    rollout, left, right = make()
    sinkless = right.fingerprint | {"attention": "no-sinks", "honours_sinks": False}
    checks = statuses(rollout, left, replace(right, fingerprint=sinkless))
    assert_only(checks, "attention-sinks")
    assert list(checks)[3] == "attention-sinks"
    assert "--attention auto" in checks["attention-sinks"].fix
    without = declared.attention_sinks(right.fingerprint | {"honours_sinks": None})
    assert without.status == "passed"


def test_other_source_files_fail():
    left, right = make()[1].fingerprint, make()[2].fingerprint
    right = right | {"source_files": {"model.safetensors": "cc", "config.json": "bb"}}
    check = declared.source_files(left, right)
    assert check.status == "failed"
    assert "model.safetensors" in check.detail


def test_stale_weights_fail_and_unmapped_names_are_listed():
    left, right = make()[1].fingerprint, make()[2].fingerprint
    left = left | {"unmapped_weights": ["odd.weight"]}
    assert "odd.weight" in weights_as_loaded(left, right).detail
    right = right | {"weights": right["weights"] | {"lm_head.weight": [1, 2, 4]}}
    check = weights_as_loaded(left, right)
    assert check.status == "failed"
    assert "lm_head.weight" in check.detail


@pytest.mark.parametrize(
    "check",
    [
        lambda r, a, b: declared.source_files({}, {}),
        lambda r, a, b: declared.attention_sinks({}),
        lambda r, a, b: weights_as_loaded({}, {}),
        lambda r, a, b: declared.sampling_parameters(r, replace(a, fingerprint={})),
        lambda r, a, b: declared.special_tokens(r, replace(a, fingerprint={}), b),
        lambda r, a, b: semantics.truncation(r, replace(a, fingerprint={}), b),
        lambda r, a, b: semantics.temperature(
            r, replace(a, fingerprint={}), replace(b, fingerprint={})
        ),
        lambda r, a, b: semantics.importance_ratio(r, a, b, Estimate(1, None, None, 9, 2, 1)),
    ],
)
def test_what_lacks_its_data_is_not_tested_and_never_passed(check):
    assert check(*make()).status == "not_tested"


@pytest.mark.parametrize(
    ("name", "check"),
    [("lag", "alignment"), ("padding", "zero-logprobs"), ("truncation", "truncation")],
)
def test_a_detector_that_raises_costs_its_check_alone(monkeypatch, name, check):
    def broken(case):
        raise ValueError("no")

    room = semantics.law if name == "truncation" else semantics
    attempts, sound = Attempts(), statuses(*make()).keys()
    monkeypatch.setattr(room, name, broken)
    checks = statuses(*make(), attempts=attempts)
    assert sound - checks.keys() == {check}
    assert {outcome.status for outcome in checks.values()} == {"passed", "not_tested"}
    assert [entry.what for entry in attempts.failed] == [check]
