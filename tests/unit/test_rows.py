"""Which rows of a run are off: planted in part of the rows, and silence on clean ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mismatch.cli.main import app
from mismatch.features.recorded import command
from mismatch.features.recorded.facts import RecordedReport, checks
from mismatch.features.recorded.rows import IN_TURN, LEAST_ROWS, RowGroups, row_groups
from mismatch.features.recorded.section import section
from mismatch.metrics import ess_seq, k3_kl
from mismatch.metrics.row_sums import Row, Step, Sums
from mismatch.types import Pair, Rollout, Sampling
from tests.command import mismatch
from tests.reports_fixture import make_report
from tests.texts import numbers

ROWS, TOKENS = 240, 60
Edit = Callable[[int, np.ndarray, np.random.Generator], None]


def drawn(seed: int, edit: Edit | None = None) -> tuple[Pair, Rollout]:
    """Draw rows whose error grows with the token's surprise, as rounding does; edit some."""
    rng = np.random.default_rng(seed)
    left, right = [], []
    for row in range(ROWS):
        logprobs = -rng.exponential(0.5 * rng.lognormal(0, 0.3), TOKENS)
        train = logprobs * np.exp(0.02 * rng.standard_t(4, TOKENS))
        if edit is not None:
            edit(row, train, rng)
        left.append(logprobs)
        right.append(train)
    rollout = Rollout(
        token_ids=np.ones(ROWS * (TOKENS + 1), np.int64),
        offsets=np.arange(ROWS + 1) * (TOKENS + 1),
        action_mask=np.tile([False] + [True] * TOKENS, ROWS),
        turn=np.tile([0] + [1] * TOKENS, ROWS),
        prompt_index=np.arange(ROWS) // 4,
        finish_reason=("stop",) * ROWS,
        sampling=Sampling(),
        fingerprint={},
    )
    sequence = np.repeat(np.arange(ROWS), TOKENS)
    both = np.concatenate(left), np.concatenate(right)
    return Pair(*both, sequence, rollout.prompt_index), rollout


ORDER = {"row": [str(row) for row in range(ROWS)]}
REPLICAS = ORDER | {"replica": [str(row % 4) for row in range(ROWS)]}


def noisy(size: float) -> Edit:
    def edit(row: int, train: np.ndarray, rng: np.random.Generator) -> None:
        if row % 4 == 3:
            train *= np.exp(size * rng.standard_normal(TOKENS))

    return edit


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_differ_by_chance_are_one_group(seed: int) -> None:
    groups = row_groups(*drawn(seed), REPLICAS)
    assert groups.sentence() == ""
    assert groups.rows == ROWS


@pytest.mark.parametrize("size", [0.04, 0.3])
def test_a_bad_replica_is_named(size: float) -> None:
    """Also where its rows are no group of their own: a weak fault of one source of rows."""
    groups = row_groups(*drawn(1, noisy(size)), REPLICAS)
    assert set(groups.off) == set(range(3, ROWS, 4))
    best = groups.shared[0]
    assert (best.attribute, best.values) == ("replica", ("3",))
    assert "replica 3" in groups.sentence()


def test_a_rank_that_the_dump_does_not_name_is_seen_by_the_order_of_rows() -> None:
    groups = row_groups(*drawn(2, noisy(0.3)), ORDER)
    assert groups.shared[0].attribute == f"{IN_TURN} 4:"
    assert groups.shared[0].values == ("3",)


def test_bad_rows_that_share_nothing_are_counted() -> None:
    bad = set(np.random.default_rng(0).choice(ROWS, 40, replace=False).tolist())

    def edit(row: int, train: np.ndarray, rng: np.random.Generator) -> None:
        if row in bad:
            train *= np.exp(0.4 * rng.standard_normal(TOKENS))

    groups = row_groups(*drawn(3, edit), REPLICAS)
    assert set(groups.off) == bad
    assert groups.shared == ()


def test_weights_that_change_inside_rows_are_seen() -> None:
    def edit(row: int, train: np.ndarray, rng: np.random.Generator) -> None:
        if row % 3 == 0:
            train[30:] *= np.exp(0.2 * rng.standard_normal(TOKENS - 30))

    groups = row_groups(*drawn(4, edit), REPLICAS)
    assert groups.change_at == pytest.approx(0.5, abs=0.05)
    assert groups.change_factor > 3
    assert groups.off == ()


def test_too_few_rows_are_not_called_alike() -> None:
    report = RecordedReport("dump.jsonl", "generic", rows=RowGroups(LEAST_ROWS - 1))
    status = {check.id: check.status for check in checks(report)}
    assert status["which-rows"] == "not_tested"


def test_steps_hold_the_numbers_of_their_rows() -> None:
    pair, _ = drawn(5, noisy(0.3))
    sums = Sums()
    for row in range(ROWS):
        at = pair.sequence == row
        sides = pair.rollout[at], pair.train[at]
        label = {"step": "7" if row % 4 == 3 else "2"}
        ids = np.arange(at.sum() + 1)
        sums.add([Row(ids, ids > 0, *sides, reward=1.0, attributes=label)])
    first, second = sums.steps()
    assert (first.step, second.step) == (2, 7)
    assert first.tokens == 3 * second.tokens == ROWS // 4 * 3 * TOKENS
    at = np.isin(pair.sequence, range(3, ROWS, 4))
    assert second.abs_diff == pytest.approx(np.abs(pair.delta[at]).mean())
    assert second.abs_diff > 3 * first.abs_diff
    assert second.ess == pytest.approx(ess_seq(pair.delta[at], pair.sequence[at]))
    assert (second.reward, second.entropy) == (1.0, None)
    whole = sums.whole.step(0)
    assert whole.tokens == sums.tokens == ROWS * TOKENS
    assert whole.k3 == pytest.approx(k3_kl(pair.delta))
    sums.add([Row(np.arange(2), np.arange(2) > 0, np.zeros(1), np.zeros(1))])
    assert sums.steps() == ()  # a row that names no step


