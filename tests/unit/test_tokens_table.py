"""The tokens table: what stands in it is what the artefacts say, token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch.captures import Distributions, Likeliest
from mismatch.errors import MismatchError
from mismatch.experiments.results import FixOutcome, FixTable
from mismatch.pipeline import tokens
from mismatch.pipeline.tokens import record_best_fix, token_table
from mismatch.run import store
from mismatch.run.tables import write_table
from mismatch.types import Rollout, Routing, Sampling, Scoring
from tests.reports_fixture import make_report

# Two samples of prompt 7 (tokens 5 6), one with a tool's answer (8) between its turns; one of 4.
IDS = np.array([5, 6, 10, 8, 11, 5, 6, 12, 9, 3])
ROLLOUT = Rollout(
    token_ids=IDS,
    offsets=np.array([0, 5, 8, 10]),
    action_mask=np.array([0, 0, 1, 0, 1, 0, 0, 1, 0, 1], bool),
    turn=np.array([0, 0, 1, 1, 2, 0, 0, 1, 0, 1]),
    prompt_index=np.array([7, 7, 4]),
    finish_reason=("stop",) * 3,
    sampling=Sampling(),
    fingerprint={},
    rewards=np.array([1.0, 0.0, 0.5]),
)
TEXTS = {5: "A", 6: "B", 8: "tool", 9: "C", 10: " ten", 11: "11", 12: "\n"}


def scoring(name: str, logprobs: list[float], **more) -> Scoring:
    ids = IDS[ROLLOUT.actions]
    return Scoring(name, ids, np.array(logprobs), {"stop_token_ids": [3]}, **more)


DECODE = scoring("vllm:decode", [-1.0, -2.0, -3.0, -4.0])
TRAIN = scoring("fsdp", [-1.5, -2.0, -2.0, -4.0], entropy=np.arange(4.0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    store.save_rollout(tmp_path, ROLLOUT)
    store.save_vocabulary(tmp_path, TEXTS)
    return tmp_path


def saved(run: Path, *sides: Scoring):
    store.save_tokens(run, token_table(run, ROLLOUT, *sides))
    return store.load_tokens(run)


def test_each_token_stands_with_its_place_context_class_and_reward(run: Path) -> None:
    table = saved(run, DECODE, TRAIN, scoring("reference:fp32", [-1.1] * 4))
    columns = {name: table[name].tolist() for name in table.columns}
    assert columns["sequence"] == [0, 0, 1, 2]
    assert columns["prompt"] == [7, 7, 7, 4]
    assert columns["sample"] == [0, 0, 1, 0]
    assert columns["position"] == [2, 4, 2, 1]
    assert columns["reward"] == [1.0, 1.0, 0.0, 0.5]
    assert columns["token_class"] == ["word", "digit", "whitespace", "special"]
    assert columns["token"] == [" ten", "11", "\n", "<3>"]
    assert [list(texts) for texts in columns["context"]] == [
        ["A", "B"],
        ["tool"],
        ["A", "B"],
        ["C"],
    ]
    assert columns["delta"] == [-0.5, 0.0, 1.0, 0.0]
    assert columns["reference_logprob"] == [-1.1] * 4
    assert "top_ids" not in columns
    assert "routing_margin" not in columns


def test_half_a_surrogate_pair_can_be_saved(run: Path) -> None:
    store.save_vocabulary(run, TEXTS | {10: "a\ud83d", 11: "\ud83d\ude00"})
    assert saved(run, DECODE, TRAIN)["token"].tolist()[:2] == ["a\ufffd", "\U0001f600"]


def test_tokens_after_the_last_action_belong_to_no_row(run: Path) -> None:
    mask = ROLLOUT.action_mask.copy()
    mask[4] = False  # the first sequence now ends with a tool's answer and one more given token
    rollout = replace(ROLLOUT, action_mask=mask)
    sides = [replace(s, token_ids=IDS[rollout.actions], logprobs=np.zeros(3), entropy=None)
             for s in (DECODE, TRAIN)]  # fmt: skip
    table = token_table(run, rollout, *sides)
    assert [list(texts) for texts in table["context"]] == [["A", "B"], ["A", "B"], ["C"]]


def test_flipped_layers_are_lists_with_the_smallest_margin(run: Path) -> None:
    ids = np.tile(np.array([[[0, 1], [2, 3]]], np.uint8), (10, 1, 1))
    ids[::2] = ids[::2] ^ 1  # not the same everywhere: that would be a corrupt capture
    other = ids.copy()
    other[3] = [[4, 1], [2, 5]]  # forward of token 3 predicts the action at row 4
    margin = np.linspace(1, 2, 20, dtype=np.float32).reshape(10, 2)
    present = np.ones(10, bool)
    sides = (
        replace(DECODE, routing=Routing((3, 6), 8, ids, present)),
        replace(TRAIN, routing=Routing((3, 6), 8, other, present, margin=margin)),
    )
    table = saved(run, *sides)
    assert [list(layers) for layers in table["routing_flipped_layers"]] == [[], [3, 6], [], []]
    assert table["routing_flips"].tolist() == [0, 2, 0, 0]
    assert table["routing_margin"].tolist() == margin[ROLLOUT.actions - 1, 0].tolist()


def test_both_sides_likeliest_outcomes_stand_at_the_sampled_positions(run: Path) -> None:
    left = np.log(np.array([[0.5, 0.2, 0.1, 0.1, 0.05, 0.04, 0.01]], np.float32))
    right = left[:, [1, 0, 2, 3, 4, 6, 5]]
    both = [Distributions(np.array([2]), law, 7) for law in (left, right)]
    sides = [replace(s, distributions=d) for s, d in zip((DECODE, TRAIN), both, strict=True)]
    table = saved(run, *sides)
    assert [list(ids) for ids in table["top_ids"]] == [[], [], [0, 1, 2, 3, 4], []]
    assert list(table["top_tokens"][2])[:2] == ["<0>", "<1>"]
    assert list(table["top_rollout"][2]) == pytest.approx(left[0, :5].tolist())
    assert list(table["top_train"][2]) == pytest.approx(right[0, :5].tolist())


def test_the_worst_tokens_have_what_either_side_named(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 0 and 2 are furthest apart. An outcome that a side did not name is NaN, not 0."""
    monkeypatch.setattr(tokens, "WORST", 2)
    ids = np.array([[10, 5], [11, 5], [6, 5], [3, 5]], np.int32)
    left = Likeliest(ids, np.tile(np.float32([-1.0, -2.0]), (4, 1)))
    right = Likeliest(np.where(ids == 5, 9, ids), np.tile(np.float32([-1.5, -3.0]), (4, 1)))
    train = replace(TRAIN, likeliest=right)
    table = saved(run, replace(DECODE, likeliest=left), train)
    assert [list(ids) for ids in table["top_ids"]] == [[10, 5, 9], [], [6, 5, 12, 9], []]
    assert list(table["top_tokens"][2]) == ["B", "A", "\n", "C"]  # the sampled one among them
    np.testing.assert_array_equal(table["top_rollout"][2], [-1.0, -2.0, -3.0, np.nan])
    np.testing.assert_array_equal(table["top_train"][2], [-1.5, np.nan, -2.0, -3.0])
    assert "top_ids" not in saved(run, DECODE, train)


