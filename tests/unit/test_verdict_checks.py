"""The verdict on routes, by levels of the user's own, and where checks have nothing to look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch.analysis.diagnosis.declared import (
    attention_softcap,
    sharding_checks,
    source_files,
    special_tokens,
)
from mismatch.analysis.diagnosis.loaded_weights import weights_as_loaded
from mismatch.analysis.diagnosis.routes import beyond_chance, routing_checks
from mismatch.analysis.levels import exit_code, judge_one, verdict
from mismatch.analysis.thresholds import Level, default_thresholds, load_thresholds
from mismatch.captures import Distributions
from mismatch.errors import MismatchError
from mismatch.models.resolved import honours_softcap
from mismatch.types import Estimate, Rollout, Routing, Scoring
from tests.invented_run import likely, noise, report_of, sampled, saved

# ---------------------------------------------------------------- levels of the user's own


def levels(folder: Path, text: str):
    path = folder / "levels.toml"
    path.write_text(text)
    return load_thresholds(path)


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        ('[routing_disagree_any."bf16 dense"]\nhealthy=0.01\nunfit=0.02', "routing_disagree_any"),
        ('[k3_kl."bf16 MoE"]\nhealthy=1e-4\nunfit=1e-3', '"bf16 dense"'),
        ('[exact_kl."bf16 dense"]\nhealthy=1e-4\nunfit=1e-3', "exact_kl"),
    ],
)
def test_a_level_that_cannot_be_applied_is_an_error(cell, named, tmp_path):
    rollout = sampled(prompts=16)
    left = likely(rollout)
    run = saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.005))
    with pytest.raises(MismatchError, match=r"^1 of.*applied") as caught:
        report_of(run, thresholds=levels(tmp_path, cell))
    assert named in str(caught.value)


def test_a_file_for_several_classes_is_applied_where_one_fits(tmp_path):
    rollout = sampled(prompts=16)
    left = likely(rollout)
    run = saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.05))
    cells = '[k3_kl."bf16 MoE"]\nhealthy=1e-4\n[k3_kl."bf16 dense"]\nhealthy=1e-6\nunfit=1e-5'
    judged = report_of(run, thresholds=levels(tmp_path, cells)).verdict
    assert judged.status == "unfit"


def test_a_quantile_without_an_interval_is_not_healthy():
    level = Level(0.05, 0.2, "test")
    bare = Estimate(0.03, None, None, 100, 16, 8, ("few-tokens",))
    judged = judge_one("logprob_abs_diff_p999", bare, level)
    assert judged.status == "inconclusive"
    assert judged.inconclusive


def test_ends_that_are_no_numbers_decide_nothing():
    lost = Estimate(1e-4, float("nan"), float("nan"), 8192, 64, 16)
    assert judge_one("k3_kl", lost, Level(1e-3, 0.013, "test")).status == "inconclusive"


@pytest.mark.parametrize(
    ("column", "values", "passes"),
    [  # mean |delta| and k3 that others published, with tight intervals
        ("bf16 MoE",
         {"logprob_abs_diff_mean": (0.085, 0.08, 0.09), "k3_kl": (0.0107, 9e-3, 0.0124)},
         False),  # gpt-oss without sinks
        ("bf16 MoE", {"logprob_abs_diff_mean": (0.139, 0.13, 0.148)}, False),  # another checkpoint
        ("bf16 MoE", {"logprob_abs_diff_mean": (0.0177, 0.016, 0.019)}, True),  # mended gpt-oss-20b
        ("bf16 dense",
         {"logprob_abs_diff_mean": (0.04, 0.038, 0.042), "k3_kl": (2.4e-3, 2.2e-3, 2.6e-3)},
         True),  # SmolLM2-135M, sound
        ("bf16 MoE", {"k3_kl": (1.5e-3, 1.0e-3, 2.4e-3)}, True),  # Qwen3-30B-A3B
    ],
)  # fmt: skip
def test_published_runs_pass_where_they_were_sound(column, values, passes):
    table = default_thresholds()
    judged = [
        judge_one(metric, Estimate(*ends, 8192, 64, 16), table[metric][column])
        for metric, ends in values.items()
    ]
    assert (exit_code(verdict(judged, [], column)) == 0) is passes


def with_laws(folder: Path, infinite: bool) -> Path:
    """A run whose trainer gives no probability to tokens that the engine allows."""
    rollout = sampled(prompts=16, samples=2, response=40)
    rng = np.random.default_rng(1)
    n, size = rollout.n_actions, 50
    law = np.log(rng.dirichlet(np.ones(size), n))
    token = np.array([rng.choice(size, p=np.exp(row)) for row in law])
    ids = rollout.token_ids.copy()
    ids[rollout.actions] = token
    rollout = replace(rollout, token_ids=ids)
    other = law + 0.003 * rng.normal(size=law.shape)
    positions = np.arange(0, n, 10)
    if infinite:
        for row in positions[:20]:
            other[row, law[row].argmin() if law[row].argmin() != token[row] else 0] = -np.inf
            other[row, token[row]] = law[row, token[row]]
    other -= np.log(np.exp(other).sum(axis=1, keepdims=True))
    laws = [Distributions(positions, side[positions].astype(np.float32), size)
            for side in (law, other)]  # fmt: skip
    return saved(folder, rollout, law[np.arange(n), token], other[np.arange(n), token],
                 one={"distributions": laws[0]}, two={"distributions": laws[1]})  # fmt: skip


def test_an_infinite_exact_kl_is_the_worst_value(tmp_path):
    cells = levels(tmp_path, '[exact_kl."bf16 dense"]\nhealthy=0.01\nunfit=0.1')
    sound = report_of(with_laws(tmp_path / "a", infinite=False), thresholds=cells)
    broken = report_of(with_laws(tmp_path / "b", infinite=True), thresholds=cells)
    status = [{j.metric: j.status for j in report.verdict.judgements} for report in (sound, broken)]
    assert status[0]["exact_kl"] == "healthy"
    assert status[1]["exact_kl"] == "unfit"
    assert broken.verdict.status == "unfit"
    assert broken.comparisons[0].metrics["exact_kl"].value == np.inf


# ---------------------------------------------------------------- checks with nothing to look at


def test_checks_of_nothing_do_not_pass():
    weights = {f"layers.{i}": [float(i), 1.0] for i in range(299)} | {"norm": [1.0, 2.0]}
    few = weights_as_loaded({"weights": {"norm": [1.0, 2.0]}}, {"weights": weights})
    assert few.status == "not_tested"
    assert "1 of 300" in few.detail
    disjoint = source_files(
        {"source_files": {"config.json": "x"}}, {"source_files": {"tokenizer.json": "y"}}
    )
    assert disjoint.status == "not_tested"
    one_sided = source_files(
        {"source_files": {"config.json": "x"}},
        {"source_files": {"config.json": "x", "pytorch_model.bin": "z"}},
    )
    assert one_sided.status == "failed"
    rollout = sampled(prompts=4, samples=2, response=8)
    left = Scoring("e:decode", rollout.token_ids[rollout.actions], likely(rollout),
                   {"stop_token_ids": [2]})  # fmt: skip
    assert special_tokens(rollout, left, left).status == "not_tested"


@pytest.mark.parametrize(
    ("cap", "kernel", "status"),
    [
        (50.0, "sdpa", "failed"),
        (50.0, "eager", "passed"),
        (50.0, "flash_attention_2", "passed"),
        (50.0, "a_users_own", None),  # its name does not say
        (None, "sdpa", None),
    ],
)
def test_a_kernel_that_ignores_a_declared_cap_fails(cap, kernel, status):
    config = SimpleNamespace(attn_logit_softcapping=cap)
    config.get_text_config = lambda: config
    facts = {"attention": kernel, "honours_softcap": honours_softcap(config, kernel)}
    checks = attention_softcap(facts)
    assert [check.status for check in checks] == ([] if status is None else [status])
    assert all("--attention eager" in check.fix for check in checks if status == "failed")


def test_fewer_ranks_than_asked_for_are_said():
    assert sharding_checks(2, {"world_size": 1})[0].status == "warning"
    assert sharding_checks(1, {"world_size": 1})[0].status == "not_tested"
    assert sharding_checks(2, {"world_size": 4})[0].status == "passed"


# ---------------------------------------------------------------- routes


LAYERS, TOP, EXPERTS = 4, 4, 32


def routes(rollout: Rollout, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = rng.random((len(rollout.token_ids), LAYERS, EXPERTS))
    return scores.argsort(axis=-1)[..., :TOP].astype(np.uint8)


def routed(ids: np.ndarray) -> Routing:
    return Routing(tuple(range(LAYERS)), EXPERTS, ids, np.ones(len(ids), bool))


@pytest.mark.parametrize(
    ("fault", "status"),
    [("none", "passed"), ("random", "failed"), ("shifted", "failed"),
     ("one layer", "warning")],
)  # fmt: skip
def test_routes_are_held_against_chance_and_against_other_rows(fault, status, tmp_path):
    rollout = sampled(prompts=16)
    ids = routes(rollout, 0)
    other = {
        "none": ids,
        "random": routes(rollout, 1),
        "shifted": np.roll(ids, 1, axis=0),
        "one layer": np.concatenate([routes(rollout, 1)[:, :1], ids[:, 1:]], axis=1),
    }[fault]
    left = likely(rollout)
    moe = {"moe": True}
    run = saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.005), None, moe, moe,
                  one={"routing": routed(ids)}, two={"routing": routed(other)})  # fmt: skip
    report = report_of(run)
    statuses = {check.id: check.status for check in report.checks}
    assert statuses["routes-agree"] == status
    assert (report.verdict.status == "broken") is (status == "failed")


def test_replayed_routes_are_equal_by_construction_and_not_checked():
    rollout = sampled(prompts=4)
    left = Scoring("e:decode", rollout.token_ids[rollout.actions], likely(rollout), {},
                   routing=routed(routes(rollout, 0)))  # fmt: skip
    right = replace(left, fingerprint={"replay": {"mode": "ids", "source": "e:decode"}})
    assert routing_checks(rollout, left, right) == []


def test_agreement_beyond_chance_by_hand():
    a = np.array([[[0, 1]], [[2, 3]]])
    assert beyond_chance(a, a, 4)[0] == 1.0
    # Loads are one half each: chance is 4 * 1/4 / 2 = 1/2. Sets exchanged between the two tokens.
    assert beyond_chance(a, a[::-1], 4)[0] == pytest.approx((0.0 - 0.5) / 0.5)
