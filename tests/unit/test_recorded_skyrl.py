"""SkyRL's dumped_data/*.pkl: read without its classes, and nothing that such a file names runs."""

from __future__ import annotations

import io
import os
import pickle
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mismatch.errors import MismatchError
from mismatch.features.recorded.dumps import read_recorded
from mismatch.metrics.row_sums import Row
from tests.command import mismatch

pytestmark = pytest.mark.slow

NEW, OLD = "skyrl.backends.skyrl_train.training_batch", "skyrl_train.training_batch"
# A row is a prompt, a response, and which of the response's tokens were sampled.
ROWS = (([5, 6, 7], [8, 9], [1, 1]), ([5, 6], [30, 31, 20, 32], [1, 1, 0, 1]), ([4], [2], [0]))


def state_of(tensors: dict[str, Any], metadata: Any) -> dict[str, Any]:
    """Return the state that ``TensorBatch.__getstate__`` gives."""
    held: dict[str, Any] = {}
    for name, tensor in tensors.items():
        held[name] = None
        if tensor is not None and tensor.dtype == torch.bfloat16:
            torch.save(tensor, file := io.BytesIO())
            held[name] = {"format": "torch", "data": file.getvalue()}
        elif tensor is not None:
            array = tensor.numpy()
            about = {"shape": array.shape, "dtype": str(array.dtype)}
            held[name] = {"format": "numpy", "data": array.tobytes()} | about
    device = torch.device("cpu")
    return {"batch_dict": held, "batch_size": len(ROWS), "device": device, "metadata": metadata}


