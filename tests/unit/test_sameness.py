"""The comparison that goldens use: last bits may differ, everything else may not."""

from __future__ import annotations

import pytest

from tests.sameness import differing_json, differing_text


@pytest.mark.parametrize(
    ("now", "golden"),
    [
        ({"value": 0.999683584402106}, {"value": 0.9996835844021061}),
        ({"low": 1.0 + 3e-13}, {"low": 1.0}),
        ([1, "a", None, True], [1, "a", None, True]),
        ({"tiny": 1e-13}, {"tiny": 0.0}),
    ],
)
def test_last_bits_are_no_difference(now: object, golden: object) -> None:
    assert differing_json(now, golden) == []


@pytest.mark.parametrize(
    ("now", "golden"),
    [
        ({"value": 1.00000001}, {"value": 1.0}),
        ({"n": 3}, {"n": 4}),
        ({"n": 3}, {"n": 3.0}),
        ({"n": True}, {"n": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([1, 2], [1]),
        ({"name": "k3_kl"}, {"name": "k1_kl"}),
        ({"value": None}, {"value": 0.0}),
        ({"value": float("nan")}, {"value": 0.0}),
    ],
)
def test_any_other_difference_is_named(now: object, golden: object) -> None:
    assert len(differing_json(now, golden)) == 1


@pytest.mark.parametrize(
    ("now", "golden"),
    [
        ("k3 is 0.0312 nats", "k3 is 0.0311 nats"),
        ("k3 is\n  0.0312", "k3 is 0.0312"),
        ("1,234.5 tokens/s", "1,234.4 tokens/s"),
        ("5.4e-20", "5.5e-20"),
    ],
)
def test_text_may_differ_by_one_unit_of_the_last_digit(now: str, golden: str) -> None:
    assert differing_text(now, golden) == []


@pytest.mark.parametrize(
    ("now", "golden"),
    [
        ("k3 is 0.0313 nats", "k3 is 0.0311 nats"),
        ("64 prompts", "65 prompts"),
        ("HEALTHY 1.0", "BROKEN 1.0"),
        ("5.4e-20", "5.4e-19"),
        ("0.5 nats", "-0.5 nats"),
        ("0.5 and more", "0.5"),
    ],
)
def test_other_texts_differ(now: str, golden: str) -> None:
    assert differing_text(now, golden) != []
