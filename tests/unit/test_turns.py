"""Sequences of several turns: what is appended, what is sampled, when a sequence ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mismatch.captures import priority
from mismatch.engines.artefacts import build_rollout, decode_scoring, prefill_scoring
from mismatch.engines.base import Capabilities, Sample, requests_of, sample_seed
from mismatch.engines.distribution_capture import CaptureRequest, DistributionRecorder
from mismatch.engines.turns import Trajectory, TurnDistributions, joined, play, starting
from mismatch.errors import MismatchError
from mismatch.processes.workers.sampling import Ready, further_turns, untested_turns
from mismatch.prompts import environments
from mismatch.prompts.environments import Replies, Retry, between_turns, built_in
from mismatch.prompts.prompt import Prompt
from mismatch.specs import PromptSpec, RolloutSpec, Sampling, spec_hash
from mismatch.types import CACHED
from tests.checkpoints import tokenizer
from tests.texts import numbers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def quiet(*_: int) -> None:
    """No progress."""


def sample(*ids: int, reason: str = "stop", rows: int | None = None) -> Sample:
    routed = None if rows is None else np.full((rows, 1, 1), len(ids), np.uint16)
    return Sample(list(ids), np.full(len(ids), -0.5), reason, routed)


class Scripted:
    """Answers every context with one token: 100 + turn; remembers the contexts."""

    name = "scripted"

    def __init__(self, reason: str = "stop") -> None:
        self.reason = reason
        self.asked: list[list[list[int]]] = []

    def generate(self, prompts: Sequence[list[int]], progress: Any, turn: int = 1) -> Any:
        self.asked.append([list(ids) for ids in prompts])
        return [[sample(100 + turn, reason=self.reason)] for _ in prompts]

    def prefill(self, sequences: Any, starts: Any, temperature: float, progress: Any) -> Any:
        return [
            -np.arange(start, len(ids), dtype=float)
            for ids, start in zip(sequences, starts, strict=True)
        ]

    def fingerprint(self, mode: str) -> dict[str, Any]:
        return {}


def played(
    reply: Any,
    engine: Any = None,
    trajectories: list[Trajectory] | None = None,
    captured: TurnDistributions | None = None,
    *,
    first: Sample | None = None,
    **limits: int,
) -> Any:
    engine = engine or Scripted()
    if trajectories is None:
        trajectories = starting([[1, 2], [3]], [[first or sample(9)], [sample(8, 9)]])
    limits = {"most_turns": 3, "longest": 100, "max_tokens": 4} | limits
    play(engine, trajectories, reply, progress=quiet, captured=captured, **limits)
    return trajectories, engine


def test_ids_are_appended_and_only_what_was_sampled_is_an_action() -> None:
    trajectories, engine = played(lambda number, responses: [50, 51] if number == 0 else None)
    first, second = trajectories
    assert first.token_ids == [1, 2, 9, 50, 51, 102, 50, 51, 103]
    assert first.sampled.tolist() == [False, False, True, False, False, True, False, False, True]
    assert first.turn.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert second.token_ids == [3, 8, 9]
    assert engine.asked == [[[1, 2, 9, 50, 51]], [[1, 2, 9, 50, 51, 102, 50, 51]]]


def test_a_sequence_that_was_cut_is_not_replied_to() -> None:
    trajectories, _ = played(lambda *_: [50], first=sample(9, reason="length"))
    assert [len(trajectory.responses) for trajectory in trajectories] == [1, 3]
    assert trajectories[0].finish_reason == "length"


def test_a_reply_that_leaves_no_room_for_a_response_ends_the_sequence() -> None:
    trajectories, _ = played(lambda *_: [50, 51], longest=9)
    assert [trajectory.token_ids for trajectory in trajectories] == [
        [1, 2, 9, 50, 51, 102],
        [3, 8, 9, 50, 51, 102],
    ]


def test_experts_keep_what_decoding_chose() -> None:
    """A later turn's prefill forwards the response again; those rows are left out."""
    first, second = np.full((3, 1, 1), 1), np.full((7, 1, 1), 2)
    rows = joined([first, second])
    assert rows is not None
    assert rows[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, 2]
    assert joined([first, None]) is None
    trajectory = Trajectory.starting(0, [1, 2], sample(8, 9, rows=3))
    trajectory.token_ids += [50]
    trajectory.answer(sample(7, rows=5))
    assert trajectory.routed is not None
    assert trajectory.routed[:, 0, 0].tolist() == [2, 2, 2, 1, 1]


