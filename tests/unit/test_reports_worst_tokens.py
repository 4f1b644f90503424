"""The worst tokens: repetitions are one row, neighbours come from the same sequence."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from mismatch.reports.section import Excerpt
from mismatch.reports.sections.worst_tokens import worst_tokens
from mismatch.reports.tokens_table import comparable
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
