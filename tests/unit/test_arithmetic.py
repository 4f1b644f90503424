"""The built-in task: the same problems everywhere, true answers, a reward proof against garbage."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch.prompts.arithmetic import arithmetic_problems, reward, story
from tools.tiny_gpt_oss_corpus import chats, worked_answer

PINNED = [
    ("Rosa has 4 bags with 5 buttons in each of them. How many buttons does Rosa have?", 20),
    (
        "Mia has 12 lemons. Mia sells 6 lemons on the beach. Then Mia sells 5 lemons in the park. "
        "How many lemons does Mia have now?",
        1,
    ),
    (
        "Peter has 5 boxes with 6 stones in each of them. Peter drops 4 stones at home. "
        "How many stones does Peter have now?",
        26,
    ),
]


def test_problems_are_pinned_so_that_every_machine_draws_the_same() -> None:
    drawn = arithmetic_problems(3, seed=0)
    assert [(problem.prompt, problem.answer) for problem in drawn] == PINNED


def test_a_shorter_list_is_a_prefix_and_seeds_differ() -> None:
    long = arithmetic_problems(50, seed=3)
    assert arithmetic_problems(20, seed=3) == long[:20]
    assert arithmetic_problems(50, seed=4) != long


def test_problems_are_distinct() -> None:
    """20,000 independent draws repeat some: the list must not."""
    rng = random.Random(1)
    drawn = [story(rng).prompt for _ in range(20_000)]
    assert len(set(drawn)) < 20_000
    problems = arithmetic_problems(20_000, seed=1)
    assert len({problem.prompt for problem in problems}) == 20_000


def test_zero_problems_is_empty_and_a_negative_number_is_refused() -> None:
    assert arithmetic_problems(0, seed=0) == []
    with pytest.raises(ValueError, match="-1"):
        arithmetic_problems(-1, seed=0)


def test_messages_hold_the_prompt_as_one_user_turn() -> None:
    (problem,) = arithmetic_problems(1, seed=0)
    assert problem.messages == [{"role": "user", "content": problem.prompt}]


@given(st.integers(0, 10**6))
def test_the_steps_of_a_story_are_true_chain_and_use_the_prompts_numbers(seed: int) -> None:
    problem = story(random.Random(seed))
    apply = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}
    numbers = [int(n) for n in re.findall(r"\d+", problem.prompt)]
    used = [problem.steps[0][0]] + [right for _, _, right, _ in problem.steps]
    assert sorted(used) == sorted(numbers)
    for left, operator, right, result in problem.steps:
        assert apply[operator](left, right) == result
        assert 0 < result < 400
    for (*_, before), (after, *_) in itertools.pairwise(problem.steps):
        assert before == after


@given(st.integers(0, 10**6))
def test_a_worked_answer_earns_the_reward(seed: int) -> None:
    rng = random.Random(seed)
    problem = story(rng)
    assert reward(worked_answer(rng, problem), problem.answer) == 1.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("3 + 4 = 7. Answer: 7", 1.0),
        ("Answer: 7.", 1.0),
        ("Answer: 7<|return|>", 1.0),
        ("Answer: 3. No: Answer: 7", 1.0),  # the last one counts
        ("Answer: 7. No: Answer: 3", 0.0),
        ("Answer: 7. No: Answer: none", 0.0),
        ("Answer: 71", 0.0),
        ("Answer: 7.5", 0.0),
        ("Answer: 7,000", 0.0),
        ("Answer: -7", 0.0),
        ("7", 0.0),
        ("answer 7", 0.0),
        ("Answer:", 0.0),
        ("Answer: \N{ARABIC-INDIC DIGIT SEVEN}", 0.0),
        ("Answer: " + "7" * 5000, 0.0),
        ("", 0.0),
    ],
)
def test_reward_reads_the_last_answer_and_nothing_else(response: str, score: float) -> None:
    assert reward(response, 7) == score


def test_reward_takes_negative_answers() -> None:
    assert reward("Answer: -12", -12) == 1.0


@pytest.mark.slow
@given(st.text())
def test_reward_never_raises_and_random_text_earns_nothing(text: str) -> None:
    assert reward(text, 10**9 + 7) == 0.0


def test_chats_are_reproducible_and_hold_all_three_kinds() -> None:
    first = list(itertools.islice(chats(5), 300))
    assert first == list(itertools.islice(chats(5), 300))
    with_tools = sum(chat["tools"] is not None for chat in first)
    with_answers = sum("Answer:" in (c["messages"][-1]["content"]) for c in first)
    several_turns = sum(len(chat["messages"]) > 2 for chat in first)
    assert 20 < with_tools < 80
    assert 150 < with_answers < 260
    assert several_turns > with_tools


def test_every_tool_call_is_answered_and_its_tool_was_offered() -> None:
    for chat in itertools.islice(chats(6), 300):
        offered = {tool["function"]["name"] for tool in chat["tools"] or []}
        for message, following in itertools.pairwise(chat["messages"]):
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in offered
                assert following["role"] == "tool"
