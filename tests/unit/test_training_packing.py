"""Micro-batches keep to their budget, lose no sequence, and do not depend on the world."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch.errors import MismatchError
from mismatch.training.packing import collate, plan_batches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 128), st.sampled_from(["padding", "packing"]))
def test_every_sequence_once_and_within_the_budget(
    lengths: list[int], budget: int, layout: str
) -> None:
    batches = plan_batches(lengths, budget, layout)
    assert sorted(n for batch in batches for n in batch.sequences) == list(range(len(lengths)))
    for batch in batches:
        sizes = [lengths[n] for n in batch.sequences]
        cost = len(sizes) * max(sizes) if layout == "padding" else sum(sizes)
        assert cost <= budget or len(sizes) == 1
        assert batch.tokens == sum(sizes)


def test_padding_puts_like_with_like_longest_first() -> None:
    batches = plan_batches([3, 10, 4, 9], 20, "padding")
    assert [batch.sequences for batch in batches] == [(1, 3), (2, 0)]


def test_packing_fills_rows_in_the_given_order() -> None:
    batches = plan_batches([3, 10, 4, 9], 14, "packing")
    assert [batch.sequences for batch in batches] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(("budget", "layout"), [(0, "padding"), (8, "diagonal")])
def test_nonsense_is_refused(budget: int, layout: str) -> None:
    with pytest.raises(MismatchError, match=str(budget) if budget == 0 else layout):
        plan_batches([3], budget, layout)


SEQUENCES = [np.array([5, 6, 7]), np.array([8, 9])]


def test_padded_batch() -> None:
    batch = collate(SEQUENCES, "padding", "cpu")
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.position_ids is None
    assert batch.input_ids.reshape(-1)[batch.rows].tolist() == [5, 6, 7, 8, 9]


def test_packed_batch() -> None:
    batch = collate(SEQUENCES, "packing", "cpu")
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.attention_mask is None
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.rows.tolist() == [0, 1, 2, 3, 4]
