"""verl's ``gen_batch.dp`` in its three serialisations, and the versions of the weights in it."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mismatch.errors import MismatchError
from mismatch.features.recorded.dumps import read_recorded

from ..command import mismatch
from ..recorded_folders import Sample, samples

PROTOCOL, REDUCTIONS = "verl.protocol", "tensordict._reductions"


class DataProto:
    """As ``verl/protocol.py`` (0.9.1): ``save_to_disk`` is ``pickle.dump`` of it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state


class Consolidated:
    """What ``torch.save`` writes of ``batch.contiguous().consolidate()`` (tensordict 0.10.0)."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __reduce__(self) -> Any:
        leaves, at, data = {}, 0, []
        for name, value in self.tensors.items():
            held = value.contiguous().view(-1).view(torch.uint8)
            pad = -len(held) % 8
            leaves[name] = (str(value.dtype), list(value.shape), at, at + len(held) + pad, pad)
            data += [held, torch.zeros(pad, dtype=torch.uint8)]
            at += len(held) + pad
        metadata = {"cls": "TensorDict", "cls_metadata": {}, "non_tensors": {}, "leaves": leaves}
        return _rebuild_tensordict_files_consolidated, (metadata, torch.cat(data))


def _rebuild_tensordict_files_consolidated(*given: Any) -> None:
    raise AssertionError("it was called")


def batch(rows: list[Sample], trained: bool) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, responses on the right."""
    width = max(len(row.prompt) for row in rows), max(len(row.response) for row in rows)
    held = {
        "prompts": torch.zeros(len(rows), width[0], dtype=torch.long),
        "responses": torch.zeros(len(rows), width[1], dtype=torch.long),
        "attention_mask": torch.zeros(len(rows), sum(width), dtype=torch.long),
        "response_mask": torch.zeros(len(rows), width[1], dtype=torch.long),
        "rollout_log_probs": torch.zeros(len(rows), width[1]),
    }
    if trained:
        held["old_log_probs"] = torch.zeros(len(rows), width[1])
    for n, row in enumerate(rows):
        size, before = len(row.response), width[0] - len(row.prompt)
        held["prompts"][n, before:] = torch.tensor(row.prompt)
        held["responses"][n, :size] = torch.tensor(row.response)
        held["attention_mask"][n, before : width[0] + size] = 1
        held["response_mask"][n, :size] = 1
        held["rollout_log_probs"][n, :size] = torch.tensor(row.rollout)
        if trained:
            held["old_log_probs"][n, :size] = torch.tensor(row.train)
    return held


def by_numpy(value: torch.Tensor) -> tuple[str, torch.Size, np.ndarray]:
    """As ``serialize_single_tensor``."""
    data = value.contiguous().view(-1).view(torch.uint8).numpy()
    return str(value.dtype).removeprefix("torch."), value.shape, data


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def written(form: str, trained: bool = True) -> tuple[Path, list[Sample]]:
        rows = samples(16)
        tensors = batch(rows, trained)
        for name, made in (
            (PROTOCOL, DataProto),
            (REDUCTIONS, _rebuild_tensordict_files_consolidated),
        ):
            module = ModuleType(name)
            setattr(module, made.__name__, made)
            monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name))
            monkeypatch.setitem(sys.modules, name, module)
            monkeypatch.setattr(made, "__module__", name)
        if form == "numpy":
            data: Any = ((16,), None, {name: by_numpy(each) for name, each in tensors.items()})
        else:
            file = io.BytesIO()
            torch.save(Consolidated(tensors) if form == "consolidated" else tensors, file)
            data = file.getvalue()
        others = {
            "uid": np.array([f"u{n // 4}" for n in range(16)], dtype=object),
            "min_global_steps": np.array([3] * 15 + [2]),
            "max_global_steps": np.array([3] * 16, dtype=object),
        }
        path = tmp_path / "project" / "GBS4_N4_in8_out32" / "7"
        path.mkdir(parents=True)
        with (path / "gen_batch.dp").open("wb") as out:
            pickle.dump(DataProto((data, others, {"timing": {}})), out)
        (path / "meta.json").write_text('{"global_steps": 7}')
        monkeypatch.undo()
        return tmp_path / "project", rows

    return written


@pytest.mark.parametrize("form", ["plain", "consolidated", "numpy"])
def test_all_serialisations_hold_the_same(folder: Any, form: str) -> None:
    path, rows = folder(form)
    recorded = read_recorded(path, python=sys.executable)
    assert recorded.form == "verl"
    found = {tuple(row.token_ids.tolist()): row for row in recorded.sequences}
    for row in rows:
        read = found[*row.prompt, *row.response]
        assert read.logprobs.tolist() == pytest.approx(row.rollout)
        assert read.train_logprobs is not None
        assert read.train_logprobs.tolist() == pytest.approx(row.train)
    assert {row.attributes["step"] for row in recorded.sequences} == {"7"}
    versions = [row.attributes["weight_version"] for row in recorded.sequences]
    assert (versions.count("3"), versions.count("2 to 3")) == (15, 1)
    assert [error.foreign for error in recorded.passed_over] == [True]


def test_a_rollout_of_verl_alone_names_the_plug_in(folder: Any, tmp_path: Path) -> None:
    path, _ = folder("numpy", trained=False)
    done = mismatch("postmortem", path, "--python", sys.executable, cwd=tmp_path)
    assert done.returncode == 2
    assert "plug-in" in done.stderr


def test_a_pickle_that_names_code_is_not_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return Path.mkdir, (tmp_path / "ran",)

    monkey = DataProto((b"", {"uid": Hostile()}, {}))
    monkey.__class__.__module__ = __name__
    with (tmp_path / "gen_batch.dp").open("wb") as file:
        pickle.dump(monkey, file)
    with pytest.raises(MismatchError, match="part of a"):
        read_recorded(tmp_path / "gen_batch.dp", python=sys.executable)
    assert not (tmp_path / "ran").exists()
