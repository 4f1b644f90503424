"""Every edge of the verdict rule, and the table that it reads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch.analysis.levels import column_for, exit_code, fails_on, judge, judge_one, verdict
from mismatch.analysis.thresholds import COLUMNS, Level, default_thresholds, load_thresholds
from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.types import Check, Comparison, Estimate, Judgement, Verdict
from tests.texts import numbers

K3 = Level(1e-3, 1e-2, "test")
PEARSON = Level(0.99, 0.97, "test")


def estimate(value: float, low=None, high=None, flags=()) -> Estimate:
    return Estimate(value, low, high, 1000, 256, 64, flags)


@pytest.mark.parametrize(
    ("low", "value", "high", "status", "inconclusive"),
    [
        (1e-4, 2e-4, 5e-4, "healthy", False),
        (1e-4, 5e-4, 1e-3, "healthy", False),  # high end exactly on the bound
        (1e-4, 5e-4, 1.1e-3, "tolerable", True),  # spans healthy
        (1e-3, 2e-3, 3e-3, "tolerable", True),  # low end on the bound: healthy is not excluded
        (2e-3, 3e-3, 5e-3, "tolerable", False),
        (2e-3, 5e-3, 1e-2, "tolerable", False),  # high end exactly on unfit
        (2e-3, 5e-3, 2e-2, "inconclusive", True),  # spans unfit
        (1e-2, 2e-2, 3e-2, "inconclusive", True),  # low end exactly on unfit: not above
        (1.1e-2, 2e-2, 3e-2, "unfit", False),
        (1e-4, 5e-3, 2e-2, "inconclusive", True),  # spans both
    ],
)
def test_rule_for_low_is_good(low, value, high, status, inconclusive):
    got = judge_one("k3_kl", estimate(value, low, high), K3)
    assert (got.status, got.inconclusive) == (status, inconclusive)
    assert (got.deciding_prompts is not None) is inconclusive or value in (1e-3, 1e-2)


@pytest.mark.parametrize(
    ("low", "value", "high", "status", "inconclusive"),
    [
        (0.995, 0.998, 0.999, "healthy", False),
        (0.99, 0.995, 0.999, "healthy", False),
        (0.985, 0.995, 0.999, "tolerable", True),
        (0.975, 0.98, 0.985, "tolerable", False),
        (0.96, 0.975, 0.98, "inconclusive", True),
        (0.5, 0.9, 0.96, "unfit", False),
        (0.5, 0.9, 0.97, "inconclusive", True),
    ],
)
def test_rule_for_high_is_good(low, value, high, status, inconclusive):
    got = judge_one("probs_pearson", estimate(value, low, high), PEARSON)
    assert (got.status, got.inconclusive) == (status, inconclusive)


@pytest.mark.parametrize(
    ("value", "status"),
    [(1e-3, "healthy"), (2e-3, "tolerable"), (1e-2, "tolerable"), (2e-2, "unfit")],
)
def test_without_an_interval_the_value_decides(value, status):
    got = judge_one("logprob_abs_diff_max", estimate(value), K3)
    assert (got.status, got.inconclusive, got.deciding_prompts) == (status, False, None)


def test_one_prompt_and_overflow():
    assert judge_one("k3_kl", estimate(1e-4, flags=("one-prompt",)), K3).inconclusive
    assert judge_one("k3_kl", estimate(math.inf, flags=("overflow",)), K3).status == "unfit"


def test_deciding_prompts_clear_the_bounds_that_matter():
    # Value 0.0005 in the healthy zone: arm 0.001 against a distance of 0.0005 -> 4 times 64.
    got = judge_one("k3_kl", estimate(5e-4, 1e-4, 1.5e-3), K3)
    assert got.deciding_prompts in (256, 257)
    # The same with an interval across both bounds: settling the healthy one settles both.
    both = judge_one("k3_kl", estimate(5e-4, 1e-4, 1.05e-2), K3)
    assert both.deciding_prompts is None  # 64 * 20**2: nobody measures so many
    # Between the bounds: the harder of the two decides.
    between = judge_one("k3_kl", estimate(3e-3, 0.0, 1.7e-2), K3)
    assert between.deciding_prompts == pytest.approx(64 * max(1.5, 2.0) ** 2, abs=2)
    # Mirrored: pearson 0.98 with bounds 0.99 and 0.97.
    mirrored = judge_one("probs_pearson", estimate(0.98, 0.96, 0.985), PEARSON)
    assert mirrored.deciding_prompts == pytest.approx(256, abs=2)


def test_more_prompts_are_no_advice_where_a_tail_rules():
    heavy = estimate(5e-4, 1e-4, 1.5e-3, ("heavy-tail",))
    assert judge_one("k3_kl", heavy, K3).deciding_prompts is None


@pytest.mark.parametrize(
    ("flag", "prompts", "value", "high", "status"),
    [
        ("heavy-prompts", 64, 2e-4, 3e-4, "healthy"),
        ("heavy-tail", 64, 5e-4, 8e-4, "inconclusive"),  # 5e-4 + 2 * 3e-4 is above 1e-3
        ("heavy-tail", 32, 5e-4, 8e-4, "healthy"),  # from few prompts it is widened already
        ("few-prompts", 64, 5e-4, 8e-4, "healthy"),
        ("heavy-prompts", 16, 5e-5, 8e-5, "healthy"),
        ("few-prompts", 16, 2e-4, 3e-4, "healthy"),
        ("heavy-prompts", 64, 2e-3, 4e-3, "tolerable"),
        ("heavy-prompts", 64, 5e-3, 8e-3, "inconclusive"),  # 1.1e-2 is above the unfit bound
    ],
)
def test_an_interval_that_few_prompts_carry_does_not_decide(flag, prompts, value, high, status):
    held = replace(estimate(value, value / 2, high, (flag,)), n_prompts=prompts)
    judged = judge_one("k3_kl", held, K3)
    assert judged.status == status


def test_columns():
    bf16, fp16, fp32 = ({"dtype": d} for d in ("bf16", "fp16", "fp32"))
    assert column_for(fp32, fp32) == "fp32"
    assert column_for(fp32, {"dtype": ""}) is None
    assert column_for(fp32, fp16) == column_for(fp16, fp32) == "fp16"
    assert column_for(fp16, bf16) == "bf16 dense"  # 8 significant bits against 11
    assert column_for(bf16, bf16 | {"moe": True}) == "bf16 MoE"
    assert column_for(fp16 | {"moe": True}, fp16) == "fp16"
    assert column_for(fp32, fp32 | {"autocast": "bf16"}) == "bf16 dense"
    assert column_for({"dtype": "torch.bfloat16"}, fp32) == "bf16 dense"
    assert column_for({"dtype": "float32", "kv_cache_dtype": "auto"}, fp32) == "fp32"
    assert column_for(bf16 | {"kv_cache_dtype": "fp8_e4m3"}, bf16) == "quantised"
    assert column_for(bf16 | {"kv_cache_dtype": "bfloat16"}, bf16) == "bf16 dense"
    assert column_for(bf16 | {"quantization": "fp8"}, bf16) == "quantised"
    assert column_for(bf16 | {"quantization": None}, bf16) == "bf16 dense"
    assert column_for({"dtype": "float8"}, fp32) is None  # no levels, and no refusal either
    assert column_for({}, {}) is None


def test_the_table_is_sound():
    table = default_thresholds()
    for metric, columns in table.items():
        assert metric in METRICS
        assert set(columns) <= set(COLUMNS)
        for level in columns.values():
            assert level.source
            worse = level.unfit - level.healthy
            assert worse < 0 if METRICS[metric].good == "high" else worse > 0
    for column in COLUMNS:
        assert "k3_kl" in {metric for metric in table if column in table[metric]}
    assert set(table["logprob_abs_diff_max"]) == {"fp32"}


PAGE = (Path(__file__).parents[2] / "docs" / "explain" / "verdict.md").read_text("utf-8")


def test_the_documented_example_loads(tmp_path):
    example = PAGE.split("```toml\n")[1].split("```")[0]
    cell = load_thresholds(written(tmp_path, example))["k3_kl"]["bf16 MoE"]
    assert cell == Level(1e-3, 5e-3, cell.source, yours=True)
    assert f'"{cell.source}"' in example


def comparison(**values: Estimate) -> Comparison:
    return Comparison("vllm:decode", "fsdp", True, values)


def test_judge_takes_the_metrics_that_have_a_cell():
    numbers = comparison(
        k3_kl=estimate(1e-4, 1e-5, 2e-4),
        ess_token=estimate(0.1, 0.1, 0.1),
        logprob_abs_diff_max=estimate(5.0),
    )
    assert [j.metric for j in judge(numbers, "bf16 MoE")] == ["k3_kl"]
    in_fp32 = {j.metric: j.status for j in judge(numbers, "fp32")}
    assert in_fp32 == {"logprob_abs_diff_max": "unfit", "k3_kl": "inconclusive"}


def test_an_infinite_exact_kl_is_unfit_and_not_left_out():
    """The trainer rules out a token that the engine allows."""
    numbers = comparison(
        k3_kl=estimate(1e-4, 5e-5, 2e-4), exact_kl=replace(estimate(math.inf), flags=("overflow",))
    )
    status_of = {each.metric: each.status for each in judge(numbers, "bf16 dense")}
    assert status_of == {"k3_kl": "healthy", "exact_kl": "unfit"}


WIDE = Estimate(3e-4, 1e-5, 2.5e-3, 512, 256, 64, ("heavy-tail", "heavy-prompts"))
SURE = Estimate(1e-4, 6e-5, 2e-4, 15_000, 256, 64, ())


def exact_beside(k3: Estimate | None = SURE, spread: float | None = 0.01, law=True, **exact):
    """How an exact KL is judged at healthy 2e-3 and unfit 0.013, beside what k3 says."""
    values = {"exact_kl": replace(WIDE, **exact)}
    if k3 is not None:
        values["k3_kl"] = k3
    if spread is not None:
        values["k3_spread_at_exact"] = replace(WIDE, value=spread, low=None, high=None)
    beside = Comparison("vllm:decode", "fsdp", law, values)
    return next(each for each in judge(beside, "bf16 MoE") if each.metric == "exact_kl")


@pytest.mark.parametrize(
    ("beside", "status"),
    [
        ({}, "healthy"),
        ({"high": 0.02}, "healthy"),  # both bounds
        # What the positions show stays: the lower end, the value, a contradiction to k3.
        ({"low": 2.1e-3, "value": 3e-3, "high": 5e-3}, "tolerable"),
        ({"value": 2.1e-3}, "tolerable"),
        ({"low": 3e-4, "value": 5e-4}, "tolerable"),
        ({"low": 0.014, "value": 0.02, "high": 0.03}, "unfit"),
        ({"low": None, "high": None}, "inconclusive"),
        # k3 that says no more, or has not sampled what the distributions show.
        ({"k3": replace(SURE, high=2.1e-3)}, "tolerable"),
        ({"k3": replace(SURE, high=1.2e-3, flags=("heavy-tail",))}, "tolerable"),
        ({"k3": replace(SURE, n_tokens=2_000)}, "tolerable"),
        ({"spread": 0.2}, "tolerable"),  # 2 * 0.2 / sqrt(15,000) is beyond
        # Hidden, or of tokens that the rollout side did not sample.
        ({"k3": None}, "tolerable"),
        ({"k3": replace(SURE, low=None, high=None)}, "tolerable"),
        ({"spread": None}, "tolerable"),
        ({"law": False}, "tolerable"),
    ],
)
def test_k3_decides_for_an_exact_kl_of_few_positions_and_never_against_it(beside, status):
    got = exact_beside(**beside)
    assert got.status == status
    assert got.inconclusive or "low" in beside  # as its own interval has it


def test_the_reason_names_the_estimate_that_decided():
    got = verdict([exact_beside()], [PASSED], "bf16 MoE")
    assert got.status == "healthy"
    assert "k3_kl" in got.reason
    alone = verdict([exact_beside(high=1e-3)], [PASSED], "bf16 MoE")
    assert "k3_kl" not in alone.reason


@pytest.mark.parametrize(("low", "status"), [(0.6, "healthy"), (0.01, "tolerable")])
def test_sequence_weights_alone_never_make_a_run_unfit(low, status):
    numbers = comparison(ess_seq=estimate(low + 0.05, low, low + 0.1))
    assert [each.status for each in judge(numbers, "bf16 dense")] == [status]


def test_the_share_that_ppo_clips_is_judged():
    """9 % at step 0, as without sinks; 0.6 % as a working Qwen3-8B has it."""
    for value, status in ((0.006, "healthy"), (0.09, "tolerable"), (0.15, "unfit")):
        numbers = comparison(clip_fraction=estimate(value, 0.95 * value, 1.05 * value))
        assert [each.status for each in judge(numbers, "bf16 dense")] == [status]


def published_values():
    """Yield the rows of the tables in docs/evidence/published-values.md, with whether they work."""
    page = Path(__file__).parents[2] / "docs" / "evidence" / "published-values.md"
    _, *tables = page.read_text(encoding="utf-8").split("\n## ")
    for works, table in zip((True, False), tables, strict=True):
        names, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
        for row in rows:
            cells = [[cell.strip(" `") for cell in each.split("|")[1:-1]] for each in (names, row)]
            yield dict(zip(*cells, strict=True)) | {"works": works}


def test_levels_do_not_contradict_what_works_elsewhere():
    """A published value of a stack that works is never beyond the unfit bound of its class."""
    table = default_thresholds()
    seen = 0
    for row in published_values():
        assert row["metric"] in METRICS or row["metric"] == "logprob_diff_rms"
        assert row["class"] in (*COLUMNS, "")
        assert row["source"]
        if row["metric"] not in table or not row["works"]:
            continue
        sign = -1.0 if METRICS[row["metric"]].good == "high" else 1.0
        levels = table[row["metric"]]
        own = [levels[row["class"]]] if row["class"] in levels else []
        # Without a class it must pass where most is allowed, but for a quantised engine.
        rest = [level for column, level in levels.items() if column != "quantised"]
        laxest = max((level.unfit * sign for level in own or rest), default=float("inf"))
        assert sign * float(row["value"]) <= laxest, row
        seen += 1
    assert seen >= 10


def judged(*statuses: str) -> list[Judgement]:
    names = ("k3_kl", "probs_diff_mean", "token_mult_prob_error")
    return [
        Judgement(name, status, 0.5, 0.1, 0.4, "s")
        for name, status in zip(names, statuses, strict=False)
    ]


PASSED, FAILED = Check("alignment", "passed", "lag 0"), Check("temperature", "failed", "raw at 0.7")


def test_verdict_is_the_worst():
    assert verdict(judged("healthy", "healthy"), [PASSED], "fp32").status == "healthy"
    assert verdict(judged("healthy", "tolerable"), [PASSED], "fp32").status == "tolerable"
    worst = verdict(judged("tolerable", "unfit", "inconclusive"), [PASSED], "bf16 MoE")
    assert worst.status == "unfit"
    assert worst.levels == "bf16 MoE"
    assert worst.reason.startswith("probability gap: ")
    assert numbers(worst.reason) == [0.5, 0.4]  # its value and its unfit bound
    assert len(worst.judgements) == 3


def test_two_questions_have_their_own_answers():
    warned = Check("eos", "warning", "3 of 64")
    little = Check("enough-data", "warning", "1 prompt")
    cases = {
        # judgements, checks, reason of an unmeasured square -> correctness, fitness, verdict
        ("healthy", PASSED, ""): ("healthy", "healthy", "healthy"),
        ("unfit", PASSED, ""): ("healthy", "unfit", "unfit"),
        ("healthy", FAILED, ""): ("broken", "healthy", "broken"),
        ("unfit", FAILED, "quick"): ("broken", "unfit", "broken"),
        ("healthy", warned, ""): ("tolerable", "healthy", "tolerable"),
        ("inconclusive", warned, ""): ("tolerable", "inconclusive", "inconclusive"),
        ("healthy", PASSED, "quick"): ("inconclusive", "healthy", "inconclusive"),
        ("unfit", PASSED, "quick"): ("inconclusive", "unfit", "unfit"),
        ("healthy", little, ""): ("inconclusive", "inconclusive", "inconclusive"),
    }
    for (status, check, unmeasured), want in cases.items():
        got = verdict(judged(status), [check], "fp32", unmeasured)
        assert (got.correctness.status, got.fitness.status, got.status) == want
        assert got.reason


def test_a_quantised_rollout_is_at_best_tolerable():
    assert verdict(judged("healthy"), [PASSED], "quantised").status == "tolerable"
    assert verdict(judged("unfit"), [PASSED], "quantised").status == "unfit"


def test_a_failed_check_is_broken_whatever_the_numbers():
    got = verdict(judged("healthy"), [PASSED, FAILED], "fp32")
    assert got.status == "broken"
    assert FAILED.id in got.reason
    assert FAILED.detail in got.reason
    assert verdict([], [FAILED], "fp32").status == "broken"
    untested = Check("truncation", "not_tested", "off")
    assert verdict(judged("healthy"), [untested], "fp32").status == "healthy"


def test_a_failed_check_does_not_hide_what_the_numbers_say():
    got = verdict(judged("healthy", "unfit", "unfit"), [FAILED], "fp32")
    assert numbers(got.reason)[-2:] == [2, 3]  # metrics that are unfit as well


def test_a_value_that_is_no_number_is_unfit():
    assert judge_one("k3_kl", estimate(float("nan"), None, None), K3).status == "unfit"
    assert judge_one("k3_kl", estimate(float("inf"), None, None), K3).status == "unfit"


def test_nothing_measured_never_passes():
    with pytest.raises(MismatchError, match="nothing measured"):
        verdict([], [PASSED], "fp32")


def test_an_undecided_warning_says_how_many_prompts_decide():
    undecided = judge_one("k3_kl", estimate(5e-4, 1e-4, 1.5e-3), K3)
    assert "256 prompts" in verdict([undecided], [], "fp32").reason.replace("257", "256")
    certain = judge_one("probs_diff_mean", estimate(5e-3, 4e-3, 6e-3), K3)
    reason = verdict([undecided, certain], [], "fp32").reason
    assert reason.startswith("probability gap: ")
    assert "k3 KL" in reason


def test_exit_codes():
    order = ("healthy", "tolerable", "inconclusive", "unfit", "broken")
    codes = {
        status: [exit_code(Verdict(status, "", "fp32", ()), on) for on in order[1:]]
        for status in order
    }
    assert codes == {
        "healthy": [0, 0, 0, 0],
        "tolerable": [1, 0, 0, 0],
        "inconclusive": [1, 1, 0, 0],
        "unfit": [1, 1, 1, 0],
        "broken": [1, 1, 1, 1],
    }
    for old, new in {"warn": "tolerable", "critical": "unfit", "never": "broken"}.items():
        with pytest.raises(MismatchError) as caught:
            exit_code(Verdict("unfit", "", "fp32", ()), old)
        assert new in caught.value.fix


def test_quick_lets_inconclusive_pass():
    assert fails_on(None, quick=False) == "inconclusive"
    assert fails_on(None, quick=True) == "unfit"
    assert fails_on("broken", quick=True) == "broken"


def written(folder, text: str):
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_thresholds_replace_cells_and_only_those(tmp_path):
    cells = '[k3_kl."bf16 MoE"]\nhealthy = 5e-4\n[ess_token."fp32"]\nhealthy = 0.99\nunfit = 0.9'
    path = written(tmp_path, cells)
    own, ours = load_thresholds(path), default_thresholds()
    assert own["k3_kl"]["bf16 MoE"].healthy == 5e-4
    assert own["k3_kl"]["bf16 MoE"].unfit == ours["k3_kl"]["bf16 MoE"].unfit
    assert "mine.toml" in own["k3_kl"]["bf16 MoE"].source
    assert own["ess_token"]["fp32"].healthy == 0.99
    assert own["k3_kl"]["fp32"] == ours["k3_kl"]["fp32"]
    assert "ess_token" not in ours
    numbers = comparison(k3_kl=estimate(1e-3, 9e-4, 1.1e-3))
    assert judge(numbers, "bf16 MoE")[0].status == "healthy"
    assert judge(numbers, "bf16 MoE", own)[0].status == "tolerable"


BAD_FILES = {
    "[k3_lk.fp32]\nhealthy = 1": ("line 1.*'k3_lk'", "did you mean k3_kl"),
    '# mine\n[k3_kl."bf16 moe"]\nhealthy = 1': (
        "line 2.*k3_kl.*'bf16 moe'",
        "did you mean bf16 MoE",
    ),
    "[k3_kl.fp32]\nhelthy = 1": ("line 2.*helthy", "did you mean healthy"),
    "[k3_kl.fp32]\nhealthy = 'low'": ("no number: 'low'", "k3_kl"),
    "[k3_kl.fp32]\nhealthy = nan": ("no number: nan", "k3_kl"),
    "[k3_kl.fp32]\nhealthy = true": ("no number: True", "k3_kl"),
    "[k3_kl.fp32]\nhealthy = 1.0": ("healthy 1 .*unfit", "healthy lies below"),
    "[probs_pearson.fp32]\nhealthy = 0.9\nunfit = 0.95": ("worse", "healthy lies above"),
    "[ess_token.fp32]\nhealthy = 0.9": ("unfit .*None", "ess_token"),
    "[k3_kl.fp32]\ncritical = 1.0": ("key of k3_kl: 'critical'", "unfit"),
    "k3_kl = 3": ("k3_kl is no table", '"bf16 MoE"'),
    "[k3_kl]\nfp32 = 3": ("fp32: .*table", "healthy"),
    "[ratio_mean.fp32]\nhealthy = 1": ("'ratio_mean'", "ratio"),
    "[k3_kl": ("is not TOML", "k3_kl"),
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_bad_thresholds_name_the_place_and_the_fix(text, tmp_path):
    message, fix = BAD_FILES[text]
    with pytest.raises(MismatchError, match=message) as caught:
        load_thresholds(written(tmp_path, text))
    assert fix in caught.value.fix
    assert "mine.toml" in caught.value.message


def test_thresholds_file_missing(tmp_path):
    with pytest.raises(MismatchError, match=r"none\.toml"):
        load_thresholds(tmp_path / "none.toml")


@pytest.mark.parametrize("column", COLUMNS)
def test_a_default_run_without_any_far_token_is_healthy(column):
    cell = default_thresholds()["ratio_outside_2"].get(column)
    if cell is None:
        pytest.skip("not applicable: no level in this column")
    unseen = estimate(0.0, 0.0, 3 / 15_000, ("no-events",))  # 64 prompts × 4 samples × 60 tokens
    assert judge_one("ratio_outside_2", unseen, cell).status == "healthy"