def test_what_was_read_from_the_cache_stands_at_every_token_of_its_turn() -> None:
    trajectory = Trajectory.starting(0, [1, 2], replace(sample(8, 9), cached=0))
    trajectory.token_ids += [50]
    trajectory.answer(replace(sample(7), cached=4))
    other = Trajectory.starting(1, [3], sample(9))
    rollout = build_rollout([trajectory, other], RolloutSpec(), {})
    read = decode_scoring(Scripted(), [trajectory, other], rollout, {}).extra[CACHED]  # type: ignore[arg-type]
    assert np.array_equal(read, [0, 0, 4, np.nan], equal_nan=True)
    rollout = build_rollout([other], RolloutSpec(), {})
    assert decode_scoring(Scripted(), [other], rollout, {}).extra == {}  # type: ignore[arg-type]


def test_rescoring_keeps_the_sampled_tokens_alone() -> None:
    trajectories, engine = played(lambda number, responses: [50, 51] if number == 0 else None)
    rollout = build_rollout(trajectories, RolloutSpec(), {})
    scoring = prefill_scoring(engine, rollout, quiet)
    assert scoring.token_ids.tolist() == [9, 102, 103, 8, 9]
    assert scoring.logprobs.tolist() == [-2.0, -5.0, -8.0, -1.0, -2.0]


def test_no_two_requests_share_a_seed() -> None:
    law = Sampling(samples_per_prompt=3)
    jobs = [job for turn in (1, 2, 3) for job in requests_of(12, law, turn)]
    assert len(jobs) == 12 * 3 + 12 + 12
    assert len({sample_seed(0, *job) for job in jobs}) == len(jobs)


def test_the_hash_of_a_spec_with_one_turn_knows_no_turns() -> None:
    """Runs that were begun before there were turns can be resumed."""
    spec = RolloutSpec()
    assert spec_hash(spec) == spec_hash(replace(spec, prompts=PromptSpec(max_turns=9)))
    two = [
        replace(spec, prompts=PromptSpec(environment="retry", max_turns=turns)) for turns in (2, 3)
    ]
    assert len({spec_hash(each) for each in (spec, *two)}) == 3


# ---------------------------------------------------------------- environments


def test_retry_goes_on_until_the_answer_is_right() -> None:
    partner = Retry(Prompt("p", answer=7))
    message = partner.reply("Answer: 8<|return|>")
    assert message is not None
    assert message["role"] == "user"
    assert partner.reply("Answer: 7<|return|>") is None
    assert Retry(Prompt("p")).reply("anything") is None


def test_an_unknown_environment_is_refused() -> None:
    assert built_in("retry") is Retry
    assert built_in("my.tasks:Game") is None
    with pytest.raises(MismatchError, match="no-such"):
        built_in("no-such")


def test_what_follows_the_end_token_is_appended_and_the_end_token_is_not() -> None:
    chat = tokenizer()
    chat.chat_template = CHATML
    chat.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    end = chat.convert_tokens_to_ids("<|im_end|>")
    message = {"role": "user", "content": "No."}
    ids = between_turns(chat, message, [end])
    assert chat.decode(ids) == "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"


