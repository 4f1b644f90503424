"""Recorded importance ratios: what they are of, by ratios of known kinds, whoever reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch.features.recorded.dumps import read_recorded
from mismatch.features.recorded.ratios import Ratios
from mismatch.metrics.row_sums import Row

from .. import recorded_folders as made

KINDS: dict[str, Any] = {
    "token": np.exp,
    "sequence": lambda delta: np.full(len(delta), np.exp(delta.sum())),
    "mean": lambda delta: np.full(len(delta), np.exp(delta.mean())),
    "inverse": lambda delta: np.exp(-delta),
    "one": np.ones_like,
}


def row(number: int, seed: int, ratio: Any, spread: float = 0.3) -> Row:
    random = np.random.default_rng([seed, number])
    rollout = -random.exponential(1.0, 30) - 0.01
    delta = spread * random.standard_normal(30)
    made = Row(np.arange(30), np.ones(30, np.bool_), rollout, rollout + delta)
    made.ratios, made.number = np.float32(ratio(delta)).astype(np.float64), number
    return made


def counted(ratio: Any, seed: int = 0, rows: int = 12, **more: Any) -> Ratios:
    found = Ratios()
    for number in range(rows):
        found.add(row(number, seed, ratio, **more))
    return found


@given(st.integers(0, 2**20), st.sampled_from([*KINDS]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_kind_is_told(seed: int, kind: str) -> None:
    found = counted(KINDS[kind], seed)
    assert found.kind() == kind
    assert found.agree() == (kind in ("token", "sequence", "mean"))


@given(st.integers(0, 2**20), st.floats(1.05, 1.5), st.floats(0.5, 0.95))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_bounds_are_said_and_no_disagreement(seed: int, most: float, least: float) -> None:
    found = counted(lambda delta: np.clip(np.exp(delta), least, most), seed)
    assert found.agree()
    assert f"at most {most:.3g}" in found.sentence()
    assert f"at least {least:.3g}" in found.sentence()


def test_ratios_of_another_pass_disagree_and_the_worst_is_named() -> None:
    noise = np.random.default_rng(1)
    found = counted(lambda delta: np.exp(delta + 0.1 * noise.standard_normal(30)))
    assert not found.agree()
    assert "disagree" in found.sentence()
    assert found.worst is not None
    assert f"row {found.worst[1].row}, sampled token {found.worst[1].token}" in found.sentence()


def test_ratios_near_one_tell_nothing_and_zeros_are_counted() -> None:
    assert "too near 1" in counted(np.ones_like, spread=0.001).sentence()
    zeros = counted(lambda delta: np.where(delta > 0.3, 0.0, np.exp(delta)))
    assert zeros.agree()
    assert f"to 0 at {zeros.zeros:,} tokens" in zeros.sentence()


@pytest.mark.parametrize("kind", [*KINDS])
def test_parts_of_a_dump_give_what_the_whole_gives(kind: str) -> None:
    whole, first, second = counted(KINDS[kind]), Ratios(), Ratios()
    for number in range(12):
        each = row(number % 5 if number < 5 else number, 0, KINDS[kind])
        each.number = number if number < 5 else number - 5
        (first if number < 5 else second).add(each)
    first.merge(second, 5)
    assert first == whole


def test_what_a_row_says_of_itself_is_kept(tmp_path: Path) -> None:
    rows = made.samples(16)
    entries = []
    for number, each in enumerate(rows):
        n = len(each.response)
        entries.append({
            "token_ids": each.prompt + each.response,
            "action_mask": [0] * len(each.prompt) + [1] * n,
            "rollout_logprobs": each.rollout, "train_logprobs": each.train,
            "sample_id": f"s{number}", "truncated": number % 2, "reward": 0.5,
            "turn_ids": [0] * len(each.prompt) + [1] * (n // 2) + [2] * (n - n // 2),
            "log_importance_ratio": np.subtract(each.train, each.rollout).tolist(),
            "step": 1, "note": "x",
        })  # fmt: skip
    recorded = read_recorded(made.lines(tmp_path / "rows.jsonl", entries))
    assert recorded.unread == {"note"}
    assert recorded.ratios.tokens == recorded.sums.tokens
    assert [each.attributes["sample_id"] for each in recorded.sequences[:2]] == ["s0", "s1"]
    assert [each.finish_reason for each in recorded.sequences[:2]] == ["stop", "length"]
    from mismatch.features.recorded.run import as_run
    from mismatch.types import Sampling

    assert set(as_run(recorded, Sampling(), {}, {}).rollout.turn.tolist()) == {0, 1, 2}
