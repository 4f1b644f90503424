"""Rollouts that a framework recorded: what is read, and what is refused with its line."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.errors import MismatchError
from mismatch.run import verl_dump
from mismatch.run.recorded import Form, as_rollout, read_recorded
from mismatch.types import Sampling

GENERIC = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4], "logprobs": [-0.1, -0.2]}
MASKED = {
    "token_ids": [1, 2, 3, 9, 9, 4],
    "action_mask": [0, 0, 1, 0, 0, 1],
    "logprobs": [-0.1, -0.2],
    "prompt_id": "a",
    "reward": 1,
    "finish_reason": "length",
}
INSTRUCT = {
    "step": 1,
    "sample_idx": 0,
    "prompt_idx": 7,
    "prompt_tokens": [1, 2],
    "response_tokens": [3, 4],
    "reward": 0.5,
    "finish_reason": "stop",
    "logprobs": [-0.1, -0.2],
    "request_info": None,
}


def turn(prompt: list[int], completion: list[int], versions: tuple[int, int] = (1, 1)) -> Any:
    return {
        "min_policy_version": versions[0],
        "max_policy_version": versions[1],
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "completion_logprobs": [-float(token) for token in completion],
    }


def titan(*turns: Any, group: int = 0) -> Any:
    return {"group_id": group, "rollout_id": 0, "reward": 1.0, "turns": list(turns)}


def written(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    return path


def read(path: Path, *entries: Any, form: Form | None = None) -> Any:
    return read_recorded(written(path / "a.jsonl", *entries), form)


def test_the_plain_form_and_the_masked_one(tmp_path: Path) -> None:
    form, batch = read(tmp_path, GENERIC, MASKED, MASKED, GENERIC)
    assert form == "generic"
    rollout, scoring = as_rollout(batch, Sampling(), {"engine": "recorded"})
    assert rollout.prompt_index.tolist() == [0, 1, 1, 2]
    assert rollout.token_ids.tolist()[4:10] == MASKED["token_ids"]
    assert rollout.turn.tolist()[4:10] == [0, 0, 1, 1, 1, 2]
    assert rollout.finish_reason == ("stop", "length", "length", "stop")
    assert rollout.rewards is None  # not every sequence has one
    assert scoring.token_ids.tolist() == [3, 4] * 4
    assert np.array_equal(scoring.logprobs, [-0.1, -0.2] * 4)


def test_samples_of_a_prompt_stand_together(tmp_path: Path) -> None:
    other = INSTRUCT | {"prompt_idx": 8, "reward": 2.0}
    _, batch = read(tmp_path, INSTRUCT, other, INSTRUCT)
    rollout, _ = as_rollout(batch, Sampling(), {})
    assert rollout.prompt_index.tolist() == [0, 0, 1]
    assert rollout.rewards is not None
    assert rollout.rewards.tolist() == [0.5, 0.5, 2.0]


def test_turns_that_grow_are_one_sequence(tmp_path: Path) -> None:
    entry = titan(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6]), group=4)
    form, batch = read(tmp_path, entry)
    assert form == "torchtitan"
    (row,) = batch.sequences
    assert row.token_ids == [1, 2, 3, 4, 5, 6]
    assert row.sampled == [False, False, True, True, False, True]
    assert row.turn == [0, 0, 1, 1, 1, 2]
    assert row.logprobs == [-3.0, -4.0, -6.0]
    assert not batch.remarks


def test_a_turn_with_other_ids_before_it_is_a_sequence_of_its_own(tmp_path: Path) -> None:
    """Encoded anew between the turns: each is scored with the context that its engine saw."""
    entry = titan(turn([1, 2], [3, 4]), turn([1, 2, 7, 5], [6], versions=(1, 2)))
    _, batch = read(tmp_path, entry)
    assert [row.token_ids for row in batch.sequences] == [[1, 2, 3, 4], [1, 2, 7, 5, 6]]
    assert sorted(batch.remarks.values()) == [1, 1]
    rollout, _ = as_rollout(batch, Sampling(), {})
    assert rollout.n_prompts == 1


def test_sequences_of_tools_without_a_mask_are_left_out(tmp_path: Path) -> None:
    tool = INSTRUCT | {"request_info": {"num_calls": 2, "tool_calleds": True}}
    _, batch = read(tmp_path, INSTRUCT, tool)
    assert len(batch.sequences) == 1
    assert list(batch.remarks.values()) == [1]
    with pytest.raises(MismatchError, match="no sequence"):
        read(tmp_path, tool)


REFUSED: dict[str, tuple[Any, str]] = {
    "no tensors": (titan({"turn_id": 0}), "log_tensors=True"),
    "no logprobs": (titan({"completion_token_ids": [1]}), "log_logprobs=True"),
    "fewer logprobs": (GENERIC | {"logprobs": [-0.1]}, "1 logprobs for 2 sampled"),
    "no logprob": (GENERIC | {"logprobs": [-0.1, 0.3]}, "no log-probability"),
    "NaN": (GENERIC | {"logprobs": [-0.1, float("nan")]}, "no log-probability"),
    "text ids": (GENERIC | {"response_token_ids": ["a", "b"]}, "no token id"),
    "negative": (GENERIC | {"response_token_ids": [3, -4]}, "no token id"),
    "nothing sampled": (MASKED | {"action_mask": [0] * 6, "logprobs": []}, "no token was sampled"),
    "first sampled": (GENERIC | {"prompt_token_ids": []}, "nothing predicts it"),
    "short mask": (MASKED | {"action_mask": [0, 1]}, "2 entries for 6"),
    "mask is no list": (MASKED | {"action_mask": 7}, "no list"),
    "instruct without": (INSTRUCT | {"logprobs": None}, "no logprobs"),
    "turns are text": (titan("a"), "torchtitan"),
    "verl": ({"input": "a", "output": "b", "gts": None, "score": 1}, "calculate_log_probs"),
    "TRL": ({"prompt": "a", "completion": "b", "step": 1}, "sampling_per_token_logps"),
    "unknown": ({"text": "a"}, "fields: text"),
    "a list": ([1], "no JSON object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_line_that_cannot_be_scored_is_named(name: str, tmp_path: Path) -> None:
    entry, says = REFUSED[name]
    with pytest.raises(MismatchError) as refused:
        read(tmp_path, entry)
    text = f"{refused.value.message} {refused.value.fix}"
    assert says in text
    assert "a.jsonl:1" in text


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b'{"token_ids": [1', b"\xff\xfe", b"[" * 100_000]
)
def test_a_file_that_is_empty_or_cut_off_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(MismatchError, match=r"a\.jsonl"):
        read_recorded(path)
    with pytest.raises(MismatchError, match="missing"):
        read_recorded(tmp_path / "missing")
    with pytest.raises(MismatchError):
        read_recorded(tmp_path)


# ---------------------------------------------------------------- verl's pickles

DUMP = (
    Path(__file__).parents[1] / "data" / "verl_gen_batch.dp"
)  # by tensordict 0.15.3, as verl does


def test_a_dump_of_verl_without_its_padding(tmp_path: Path) -> None:
    form, batch = read_recorded(DUMP)
    assert form == "verl"
    first, second, third, _ = batch.sequences
    assert first.sampled == [False] * 5 + [True] * 3 + [False] * 2 + [True] * 3
    assert first.turn == [0] * 5 + [1] * 5 + [2] * 3
    assert first.logprobs[0] == pytest.approx(-0.6984411)
    assert [first.finish_reason, second.finish_reason] == ["length", "stop"]
    assert [row.reward for row in batch.sequences] == [0.0, 1.0, 0.0, 1.0]
    assert len(third.token_ids) == 10
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "gen_batch.dp").write_bytes(DUMP.read_bytes())
    assert read_recorded(folder)[1] == batch
    rollout, scoring = as_rollout(batch, Sampling(), {})
    assert rollout.prompt_index.tolist() == [0, 0, 1, 1]
    assert len(scoring.logprobs) == sum(sum(row.sampled) for row in batch.sequences)


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def dumped(path: Path, monkeypatch: pytest.MonkeyPatch, batch: bytes, beside: Any) -> Path:
    """A pickle as verl writes it, of these parts."""
    import pickle
    import sys
    import types

    module = types.ModuleType("verl.protocol")
    kind = type("DataProto", (), {"__getstate__": lambda self: (batch, beside, {})})
    kind.__module__ = "verl.protocol"
    module.DataProto = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.protocol", module)
    path.write_bytes(pickle.dumps(kind()))
    return path


def test_a_hostile_dump_is_refused_and_nothing_in_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import pickle

    import torch

    mark, path = tmp_path / "ran", tmp_path / "gen_batch.dp"
    inner = io.BytesIO()
    torch.save({"prompts": Hostile(mark)}, inner)
    path.write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(MismatchError, match="refused"):
        read_recorded(path)
    for batch, beside in ((inner.getvalue(), {}), (b"", {"uid": Hostile(mark)}), (b"PK", {})):
        with pytest.raises(MismatchError, match="refused"):
            read_recorded(dumped(path, monkeypatch, batch, beside))
    for cut in (0, 100, 2000):
        path.write_bytes(DUMP.read_bytes()[:cut])
        with pytest.raises(MismatchError, match="refused"):
            read_recorded(path)
    assert not mark.exists()


QUEUE = DUMP.with_name("verl_tq_batch.pt")  # by tensordict 0.15.3, as RolloutTqSkip does


def test_a_dump_of_verl_s_transfer_queue(tmp_path: Path) -> None:
    """Rows of their own lengths, grouped by the uid in their keys."""
    form, batch = read_recorded(QUEUE)
    assert form == "verl"
    first, second, third = batch.sequences
    assert first.token_ids == [1, 2, 3, 6, 7, 20, 21, 8, 2]
    assert first.turn == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert first.logprobs == [-0.5, -0.25, -1.0, -0.125]
    assert [row.prompt for row in batch.sequences] == ["u1", "u1", "u2"]
    assert [row.reward for row in batch.sequences] == [0.0, 1.0, 0.0]
    assert (second.finish_reason, third.finish_reason) == ("stop", "environment")
    (tmp_path / "tq_batch.pt").write_bytes(QUEUE.read_bytes())
    assert read_recorded(tmp_path)[1] == batch


def test_nested_tensors_of_torch_s_older_layout(tmp_path: Path) -> None:
    """TransferQueue falls back to it."""
    import torch

    parts = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    torch.save({"rows": torch.nested.nested_tensor(parts, layout=torch.strided)}, tmp_path / "a")
    with zipfile.ZipFile(tmp_path / "a") as archive:
        rows = verl_dump.Queue(archive).load()["rows"]
    assert [row.tolist() for row in rows] == [[1, 2, 3], [4, 5]]


def test_a_hostile_queue_is_refused_and_nothing_in_it_runs(tmp_path: Path) -> None:
    import torch

    mark, path = tmp_path / "ran", tmp_path / "tq_batch.pt"
    held: list[Any] = [
        Hostile(mark),
        {"tensordict": {"prompts": Hostile(mark)}, "keys": []},
        {"tensordict": [], "keys": []},
        {"keys": []},
        [],
    ]
    for each in held:
        torch.save(each, path)
        with pytest.raises(MismatchError, match="refused"):
            read_recorded(path)
    with (
        zipfile.ZipFile(QUEUE) as saved,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in saved.namelist():
            archive.writestr(name, saved.read(name))
    with pytest.raises(MismatchError, match="compressed"):
        read_recorded(path)
    for cut in (3, 100, 5000):
        path.write_bytes(QUEUE.read_bytes()[:cut])
        with pytest.raises(MismatchError, match="refused"):
            read_recorded(path)
    assert not mark.exists()


OUTSIDE = [
    *((0, (5,), (1,)), (1, (4,), (1,)), (0, (3,), (-1,)), (-1, (1,), (1,))),
    *((0, (2, 2), (3, 1)), (0, (10**12,), (0,))),
]


@pytest.mark.parametrize(("offset", "size", "stride"), OUTSIDE)
def test_a_tensor_outside_its_storage_is_refused(
    offset: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    storage = np.arange(4)
    assert verl_dump._tensor(storage, 1, (2,), (2,)).tolist() == [1, 3]
    with pytest.raises(pickle.UnpicklingError, match="does not fit"):
        verl_dump._tensor(storage, offset, size, stride)


def test_a_dump_without_logprobs_names_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    import torch

    inner = io.BytesIO()
    torch.save({}, inner)
    path = dumped(tmp_path / "a.dp", monkeypatch, inner.getvalue(), {})
    with pytest.raises(MismatchError, match="rollout_log_probs") as caught:
        read_recorded(path)
    assert "calculate_log_probs=True" in caught.value.fix