def test_the_ids_between_turns_are_those_of_the_template() -> None:
    """With an append-only template, prompt + answer + between = the whole conversation rendered."""
    from mismatch.models import resolve_model
    from mismatch.models.tokenizers import load_tokenizer

    chat = load_tokenizer(resolve_model("tiny-gpt-oss"))
    messages = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "Answer: 5"},
        {"role": "user", "content": "That is not right. Try again."},
    ]
    given = {"tokenize": True, "return_dict": False}
    whole = list(chat.apply_chat_template(messages, add_generation_prompt=True, **given))
    before = list(chat.apply_chat_template(messages[:2], **given))
    stops = [chat.convert_tokens_to_ids(token) for token in ("<|return|>", "<|call|>")]
    assert before + between_turns(chat, messages[2], stops) == whole


def test_a_template_that_refuses_the_message_is_named() -> None:
    chat = tokenizer()
    chat.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(MismatchError, match="no tools here"):
        between_turns(chat, {"role": "tool", "content": "4"}, [2])
    chat.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(MismatchError, match="drops the answer"):
        between_turns(chat, {"role": "tool", "content": "4"}, [2])


class Broken:
    """Fails for one prompt in its own way; replies to the others."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def reply(self, response: str) -> Any:
        if self.prompt.origin == "raises":
            raise ValueError("no such tool")
        if self.prompt.origin == "hangs":
            time.sleep(5)
        if self.prompt.origin == "no message":
            return 7
        if self.prompt.origin == "long":
            return {"role": "user", "content": "word " * 1000}
        return {"role": "user", "content": "Go on."}

    def reward(self) -> float:
        return 0.25


def replies(*origins: str, vocab_size: int | None = None) -> Replies:
    chat = tokenizer()
    chat.chat_template = CHATML
    prompts = [Prompt(origin) for origin in origins]
    return Replies(Broken, prompts, chat, [2], vocab_size or len(chat), max_tokens=10)


def test_a_failing_environment_ends_its_own_sequence_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environments, "REPLY_S", 0.2)
    partner = replies("raises", "hangs", "no message", "fine")
    assert [partner(number, [5]) is None for number in range(4)] == [True, True, True, False]
    reasons = " ".join(partner.ended)
    assert sum(partner.ended.values()) == 3
    for part in ("no such tool", "no reply within", "not int"):
        assert part in reasons


def test_a_long_reply_is_cut_and_counted() -> None:
    partner = replies("long", "fine")
    short, ids = partner(1, [5]), partner(0, [5])
    assert short is not None
    assert ids is not None
    assert len(ids) < len(short) + 20
    assert partner.cut == 1


def test_ids_outside_the_model_s_vocabulary_end_the_sequence() -> None:
    partner = replies("fine", vocab_size=3)
    assert partner(0, [1]) is None
    assert numbers(" ".join(partner.ended))[-1] == 3


def test_an_environment_s_own_reward_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    partner = replies("fine", "raises")
    rewards = partner.rewards()
    assert rewards is not None
    assert rewards.tolist() == [0.25, 0.25]
    monkeypatch.setattr(Broken, "reward", lambda self: 1 / 0)
    assert partner.rewards() is None
    assert "division" in partner.no_rewards


def test_what_turns_leave_untested_is_said_once() -> None:
    spec = RolloutSpec(prompts=PromptSpec(environment="retry"))
    partner = replies("fine")
    assert not list(untested_turns(spec, partner))
    partner.ended["ValueError: x"] = 2
    partner.cut = 1
    assert len(list(untested_turns(spec, partner))) == 2
    partner.no_rewards = "ValueError: x"
    assert len(list(untested_turns(spec, partner))) == 3


def test_environments_are_closed_whatever_happened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that ended by themselves, were cut, raise or hang; one that cannot is said."""
    closed: list[str] = []

    def close(self: Broken) -> None:
        closed.append(self.prompt.origin)
        if self.prompt.origin == "fine":
            raise OSError("gone")

    monkeypatch.setattr(Broken, "close", close, raising=False)
    monkeypatch.setattr(environments, "REPLY_S", 0.2)
    partner = replies("raises", "hangs", "fine", "never asked")
    for number in range(3):
        partner(number, [5])
    partner.close()
    assert closed == ["raises", "hangs", "fine"]
    assert "gone" in capsys.readouterr().err
    partner.close()
    assert len(closed) == 3