def test_whole_distributions_say_more_than_the_likeliest(run: Path) -> None:
    law = np.log(np.array([[0.5, 0.2, 0.1, 0.1, 0.05, 0.04, 0.01]], np.float32))
    named = Likeliest(np.zeros((4, 1), np.int32), np.zeros((4, 1), np.float32))
    sides = [
        replace(side, distributions=Distributions(np.array([2]), law, 7), likeliest=named)
        for side in (DECODE, TRAIN)
    ]
    table = saved(run, *sides)
    assert [len(ids) for ids in table["top_ids"]] == [2, 2, 5, 2]
    assert not np.isnan(np.asarray(table["top_train"][2])).any()


def fixed(*outcomes: FixOutcome, best: str):
    return make_report().with_analyses(fixes=FixTable(outcomes, best=best))


def test_the_best_fix_that_kept_the_tokens_is_recorded_once(run: Path) -> None:
    table = saved(run, DECODE, TRAIN)
    store.save_scoring(run, scoring("fix:b", [-9.0] * 4), ROLLOUT)
    store.save_scoring(run, scoring("fix:c", [-8.0] * 4), ROLLOUT)
    rows = [FixOutcome(id, "train", "", outcome=effect)  # "a" sampled tokens of its own
            for id, effect in (("a", "better"), ("b", "better"), ("c", "none"))]  # fmt: skip
    updated = record_best_fix(run, fixed(*rows, best="b"), table)
    for recorded in (updated, store.load_tokens(run)):
        assert recorded["fix"].tolist() == ["b"] * 4
        assert recorded["fix_logprob"].tolist() == [-9.0] * 4
    assert "fix" not in record_best_fix(run, fixed(*rows, best="a"), table)
    assert "fix" not in record_best_fix(run, make_report(), table)


def test_a_table_of_another_version_is_refused(run: Path) -> None:
    columns = {name: [0] for name in store.REQUIRED_COLUMNS[store.TOKENS_SCHEMA]}
    (run / "manifest.json").unlink()  # files that came without one are read
    for version in (1, 3):
        write_table(run / store.TOKENS, columns, f"mismatch.tokens/{version}", {})
        with pytest.raises(MismatchError, match=rf"tokens/{version}.*{store.TOKENS_SCHEMA}"):
            store.load_tokens(run)