def tensors_of(module: str, kind: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the batch of ROWS and one row that fills it up, log-probabilities by token id.

    Until March 2026 prompts were padded on the left and responses on the right; since then
    ``preprocess.py`` pads each whole row on the left, and what is per response token too.
    """
    rows = (*ROWS, (ROWS[0][0], ROWS[0][1], [0, 0]))
    widest = max(len(response) for _, response, _ in rows)
    whole = max(len(prompt) for prompt, _, _ in rows) + widest
    sequences, attended, masks = (torch.zeros(len(rows), n).long() for n in (whole, whole, widest))
    for at, (prompt, response, mask) in enumerate(rows):
        end = widest if module == NEW else len(response)
        there = slice(whole - widest + end - len(response) - len(prompt), whole - widest + end)
        sequences[at, there] = torch.tensor(prompt + response)
        attended[at, there] = 1
        masks[at, end - len(response) : end] = torch.tensor(mask)
    last = sequences[:, -widest:].float()
    return {
        "sequences": sequences,
        "attention_mask": attended,
        "response_mask": attended[:, -widest:],
        "loss_mask": masks.float(),
        "rollout_logprobs": -last,
        "rollout_expert_indices": None,
        "base_action_log_probs": None,
        "action_log_probs": (-last - 0.5).to(kind),
        "advantages": last,
    }


def dumped(
    path: Path,
    patch: pytest.MonkeyPatch,
    module: str = NEW,
    kind: torch.dtype = torch.float32,
    protocol: int | None = None,
    **metadata: Any,
) -> Path:
    """Write a file as SkyRL's ``TensorBatch.save`` does.

    Read in ``skyrl/backends/skyrl_train/training_batch.py`` of SkyRL a956457: ``pickle.dump`` of
    the batch, a dict that ``__reduce__`` turns into ``_rebuild_tensor_batch(class, state)``. Of
    skyrl_train 0.4.0: the batch has no ``__reduce__``, so tensors stand in the dict as well.
    ``trainer.py`` removes rewards and uids before it calls ``dump_data``.
    """

    class TrainingInputBatch(dict):  # type: ignore[type-arg]
        def __getstate__(self) -> Any:
            return state_of(
                dict(self), {"pad_size": 1, "metrics": {"coef": np.float64(0.1)}, **metadata}
            )

    class Reduced(TrainingInputBatch):
        def __reduce__(self) -> Any:
            return _rebuild_tensor_batch, (type(self), self.__getstate__())

    def _rebuild_tensor_batch(cls: Any, state: Any) -> None:
        raise AssertionError("it was called")

    written = Reduced if module == NEW else TrainingInputBatch
    stand_in = ModuleType(module)
    for made in (written, _rebuild_tensor_batch):
        made.__module__ = module
    written.__name__ = written.__qualname__ = "TrainingInputBatch"
    _rebuild_tensor_batch.__qualname__ = "_rebuild_tensor_batch"
    stand_in.TrainingInputBatch = written  # type: ignore[attr-defined]
    stand_in._rebuild_tensor_batch = _rebuild_tensor_batch  # type: ignore[attr-defined]
    parts = module.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, module, stand_in)
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(written(tensors_of(module, kind)), file, protocol=protocol)
    patch.undo()  # the reader finds no such module
    return path


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = tmp_path / "dumped_data" / "global_step_12_training_input.pkl"
    return partial(dumped, path, monkeypatch)


def sides(row: Row) -> tuple[Any, ...]:
    assert row.train_logprobs is not None
    lists = (row.token_ids, row.sampled.astype(int), row.logprobs, row.train_logprobs)
    return tuple(values.tolist() for values in lists)


@pytest.mark.parametrize(
    ("module", "kind", "protocol"),
    [(NEW, torch.float32, 4), (NEW, torch.bfloat16, 5), (OLD, torch.bfloat16, 4)],
)
def test_a_batch_of_skyrl_loses_its_padding(
    dump: Any, module: str, kind: torch.dtype, protocol: int
) -> None:
    got = read_recorded(dump(module, kind, protocol), python=sys.executable)
    assert got.form == "skyrl"
    first, second = got.sequences
    assert sides(first) == ([5, 6, 7, 8, 9], [0, 0, 0, 1, 1], [-8.0, -9.0], [-8.5, -9.5])
    ids, sampled = [5, 6, 30, 31, 20, 32], [0, 0, 1, 1, 0, 1]
    assert sides(second) == (ids, sampled, [-30.0, -31.0, -32.0], [-30.5, -31.5, -32.5])
    assert (first.prompt, second.prompt) == ((5, 6, 7), (5, 6))
    assert first.attributes == {"step": "12"}
    assert list(got.remarks.values()) == [1]  # the row without a sampled token; the filler is gone
    assert got.unread == {"advantages", "response_mask"}


def test_postmortem_judges_a_batch_of_skyrl(dump: Any, tmp_path: Path) -> None:
    path = dump()
    done = mismatch("postmortem", path, "--out", tmp_path / "run")
    assert done.returncode == 2  # no --python
    assert "--python" in done.stderr
    done = mismatch("postmortem", path, "--python", sys.executable, "--out", tmp_path / "run")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize("name", ["rollout_logprobs", "action_log_probs", "attention_mask"])
def test_a_batch_of_skyrl_without_a_side_is_one_sided_or_refused(
    dump: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = tensors_of(NEW)
    monkeypatch.setitem(dumped.__globals__, "tensors_of", lambda *_: whole | {name: None})
    path = dump()
    if name == "action_log_probs":  # a loss that needs no old log-probabilities
        assert read_recorded(path, python=sys.executable).sums.one_sided == 2
    else:
        with pytest.raises(MismatchError, match=name):
            read_recorded(path, python=sys.executable)


class Hostile:
    """Writes a file where it is unpickled."""

    def __init__(self, into: Path) -> None:
        self.into = into

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.into),)


class Nested(Hostile):
    """Names what a batch may name, with bytes that would run."""

    def __reduce__(self) -> Any:
        file = io.BytesIO()
        torch.save(Hostile(self.into), file)
        return torch.storage._load_from_bytes, (file.getvalue(),)


@pytest.mark.parametrize("protocol", [0, 4])
def test_what_a_hostile_batch_names_is_refused_and_does_not_run(
    dump: Any, tmp_path: Path, protocol: int
) -> None:
    ran = tmp_path / "ran"
    path = dump(metrics=Hostile(ran))
    with pytest.raises(MismatchError, match=r"posix\.mkdir is") as refused:
        read_recorded(path, python=sys.executable)
    assert "JSONL" in refused.value.fix
    path.write_bytes(b"\x80\x02" + pickle.dumps(["x.training_batch", Hostile(ran)], protocol))
    with pytest.raises(MismatchError, match=r"posix\.mkdir is"):
        read_recorded(path, python=sys.executable)
    assert not ran.exists()
    pickle.loads(path.read_bytes())  # the test can fail: whoever unpickles it runs it
    assert ran.exists()


def test_bytes_of_torch_inside_a_batch_never_run(dump: Any, tmp_path: Path) -> None:
    """A name that is known is only taken up; the format of a tensor is read without code."""
    ran = tmp_path / "ran"
    assert read_recorded(dump(metrics=Nested(ran)), python=sys.executable).sums.rows == 2
    torch.save(Hostile(ran), file := io.BytesIO())
    bad = {"format": "torch", "data": file.getvalue()}
    arrays = {"format": "numpy", "data": bytes(8), "shape": (1,), "dtype": "O"}
    for held in (bad, arrays, {"format": "numpy"}, 7):
        text = pickle.dumps({"batch_dict": {"sequences": held}, "metadata": None})[:-1]
        path = tmp_path / "a.pkl"
        path.write_bytes(b"\x80\x04cx.training_batch\n_rebuild_tensor_batch\n(" + text + b"tR.")
        with pytest.raises(MismatchError, match=r"a\.pkl"):
            read_recorded(path, python=sys.executable)
    assert not ran.exists()


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps({"tokens": np.zeros(3)}))
    with pytest.raises(MismatchError, match="nor a batch"):
        read_recorded(path, python=sys.executable)
