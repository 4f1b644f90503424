"""Sampling settings that a checkpoint carries are said where a run samples without them."""

import json
from pathlib import Path

import pytest

from mismatch.features.presets.flags import sample_as
from mismatch.models.sampling_defaults import FILE, not_applied, stated
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec
from mismatch.types import Sampling


def checkpoint(folder: Path, text: str) -> str:
    (folder / FILE).write_text(text)
    return str(folder)


def test_settings_that_change_a_law_are_named_with_their_values(tmp_path: Path) -> None:
    values = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 2}
    model = checkpoint(tmp_path, json.dumps(values))
    (entry,) = not_applied(model, None, Sampling(temperature=0.7))
    assert entry.what.startswith("top_k, repetition_penalty")
    assert "1.05" in entry.reason
    assert "temperature" not in entry.reason
    assert "prime-rl" in entry.reason
    assert {"--top-k", "--repetition-penalty"} <= set(entry.how.split())


@pytest.mark.parametrize("name", ["verl", "trl", "prime-rl", "nemo-rl"])
def test_a_frameworks_sampling_takes_what_it_leaves_to_the_engine(
    tmp_path: Path, name: str
) -> None:
    values = {"temperature": 0.7, "repetition_penalty": 1.05, "min_p": 0.1}
    model = checkpoint(tmp_path, json.dumps(values))
    check = CheckSpec(RolloutSpec(EngineSpec(model=model), sampling=Sampling(temperature=0.5)))
    done, _ = sample_as(name, check, explicit=())
    assert done.rollout.sampling.temperature == 1.0  # each of them sends its own
    assert done.rollout.sampling.min_p == (0.1 if name == "nemo-rl" else 0.0)
    leaves_open = name in ("prime-rl", "nemo-rl")
    assert done.rollout.sampling.repetition_penalty == (1.05 if leaves_open else 1.0)
    kept, _ = sample_as(name, check, explicit={"temperature"})
    assert kept.rollout.sampling.temperature == 0.5


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"temperature": 1.0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0}),
        json.dumps({"top_k": None, "temperature": "warm"}),
        "[1]",
        "no JSON",
    ],
)
def test_neutral_or_unreadable_settings_are_none(tmp_path: Path, text: str) -> None:
    assert stated(checkpoint(tmp_path, text), None) == {}


def test_a_checkpoint_without_the_file_states_nothing(tmp_path: Path) -> None:
    assert not list(not_applied(str(tmp_path), None, Sampling()))