def test_an_engine_that_fails_leaves_no_environment_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(
        Broken, "close", lambda self: closed.append(self.prompt.origin), raising=False
    )

    class Failing(Scripted):
        def generate(self, prompts: Sequence[list[int]], progress: Any, turn: int = 1) -> Any:
            raise MismatchError("the engine failed")

    chat = tokenizer()
    chat.chat_template = CHATML
    info: Any = SimpleNamespace(stop_ids=[2], vocab_size=len(chat))
    prompts = [Prompt("fine")]
    ready = Ready(prompts, [[1]], chat, info, Capabilities(), 1000, Broken)
    spec = RolloutSpec(prompts=PromptSpec(environment="x:Y", max_turns=3))
    engine: Any = Failing()
    with pytest.raises(MismatchError, match="the engine failed"):
        further_turns(engine, spec, starting([[1]], [[sample(5)]]), ready)
    assert closed == ["fine"]


@pytest.mark.slow
def test_an_environment_that_always_hangs_does_not_take_hours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After three that hang the others get less time, and one that is slow is still heard."""
    monkeypatch.setattr(environments, "REPLY_S", 0.5)
    monkeypatch.setattr(environments, "LEAST_S", 0.05)
    partner = replies(*["hangs"] * 13, "fine")
    start = time.monotonic()
    assert all(partner(number, [5]) is None for number in range(13))
    assert time.monotonic() - start < 3.5  # 3 x 0.5 s and 10 x 0.05 s; else 6.5 s
    partner.slowest = 0.2
    assert partner(13, [5]) is not None


class Looking(Scripted):
    """Gives every request's tokens their law, and runs ahead by one token, as a scheduler does."""

    vocabulary = 120

    def capture_distributions(self, wanted: CaptureRequest) -> None:
        self.recorder = DistributionRecorder(wanted)

    def captured_distributions(self) -> dict[str, Any]:
        return self.recorder.collected()

    def generate(self, prompts: Sequence[list[int]], progress: Any, turn: int = 1) -> Any:
        answers = super().generate(prompts, progress, turn)
        for index, token in ((0, 100 + turn), (1, 0)):
            logits = torch.zeros(len(prompts), self.vocabulary)
            logits[:, token] = 5.0
            requests = np.arange(len(prompts))
            self.recorder.take(requests, np.full(len(prompts), index), logits)
        return answers


@pytest.mark.parametrize("positions", [2, 100])
def test_whole_distributions_are_of_every_turn_s_own_tokens(positions: int) -> None:
    engine: Any = Looking()
    wanted = CaptureRequest(positions, 64, 3, Sampling())
    captured = TurnDistributions(engine, wanted)
    first = engine.generate([[1, 2], [3], [4]], quiet)
    trajectories = starting([[1, 2], [3], [4]], first)
    captured.end(enumerate(trajectories))
    played(lambda number, _: None if number == 1 else [50], engine, trajectories, captured)
    taken = captured.collected()
    every = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2)]
    numbers = priority(3, *np.asarray(every).T)
    chosen = {every[index] for index in np.argsort(numbers)[:positions]}
    assert set(map(tuple, taken["keys"].tolist())) == chosen
    for (_, index), law in zip(taken["keys"].tolist(), taken["logprobs"], strict=True):
        assert law.argmax() == 101 + index  # what the turn sampled, not what was run ahead


def test_a_turn_that_could_not_be_watched_leaves_none() -> None:
    engine: Any = Looking()
    captured = TurnDistributions(engine, CaptureRequest(8, 64, 0, Sampling()))
    trajectories = starting([[1]], engine.generate([[1]], quiet))
    captured.end(enumerate(trajectories))
    assert len(captured.collected()["keys"]) == 1
    captured.begin(enumerate(trajectories))
    captured.end(enumerate(trajectories))
    assert captured.collected() == {}