def test_rows_added_together_give_the_sums_of_rows_added_alone() -> None:
    rng = np.random.default_rng(6)
    rows = []
    for number, tokens in enumerate((3, 1, 40, 7, 0, 12, 2)):
        ids = np.arange(tokens + 1)
        sides = -rng.exponential(1.0, (3, tokens))
        rows.append(Row(ids, ids > 0, *sides, attributes={"step": str(number % 2)}))
    rows[2].logprobs[5], rows[3].train_logprobs[:] = np.nan, -np.inf
    rows[5].train_logprobs = rows[6].entropy = None
    rows[5].logprobs[3] = np.inf
    together, alone = Sums(), Sums()
    together.add(rows)
    for row in rows:
        alone.add([row])
    for both in (
        (together.whole, alone.whole),
        *zip(*map(by_step, (together, alone)), strict=True),
    ):
        left, right = (list(vars(rows).values()) for rows in both)
        assert np.hstack(left) == pytest.approx(np.hstack(right), nan_ok=True)
    assert (together.not_finite, together.bad_rows) == (alone.not_finite, alone.bad_rows)
    assert (together.rows, together.tokens, together.one_sided) == (7, 65, 1)
    assert together.whole.tokens == 3 + 1 + 39 + 2
    assert len(together.whole.log_ratios) == 4
    delta = (rows[2].train_logprobs - rows[2].logprobs)[np.arange(40) != 5]
    assert together.whole.log_ratios[2] == pytest.approx(delta.sum())
    assert +together.not_finite == {
        ("rollout", "NaN or null"): 1,
        ("trainer", "-inf"): 7,
        ("rollout", "+inf"): 1,
    }


def by_step(sums: Sums) -> list[object]:
    return [sums.by_step[name] for name in sorted(sums.by_step)]


def dumped(dump: Path, pair: Pair, *, alike: bool = True) -> Path:
    """A dump of both sides, four rows a prompt, of four replicas and two steps."""
    with dump.open("w") as file:
        for row in range(ROWS):
            at = pair.sequence == row
            entry = {
                "prompt_token_ids": [1, 2 if alike else row // 4],
                "response_token_ids": list(range(10, 10 + TOKENS)),
                "rollout_logprobs": pair.rollout[at].tolist(),
                "train_logprobs": pair.train[at].tolist(),
                "prompt_id": row // 4,
                "replica": row % 4,
                "step": row // 120,
            }
            file.write(json.dumps(entry) + "\n")
    return dump


def test_of_a_large_dump_a_part_is_judged_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, _ = drawn(7, lambda row, train, rng: None)
    monkeypatch.setattr(command, "MOST", 8_000)
    asked = [
        "postmortem",
        str(dumped(tmp_path / "d.jsonl", pair, alike=False)),
        "--out",
        str(tmp_path / "r"),
    ]
    done = CliRunner().invoke(app, asked)
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    whole, judged = report["recorded"]["whole"], report["comparisons"][0]["metrics"]["k3_kl"]
    assert whole["tokens"] == ROWS * TOKENS
    assert whole["abs_diff"] == pytest.approx(np.abs(pair.delta).mean())
    assert judged["n_tokens"] <= 8_000 < sum(s["tokens"] for s in report["recorded"]["steps"])
    assert judged["n_sequences"] == 4 * judged["n_prompts"]
    assert f"{whole['tokens']:,}" in done.output
    assert f"{whole['tokens']:,}" in (tmp_path / "r" / "report.html").read_text()
    assert any("other" in entry["what"] for entry in report["not_tested"])


def test_a_step_beyond_every_number_has_crossed_the_bounds() -> None:
    """An infinite k3 is stored as null, which is read as NaN."""
    steps = (Step(4, 9, 0.01, 1e-4, 0.0, 1.0), Step(5, 9, 0.01, float("nan"), 0.0, 1.0))
    report = RecordedReport("dump.jsonl", "generic", steps=steps)
    said = [numbers(text) for text in section(report, make_report()).sentences]
    assert [found[-1] for found in said] == [5, 5]  # healthy and unfit


def test_a_dump_becomes_a_report_without_a_model(tmp_path: Path) -> None:
    """From a file of both sides to a verdict, the replica at fault and an exit code."""
    pair, _ = drawn(6, noisy(0.5))
    dump = dumped(tmp_path / "dump.jsonl", pair)
    out = tmp_path / "run"
    done = mismatch("postmortem", dump, "--out", out, "--fail-on", "inconclusive")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["recorded"]["rows"]["shared"][0]["values"] == ["3"]
    assert [step["step"] for step in report["recorded"]["steps"]] == [0, 1]
    assert report["verdict"]["correctness"]["status"] == "inconclusive"
    assert "read-rollouts" in report["next"][0]  # nothing was left out
    assert "replica 3" in (out / "report.html").read_text()
    one = mismatch("postmortem", dump, "--step", "1", "--out", tmp_path / "one")
    assert "120 sequences" in one.stdout + one.stderr
    wrong = mismatch("postmortem", dump, "--step", "9", "--out", tmp_path / "nine")
    assert wrong.returncode == 2
    assert not (tmp_path / "nine").exists()
