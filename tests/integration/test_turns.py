"""Several turns through real vLLM and FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mismatch.run import store
from mismatch.types import CACHED, EXACT_KL

from .conftest import Run, run_check

OBSERVATION = "<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"
TURNS = (
    *("--model", "tiny-gpt-oss-tools", "--task", "calculator", "--max-turns", "3"),
    *("--num-prompts", "12", "--samples-per-prompt", "2", "--max-tokens", "120"),
)
FEW = ("--num-prompts", "4", "--samples-per-prompt", "2")
OVER = "the game is over"
GAME = f"""
class Game:
    def __init__(self, prompt):
        self.said = 0

    def reply(self, response):
        self.said += 1
        if self.said == 2:
            raise RuntimeError({OVER!r})
        return {{"role": "user", "content": "And then?"}}

    def reward(self):
        return float(self.said)
"""


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_check(tmp_path_factory.mktemp("turns") / "run", *TURNS, "--depth", "quick")


def test_both_sides_agree_on_every_turn(turns: Run) -> None:
    """The trainer scores sampled tokens alone, each at its place after the observations."""
    by_turn = turns.report["comparisons"][0]["breakdowns"]["by_turn"]
    assert by_turn["turn"][:2] == [1, 2]
    assert max(by_turn["mean_abs_delta"]) < 0.15
    untested = {entry["what"] for entry in turns.report["not_tested"]}
    assert not untested & {"several turns", EXACT_KL}


def test_whole_distributions_are_taken_in_later_turns_too(turns: Run) -> None:
    """Each gives its token the log-probability that was reported, or all would be refused."""
    rollout = store.load_rollout(turns.directory)
    taken = store.load_scoring(turns.directory, "vllm:decode").distributions
    assert taken is not None
    assert set(rollout.turn[rollout.actions][taken.positions].tolist()) >= {1, 2}


def test_observations_are_tokens_without_logprobs(turns: Run) -> None:
    rollout = store.load_rollout(turns.directory)
    decode = store.load_scoring(turns.directory, "vllm:decode")
    assert len(decode.logprobs) == rollout.n_actions
    texts = store.load_vocabulary(turns.directory)
    offsets = zip(rollout.offsets[:-1], rollout.offsets[1:], strict=True)
    several = [slice(start, end) for start, end in offsets if rollout.turn[end - 1] > 1]
    assert several
    for rows in several:
        ids, sampled = rollout.token_ids[rows], rollout.action_mask[rows]
        after = np.flatnonzero(rollout.turn[rows] >= 1)
        between = [texts[int(t)] for t in ids[after][~sampled[after]]]
        assert OBSERVATION in "".join(between).replace("Ġ", " ")
        assert sampled[-1]


def test_experts_of_every_turn_are_there(turns: Run) -> None:
    rollout = store.load_rollout(turns.directory)
    routing = store.load_scoring(turns.directory, "vllm:decode").routing
    assert routing is not None
    last = rollout.offsets[1:] - 1
    assert routing.present.sum() == len(rollout.token_ids) - len(last)
    assert turns.report["comparisons"][0]["routing"]["routing_disagree_any"]["value"] < 0.2


def test_without_a_prefix_cache_every_turn_is_cold(turns: Run) -> None:
    """vLLM on a CPU gives it up where it captures routes."""
    table = turns.report["comparisons"][0]["breakdowns"]["by_cache"]
    assert table["turns"] == ["first, cold", "later, cold"]


@pytest.mark.grid
def test_later_turns_are_read_from_the_prefix_cache(tmp_path: Path) -> None:
    run = run_check(tmp_path / "run", *TURNS, "--depth", "quick", "--no-routing")
    table = run.report["comparisons"][0]["breakdowns"]["by_cache"]
    assert table["turns"][-1] == "later, hit"
    rollout = store.load_rollout(run.directory)
    read = store.load_scoring(run.directory, "vllm:decode").extra[CACHED]
    turn = rollout.turn[rollout.actions]
    starts = np.flatnonzero(np.diff(turn, prepend=0))
    context = (rollout.actions - rollout.offsets[rollout.sequence_of_token[rollout.actions]])[
        starts
    ]
    block = 128  # of vLLM's CPU cache
    assert (read % block == 0).all()
    assert (read[starts] < context).all()
    assert (read[starts][turn[starts] > 1] > 0).any()


@pytest.mark.grid
def test_an_environment_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "games.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    flags = ("--engine", "transformers", "--depth", "quick", "--environment", "games:Game")
    run = run_check(tmp_path / "run", "--model", "tiny-gpt-oss", *flags, *FEW)
    assert run.code in (0, 1)
    rollout = store.load_rollout(run.directory)
    assert rollout.turn.max() == 2
    assert set(rollout.rewards.tolist()) == {0.0, 2.0} or rollout.rewards.max() == 2.0
    assert OVER in str(run.report["not_tested"])


@pytest.mark.grid
def test_the_example_code_tool_runs_from_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = Path(__file__).parent.parent.parent / "examples" / "environments"
    monkeypatch.setenv("PYTHONPATH", str(examples), prepend=os.pathsep)
    flags = ("--engine", "transformers", "--depth", "quick", "--environment", "code_tool:Python")
    run = run_check(tmp_path / "run", "--model", "tiny-gpt-oss-tools", *flags, *FEW)
    assert run.code in (0, 1)
    rollout, texts = store.load_rollout(run.directory), store.load_vocabulary(run.directory)
    prompt = rollout.sequences()[0][rollout.turn[: rollout.offsets[1]] == 0]
    assert "python" in "".join(texts[int(token)] for token in prompt)


@pytest.mark.grid
def test_recorded_tokens_are_scored_as_in_the_run_they_came_from(
    tiny_run: Path, tmp_path: Path
) -> None:
    rollout = store.load_rollout(tiny_run)
    decode = store.load_scoring(tiny_run, "transformers:decode")
    ends = np.cumsum([part.sum() for part in np.split(rollout.action_mask, rollout.offsets[1:-1])])
    rows = zip(
        rollout.sequences(),
        np.split(rollout.action_mask, rollout.offsets[1:-1]),
        np.split(decode.logprobs, ends[:-1]),
        rollout.prompt_index.tolist(),
        strict=True,
    )
    file, run = tmp_path / "recorded.jsonl", tmp_path / "run"
    with file.open("w") as lines:
        for ids, mask, logprobs, prompt in rows:
            entry = {
                "token_ids": ids.tolist(),
                "action_mask": mask.tolist(),
                "logprobs": logprobs.tolist(),
                "prompt_id": prompt,
            }
            lines.write(json.dumps(entry) + "\n")
    commands = (
        ["read-rollouts", str(file), "--model", "tiny-gpt-oss", "--out", str(run)],
        ["score", str(run)],
        ["compare", str(run)],
    )
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "mismatch", *command],
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
    assert np.array_equal(store.load_rollout(run).token_ids, rollout.token_ids)
    scored, before = (store.load_scoring(directory, "fsdp") for directory in (run, tiny_run))
    assert np.abs(scored.logprobs - before.logprobs).max() < 0.3
    left = store.load_scoring(run, "recorded:decode")
    assert np.array_equal(left.logprobs, decode.logprobs)
