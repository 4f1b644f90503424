"""Where and when: tables put planted differences into the right bucket and lose no token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.breakdowns import (
    TOKEN_CLASSES,
    Places,
    breakdowns,
    by_block,
    special_ids,
    token_class,
)
from mismatch.reports.formatting import percent
from mismatch.reports.sections import breakdowns as shown_groups
from mismatch.types import CACHED, Pair, Rollout, Sampling, Scoring
from tests.reports_fixture import make_report
from tests.texts import numbers

# Two turns: a prompt of 3, a turn of 5 tokens, a tool's output of 2, a turn of 4.
TURN = np.array([0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2])
SEQUENCES, WIDTH = 6, len(TURN)
TEXTS = {0: " the", 1: "12", 2: "\n", 3: "<|end|>", 4: ").", 5: "x9"}


def two_sides(**sides) -> tuple[Rollout, Scoring, Scoring, Pair]:
    rng = np.random.default_rng(0)
    mask = np.tile(TURN > 0, SEQUENCES)
    rollout = Rollout(
        token_ids=rng.integers(0, 6, SEQUENCES * WIDTH),
        offsets=np.arange(SEQUENCES + 1) * WIDTH,
        action_mask=mask,
        turn=np.tile(TURN, SEQUENCES),
        prompt_index=np.arange(SEQUENCES) // 2,
        finish_reason=("stop",) * SEQUENCES,
        sampling=Sampling(),
        fingerprint={},
    )
    ids = rollout.token_ids[mask]
    logprobs = np.log(rng.uniform(0.05, 0.99, mask.sum()))
    left = Scoring("left", ids, logprobs, dict(sides))
    right = Scoring("right", ids, logprobs.copy(), {})
    return rollout, left, right, Pair.of(rollout, left, right)


ROLLOUT, LEFT, RIGHT, PAIR = two_sides()
A = ROLLOUT.n_actions
PER = (TURN > 0).sum()


def tables(off: np.ndarray, step: float = 0.5, **facts) -> dict:
    """The breakdowns where ``off`` tokens differ by ``step`` and all others by nothing."""
    right = replace(RIGHT, logprobs=LEFT.logprobs + np.where(off, step, 0.0))
    left = replace(LEFT, fingerprint=facts)
    return breakdowns(ROLLOUT, left, right, Pair.of(ROLLOUT, left, right), TEXTS)


def column(table: dict, key: str, name: str = "mean_abs_delta") -> dict:
    return dict(zip(table[key], table[name], strict=True))


def test_every_grouping_table_holds_every_token_and_the_whole_k3():
    got = tables(np.random.default_rng(3).random(A) < 0.3)
    for name, table in got.items():
        assert len({len(values) for values in table.values()}) == 1, name
        if "count" in table:
            assert sum(table["count"]) == A, name
            assert sum(table["k3_share"]) == pytest.approx(1.0), name
            mean = np.dot(table["count"], table["mean_abs_delta"]) / A
            assert mean == pytest.approx(0.5 * 0.3, abs=0.06), name
            assert np.dot(table["count"], table["mean_delta"]) / A == pytest.approx(mean), name


def test_turns():
    off = ROLLOUT.turn[ROLLOUT.actions] == 2
    assert column(tables(off)["by_turn"], "turn") == {1: 0.0, 2: 0.5}


def test_first_and_last_tokens_of_each_turn():
    index = np.tile(np.arange(PER), SEQUENCES)
    first = (index == 0) | (index == 5)  # of turn 1, of turn 2
    got = tables(first)["by_edge"]
    edges = ("first", "after an observation", "inner", "last")
    assert column(got, "edge") == dict(zip(edges, (0.5, 0.5, 0.0, 0.0), strict=True))
    assert column(got, "edge", "count") == dict(zip(edges, (6, 6, 30, 12), strict=True))
    last = (index == 4) | (index == 8)
    assert column(tables(last)["by_edge"], "edge")["last"] == 0.5


def test_turns_that_were_read_from_the_prefix_cache():
    turn, sequence = ROLLOUT.turn[ROLLOUT.actions], PAIR.sequence
    read = np.where(turn == 2, 32.0, np.where(sequence == 0, 16.0, 0.0))
    read[sequence == 1] = np.nan
    left = replace(LEFT, extra={CACHED: read})
    right = replace(RIGHT, logprobs=LEFT.logprobs + 0.5 * (turn == 2))
    got = breakdowns(ROLLOUT, left, right, Pair.of(ROLLOUT, left, right))["by_cache"]
    assert got["turns"] == ["first, cold", "first, hit", "later, hit"]
    assert got["mean_cached"] == [0.0, 16.0, 32.0]
    assert got["mean_abs_delta"] == [0.0, 0.0, 0.5]
    assert sum(got["count"]) == int((sequence != 1).sum())
    assert "by_cache" not in tables(turn == 2)


def test_kinds_of_tokens():
    ids = ROLLOUT.token_ids[ROLLOUT.actions]
    got = tables(ids == 3)["by_token_class"]
    assert column(got, "token_class") == {
        "special": 0.5, "whitespace": 0.0, "digit": 0.0, "word": 0.0, "other": 0.0,
    }  # fmt: skip
    assert column(got, "token_class", "count")["word"] == int(np.isin(ids, [0, 5]).sum())
    by_class = tables(ids == 0, stop_token_ids=[0])["by_token_class"]  # the engine says: id 0 stops
    assert column(by_class, "token_class")["word"] == 0.0
    assert "by_token_class" not in breakdowns(ROLLOUT, LEFT, RIGHT, PAIR)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<|im_end|>", "special"), ("<｜end▁of▁sentence｜>", "special"), ("</s>", "special"),
        (" ", "whitespace"), ("\n\n", "whitespace"), ("7", "digit"), (" 3.5", "digit"),
        ("x2", "word"), ("Ünder", "word"), ("你好", "word"), ("+", "other"), ("<", "other"),
        ("", "unknown"), (None, "unknown"),
    ],
)  # fmt: skip
def test_token_class(text, kind):
    assert token_class(text) == kind
    assert kind in TOKEN_CLASSES
    assert token_class(text, special=True) == "special"
    assert special_ids({"stop_token_ids": [1, 2], "bos_token_id": None}) == {1, 2}


def test_positions_within_the_response_and_in_the_sequence():
    index = np.tile(np.arange(PER), SEQUENCES)
    got = tables(index >= 5)
    assert column(got["by_position"], "start") == {i: 0.5 * (i >= 5) for i in range(PER)}
    starts = np.flatnonzero(TURN > 0)
    assert got["by_absolute_position"]["start"] == starts.tolist()
    assert got["by_absolute_position"]["mean_abs_delta"] == [0.0] * 5 + [0.5] * 4


def test_entropy_and_probability_buckets():
    entropy = np.tile([0.005, 0.5, 9.0], A // 3)
    right = replace(RIGHT, logprobs=LEFT.logprobs + (entropy > 4), entropy=entropy)
    got = breakdowns(ROLLOUT, LEFT, right, Pair.of(ROLLOUT, LEFT, right))
    table = got["by_entropy"]
    assert (table["low"], table["high"]) == ([0.0, 0.3, 4.0], [0.01, 1.0, None])
    assert table["mean_abs_delta"] == [0.0, 0.0, 1.0]
    assert table["count"] == [A // 3] * 3
    assert "by_entropy" not in tables(np.zeros(A, bool))


def test_length_of_the_sequence():
    lengths = np.array([1, 2, 3, 9])
    width = 10
    mask = np.concatenate([np.arange(width) >= width - n for n in lengths])
    rollout = Rollout(
        np.arange(40), np.arange(5) * width, mask, mask.astype(np.int64), np.arange(4),
        ("stop",) * 4, Sampling(), {},
    )  # fmt: skip
    ids = np.arange(40)[mask]
    left = Scoring("l", ids, np.full(15, -1.0), {})
    right = Scoring("r", ids, np.full(15, -0.9), {})
    table = breakdowns(rollout, left, right, Pair.of(rollout, left, right))["by_length"]
    assert (table["start"], table["end"]) == ([1, 2, 8], [2, 4, 16])
    assert table["sequences"] == [1, 2, 1]
    assert table["count"] == [1, 5, 9]
    assert table["mean_abs_seq_logratio"] == pytest.approx([0.1, 0.25, 0.9])


def test_block_boundaries_by_the_row_that_predicts():
    """The token at index i comes from row i - 1: with blocks of 4 that is index 5, 9, 13."""
    index = np.tile(np.flatnonzero(TURN > 0), SEQUENCES)
    opens = np.isin(index, [5, 13])  # index 9 is the tool's
    table = tables(opens, block_size=4)["by_block"]
    assert table == {
        "boundary": ["KV block"], "size": [4], "at": [0.5], "at_count": [12],
        "elsewhere": [0.0], "elsewhere_count": [42],
    }  # fmt: skip
    off = tables(np.isin(index, [4, 12]), block_size=4)["by_block"]
    assert off["at"] == [0.0]
    assert "by_block" not in tables(opens, block_size=1)


def test_windows_and_chunks_where_the_engine_states_them():
    index = np.tile(np.flatnonzero(TURN > 0), SEQUENCES)
    beyond = index - 1 >= 8
    facts = {"chunked_prefill": True, "max_num_batched_tokens": 6, "sliding_window": 8}
    table = tables(beyond, block_size=512, **facts)["by_block"]
    got = dict(
        zip(table["boundary"], zip(table["at"], table["elsewhere"], strict=True), strict=True)
    )
    assert got["beyond sliding window"] == (0.5, 0.0)
    assert set(got) == {"prefill chunk", "beyond sliding window"}  # no token opens a block of 512
    assert dict(zip(table["boundary"], table["at_count"], strict=True))["prefill chunk"] == 6 * 2
    places = Places.of(ROLLOUT, PAIR)
    off = by_block(places, {"chunked_prefill": False, "max_num_batched_tokens": 6}, {})
    assert "prefill chunk" not in off["boundary"]


def test_default_block_sizes_are_those_of_the_engines():
    width = 70
    mask = np.arange(width) >= 1
    rollout = Rollout(
        np.arange(width), np.array([0, width]), mask, mask.astype(np.int64), np.zeros(1, np.int64),
        ("stop",), Sampling(), {},
    )  # fmt: skip
    ids = np.arange(width)[mask]
    left = Scoring("l", ids, np.full(69, -1.0), {})
    table = breakdowns(rollout, left, left, Pair.of(rollout, left, left))["by_block"]
    assert table["size"] == [16, 32]
    assert table["at_count"] == [4, 2]  # rows 16, 32, 48, 64 and 32, 64


def test_top_tokens_are_those_that_carry_the_kl_with_their_text():
    off = np.zeros(A, bool)
    off[[PER + 2, 3 * PER + 8]] = True
    right = replace(RIGHT, logprobs=LEFT.logprobs + np.where(off, 0.7, 1e-6))
    right.logprobs[3 * PER + 8] += 0.5
    table = breakdowns(ROLLOUT, LEFT, right, Pair.of(ROLLOUT, LEFT, right), TEXTS)["top_tokens"]
    assert table["sequence"][:2] == [3, 1]
    assert table["position"][:2] == [13, 5]
    assert table["turn"][:2] == [2, 1]
    assert table["delta"][:2] == pytest.approx([1.2, 0.7])
    at = 1 * WIDTH + 5
    ids = ROLLOUT.token_ids
    assert table["token"][1] == TEXTS[ids[at]]
    assert table["before"][1] == "".join(TEXTS[i] for i in ids[WIDTH:at])
    assert table["after"][1] == "".join(TEXTS[i] for i in ids[at + 1 : 2 * WIDTH])
    terms = [np.expm1(d) - d for d in (1.2, 0.7)]
    assert table["k3_share"][:2] == pytest.approx([t / sum(terms) for t in terms], rel=1e-6)
    assert len(table["token"]) == 20


def test_identical_sides_carry_nothing():
    got = tables(np.zeros(A, bool))
    assert "top_tokens" not in got
    assert got["by_turn"]["k3_share"] == [None, None]
    assert got["by_turn"]["mean_abs_delta"] == [0.0, 0.0]


def report_with(breakdowns: dict):
    report = make_report()
    (head, *rest) = report.comparisons
    return replace(report, comparisons=(replace(head, breakdowns=breakdowns), *rest))


def test_groups_of_few_tokens_are_blank():
    table = {"turn": [1, 2, 3], "mean_abs_delta": [0.1, 0.2, 9.0], "mean_delta": [0.0, 0.0, 9.0],
             "k3_share": [0.2, 0.2, 0.6], "count": [20, 500, 19]}  # fmt: skip
    (turns,) = shown_groups.section(report_with({"by_turn": table})).parts
    assert [row[1].value for row in turns.tables[0].cells()] == [0.1, 0.2, None]
    assert [row[5].value for row in turns.tables[0].cells()] == [0.5, 1.0, None]
    alone = table | {"count": [19, 500, 19]}
    assert shown_groups.section(report_with({"by_turn": alone})) is None


def test_the_section_shows_tables_that_say_something(monkeypatch):
    monkeypatch.setattr(shown_groups, "LEAST", 1)
    off = ROLLOUT.turn[ROLLOUT.actions] == 2
    report = report_with(tables(off, block_size=4))
    shown = {part.title: part for part in shown_groups.section(report).parts}
    titles = {name: title for name, title, *_ in shown_groups.TABLES}
    turns = shown["Turn"].tables[0].cells()
    assert [row[0].value for row in turns] == ["1", "2"]
    assert [row[5].value for row in turns] == [0.0, 1.0]
    assert turns[1][3].value == 1.0
    assert "KV block, 4" in shown
    assert shown[titles["by_position"]].folded
    assert titles["by_length"] not in shown  # one bucket
    largest = report.comparisons[0].breakdowns["top_tokens"]["k3_share"][0]
    assert percent(largest) in shown_groups.carriers(report)
    assert numbers(shown_groups.carriers(report))[0] == 4.2
