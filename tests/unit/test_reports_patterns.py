"""Patterns of the tokens table: groups that were planted are found, repetitions are one row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from mismatch.reports.contrasts import comparable
from mismatch.reports.section import Excerpt
from mismatch.reports.sections.patterns import section as section_of
from mismatch.reports.sections.patterns import worst_tokens
from tests.reports_fixture import make_empty_report, make_report, make_tokens
from tests.tables import values
from tests.texts import numbers


def planted() -> pd.DataFrame:
    """40 texts and 8 prompts alike, but for " bad", prompt 3 and the first token of a response."""
    rng = np.random.default_rng(0)
    n, length = 64, 40
    table = pd.DataFrame(
        {
            "sequence": np.repeat(np.arange(n), length),
            "prompt": np.repeat(np.arange(n) // 8, length),
            "position": np.tile(np.arange(length), n) + 5,
            "token_id": rng.integers(0, 40, n * length),
            "rollout_logprob": -1.0,
            "routing_flips": pd.array([0] * n * length, dtype="Int16"),
        }
    )
    table["token"] = [f" w{i}" if i else " bad" for i in table["token_id"]]
    table["delta"] = 0.01 * rng.choice([-1.0, 1.0], len(table))
    table.loc[table["token"] == " bad", "delta"] = -0.5
    table.loc[table["prompt"] == 3, "delta"] *= 3
    table.loc[table["position"] == 5, "delta"] = -0.2
    table["train_logprob"] = table["rollout_logprob"] + table["delta"]
    return table


def test_the_planted_text_prompt_and_place_carry_most() -> None:
    tokens = planted()
    section = section_of(make_report(), tokens)
    assert section is not None
    texts, prompts, places = (values(part.tables[0]) for part in section.parts)
    k3 = np.expm1(tokens["delta"]) - tokens["delta"]
    bad = tokens["token"] == " bad"
    assert texts[0]["token"] == "␣bad"
    assert texts[0]["tokens"] == bad.sum()
    assert texts[0]["of k3"] == pytest.approx(k3[bad].sum() / k3.sum())
    assert texts[0]["lower in training"] == 1.0
    assert prompts[0]["prompt"] == "3"
    assert [row["sampled token"] for row in places] == [
        "first",
        "2–3",
        "4–7",
        "8–15",
        "16–31",
        "32–63",
    ]
    assert sum(row["of k3"] for row in places) == pytest.approx(1.0)
    assert places[0]["mean |Δ|, nats"] == pytest.approx(0.2)
    assert "␣bad" in section.sentences[0]


def test_small_groups_have_no_direction_and_few_groups_no_sentence() -> None:
    tokens = planted().iloc[:60]
    section = section_of(make_report(), tokens)
    assert section is not None
    few = [row for row in values(section.parts[0].tables[0]) if row["tokens"] < 20]
    assert few
    assert {row["lower in training"] for row in few} == {None}
    assert not [text for text in section.sentences if "prompts (" in text]


def test_nothing_to_group() -> None:
    assert section_of(*make_empty_report()) is None
    same = make_tokens().assign(delta=0.0)
    assert section_of(make_report(), same) is None
    parts = section_of(make_report(), make_tokens()).parts  # a table of version 1 has no prompts
    assert [part.id for part in parts] == ["by-text", "by-place"]


def test_repetitions_of_a_prompt_are_one_worst_row() -> None:
    tokens = planted()
    again = (tokens["position"] == 9) & (tokens["prompt"] == 2)
    tokens.loc[again, ["delta", "token", "token_id"]] = [-3.0, " us", 77]
    table = worst_tokens(comparable(tokens)).tables[0]
    first, second = table.cells()[:2]
    assert first[0].value == "␣us"
    assert second[0].value != "␣us"
    assert (first[6].value, first[6].link) == ("sequence 16", "s16t9")
    assert numbers(first[6].note) == [9, 17, 18, 19, 20]  # position, and the other sequences


def test_worst_tokens_are_the_worst_with_their_neighbours() -> None:
    table = pd.DataFrame(
        {
            "sequence": [0, 0, 0, 1, 1],
            "position": [4, 5, 9, 4, 5],
            "token_id": [1, 2, 3, 4, 5],
            "token": ["a", "b", "c", "d", "e"],
            "rollout_logprob": [-1.0] * 5,
            "train_logprob": [-1.0, -1.5, -1.1, -1.0, 0.0],
            "routing_flips": pd.array([0, 2, None, 0, 0], dtype="Int16"),
        }
    )
    table["delta"] = table["train_logprob"] - table["rollout_logprob"]
    rows = values(worst_tokens(comparable(table.sample(frac=1, random_state=0))).tables[0])
    assert [row["token"] for row in rows] == ["e", "b", "c"]  # delta 0 is not a disagreement
    texts = [row["in its text"] for row in rows]
    assert texts[0] == Excerpt("d", "e", "")  # nothing of sequence 0
    assert texts[1] == Excerpt("a", "b", " ⋯ c")
    assert [row["Δ, nats"] for row in rows] == pytest.approx([1.0, -0.5, -0.1])
    assert [row["ratio"] for row in rows] == pytest.approx(np.exp([1.0, -0.5, -0.1]))
    assert [row["flipped layers"] for row in rows] == [0, 2, None]
