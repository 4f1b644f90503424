"""Constraints: every kind is recognised where it is fulfilled, and only there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch.prompts.instructions import (
    ALONE,
    CONTRADICTIONS,
    KINDS,
    Constraint,
    instructions,
    share_fulfilled,
)

# kind -> (values, answers that fulfil it, answers that do not)
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "words_at_least": ({"n": 3}, ["one two three", "it's a 4-door car"], ["one two", "", "1 2 3"]),
    "words_at_most": ({"n": 2}, ["one two", "one 2 3 4"], ["one two three", ""]),
    "sentences": ({"n": 2}, ["He came. She left!", 'No? "Yes."', "It is 3.5. So?"], ["One.", ""]),
    "paragraphs": ({"n": 2}, ["a\n\nb", "a\nb\n \n\nc"], ["a\nb", "a\n\nb\n\nc", ""]),
    "bullets": ({"n": 2}, ["- a\n- b", "List:\n  - a\n- b"], ["- a", "-a\n- b", "* a\n* b"]),
    "numbered": ({"n": 2}, ["1. a\n2. b", "So:\n1. a\n2. b\nEnd"], ["1. a\n3. b", "1. a", "1) a"]),
    "two_parts": ({}, ["a\n***\nb"], ["a *** b", "***\nb", "a\n***\nb\n***\nc"]),
    "title": ({}, ["[[Rain]]\nIt rains.", "[[A b]]"], ["It [[Rain]]", "[Rain]\nIt", "[[]]\nx"]),
    "keyword": ({"word": "river"}, ["The River.", "river's"], ["rivers", "driver", ""]),
    "keyword_times": ({"word": "river", "n": 2}, ["river, RIVER"], ["river", "river " * 3]),
    "forbidden": ({"word": "river"}, ["rivers", "a sea"], ["The river.", ""]),
    "letter_times": ({"letter": "b", "n": 2}, ["Bob", "a bb"], ["b", ""]),
    "short_words": ({"n": 4}, ["four word", "a 123456"], ["seven", "", "12345"]),
    "lower_case": ({}, ["all low, 3."], ["One", "123", ""]),
    "upper_case": ({}, ["ALL UP, 3."], ["ONe", "123", ""]),
    "no_commas": ({}, ["a b; c"], ["a, b", ""]),
    "question": ({"n": 1}, ["Why? So."], ["Why? Who?", "Why."]),
    "emphasis": ({"n": 1}, ["a _b c_ d"], ["a b", "_a_ _b_", "_a\nb_", "__"]),
    "placeholders": ({"n": 1}, ["Dear <name>,"], ["Dear name", "<a> <b>", "<>", "1 < 2"]),
    "starts_with": ({"word": "river"}, ["River banks", '"river" it is'], ["A river", ""]),
    "ends_with": ({"word": "river"}, ["to the River.", "river"], ["rivers", "river bank", ""]),
    "quoted": ({}, ['"all of it"'], ['"a" b', '"', '""', '"  "', "a"]),
    "json": ({"word": "k"}, ['{"k": 1}', '```json\n{"k": 1}\n```'], ['{"a": 1}', "[1]", "k", ""]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_yes_and_no(kind: str) -> None:
    values, good, bad = CASES[kind]
    constraint = Constraint(kind, values)
    assert [text for text in good if not constraint.fulfilled_by(text)] == []
    assert [text for text in bad if constraint.fulfilled_by(text)] == []


@given(st.text(), st.sampled_from(list(KINDS)))
def test_no_text_makes_a_checker_raise(text: str, kind: str) -> None:
    assert Constraint(kind, CASES[kind][0]).fulfilled_by(text) in (True, False)


def test_the_reward_is_the_share_that_is_fulfilled() -> None:
    both = (Constraint("lower_case", {}), Constraint("words_at_most", {"n": 2}))
    shares = [share_fulfilled(text, both) for text in ("a b", "A b", "a b c", "A B C")]
    assert shares == [1.0, 0.5, 0.5, 0.0]


def test_prompts_say_their_constraints_and_none_contradict() -> None:
    drawn = instructions(2000, seed=0)
    assert drawn[:20] == instructions(20, seed=0)
    assert {c.kind for each in drawn for c in each.constraints} == set(KINDS)
    assert len(KINDS) >= 15
    for each in drawn:
        kinds = [c.kind for c in each.constraints]
        aspects = [KINDS[kind].aspect for kind in kinds]
        assert 1 <= len(kinds) <= 3
        assert len(set(aspects)) == len(aspects)
        assert ALONE not in aspects or len(aspects) == 1
        assert not [pair for pair in CONTRADICTIONS if pair <= set(kinds)]
        assert all(c.text in each.prompt for c in each.constraints)
