"""verl's RolloutSkip dumps: pickles, read without running anything in them.

``gen_batch.dp`` is written by ``DataProto.save_to_disk``: a pickle of the class with a state of
three parts, of which the first is a ``torch.save`` (a zip with a pickle) of a consolidated
TensorDict of padded tensors. ``tq_batch.pt`` (of the trainer with a TransferQueue) is a
``torch.save`` of ``{"tensordict", "tags", "keys", "global_steps"}`` with a nested tensor of rows
per field. Read in verl's sources of 2026-08-22 (1dda039: ``verl/utils/skip/rollout_skip.py``,
``verl/protocol.py``), in TransferQueue 0.1.7's ``_pack_field_values``, in tensordict 0.15.3
(``_reductions.py``) and in torch 2.13 (``nested/_internal/nested_tensor.py``). None of them is
imported: a name that a file asks for is one of the few below, or the file is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mismatch.errors import MismatchError, named_line

NAME = "gen_batch.dp"
QUEUE = "tq_batch.pt"
NUMPY = {
    "_reconstruct": ("numpy.core.multiarray", "numpy._core.multiarray"),
    "scalar": ("numpy.core.multiarray", "numpy._core.multiarray"),
    "_frombuffer": ("numpy.core.numeric", "numpy._core.numeric"),
    "ndarray": ("numpy",),
    "dtype": ("numpy",),
}
KINDS = {
    "torch.bool": np.bool_,
    "torch.uint8": np.uint8,
    "torch.int32": np.int32,
    "torch.int64": np.int64,
    "torch.float16": np.float16,
    "torch.float32": np.float32,
    "torch.float64": np.float64,
}
BF16 = "bf16"
STORAGES: dict[str, Any] = {
    "torch.BoolStorage": np.bool_,
    "torch.ByteStorage": np.uint8,
    "torch.CharStorage": np.int8,
    "torch.ShortStorage": np.int16,
    "torch.IntStorage": np.int32,
    "torch.LongStorage": np.int64,
    "torch.HalfStorage": np.float16,
    "torch.FloatStorage": np.float32,
    "torch.DoubleStorage": np.float64,
    "torch.BFloat16Storage": BF16,
}
REQUIRED = ("prompts", "responses", "response_mask", "rollout_log_probs")
REFUSED = "the file may be hostile or of another version: write the batch as the generic form"


class Batch:
    """Stands for verl's DataProto: keeps its state and does nothing with it."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Inert:
    """Stands for what is not needed: made of anything, and holds nothing."""

    def __new__(cls, *_: Any) -> Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None: ...


class Outer(pickle.Unpickler):
    """Knows the batch's class and numpy's arrays, and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        """As the base class; refuses what is not listed."""
        if (module, name) == ("verl.protocol", "DataProto"):
            return Batch
        if module in NUMPY.get(name, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


class Saved(Outer):
    """The pickle in a ``torch.save``: its storages are arrays, its names those of ``listed``."""

    listed: ClassVar[dict[str, Any]]

    def __init__(self, archive: zipfile.ZipFile) -> None:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        self.archive, self.root = archive, name.removesuffix("data.pkl")
        super().__init__(io.BytesIO(self._stored(name)))

    def _stored(self, name: str) -> bytes:
        if self.archive.getinfo(name).compress_type != zipfile.ZIP_STORED:  # torch never does
            raise pickle.UnpicklingError("it is compressed")
        return self.archive.read(name)

    def find_class(self, module: str, name: str) -> Any:
        """Stand-ins for what is listed; refuses the rest."""
        if f"{module}.{name}" in self.listed:
            return self.listed[f"{module}.{name}"]
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> np.ndarray:
        """A storage, by its number: ("storage", kind, number, device, entries)."""
        data = self._stored(f"{self.root}data/{int(pid[2])}")
        return _bf16(data) if pid[1] == BF16 else np.frombuffer(data, pid[1])


def _bf16(data: bytes) -> np.ndarray:
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _tensor(
    storage: np.ndarray, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any
) -> np.ndarray:
    """A view of a storage; never outside it, never larger than it."""
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride)) < 0 or math.prod(size) > len(storage):
        raise pickle.UnpicklingError("a tensor that does not fit its storage")
    if not math.prod(size):
        return np.zeros(tuple(size), storage.dtype)
    if last >= len(storage):
        raise pickle.UnpicklingError("a tensor that does not fit its storage")
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], tuple(size), steps, writeable=False)


def _leaves(metadata: dict[str, Any], storage: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a consolidated TensorDict: name -> (dtype, shape, start, stop, padding)."""
    leaves = {}
    for name, (kind, shape, start, stop, *_) in metadata["leaves"].items():
        part = storage[start:stop].tobytes()
        values = _bf16(part) if kind == "torch.bfloat16" else np.frombuffer(part, KINDS[kind])
        leaves[name] = values[: math.prod(shape)].reshape(shape)
    return leaves


def _jagged(state: dict[str, Any]) -> list[np.ndarray]:
    """Rows of a nested tensor of the jagged layout, ragged in its second dimension."""
    if state["_ragged_idx"] != 1:
        raise pickle.UnpicklingError("a nested tensor whose rows are not ragged in their length")
    values, offsets, lengths = state["values"], state["offsets"].tolist(), state["lengths"]
    ends = offsets[1:] if lengths is None else (state["offsets"][:-1] + lengths).tolist()
    return [values[start:end] for start, end in zip(offsets[:-1], ends, strict=True)]


def _strided(
    buffer: np.ndarray, sizes: np.ndarray, strides: np.ndarray, offsets: np.ndarray
) -> list[np.ndarray]:
    """Rows of a nested tensor of the strided layout: an entry of each list per row."""
    parts = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    return [_tensor(buffer, offset, size, stride) for size, stride, offset in parts]


class Inner(Saved):
    """The batch of a ``gen_batch.dp``."""

    listed: ClassVar[dict[str, Any]] = STORAGES | {
        "tensordict._reductions._rebuild_tensordict_files_consolidated": _leaves,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "collections.OrderedDict": dict,
    }


class Queue(Saved):
    """A ``tq_batch.pt``: what is no tensor of rows becomes :class:`Inert`."""

    listed: ClassVar[dict[str, Any]] = Inner.listed | {
        "tensordict._reductions._make_td": lambda kind, state: state["_tensordict"],
        "torch._tensor._rebuild_from_type_v2": lambda rebuild, kind, given, state: rebuild(*given),
        "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
        "torch._utils._rebuild_nested_tensor": _strided,
        "torch._utils._rebuild_tensor_v3": Inert,  # dtypes that no field read here has
        "__builtin__.set": list,
        "builtins.set": list,
        "torch.Size": tuple,
        **dict.fromkeys(
            (
                *("tensordict._td.TensorDict", "tensordict._lazy.LazyStackedTensorDict"),
                *("tensordict.tensorclass.NonTensorStack", "tensordict.tensorclass.NonTensorData"),
                *("torch.Tensor", "torch.nested._internal.nested_tensor.NestedTensor"),
                *("torch._dynamo.decorators._DimRange", "torch.storage.UntypedStorage"),
                *("torch.device", "torch.uint16", "torch.uint32", "torch.uint64"),
            ),
            Inert,
        ),
    }


def read_dump(path: Path) -> tuple[dict[str, Any], list[str] | None]:
    """Fields of a dump by name, each a row per sequence, and the prompt that each belongs to.

    Rows of a ``gen_batch.dp`` are padded and have an ``attention_mask``.

    Raises:
        MismatchError: it cannot be read, asks for a name that is not listed, or lacks a field.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"  # a gen_batch.dp only holds a zip
        rows, prompts = _queue(path) if zipped else _batch(path)
    except OSError as error:
        raise MismatchError(f"{path}: {error.strerror}", "give a file that can be read") from error
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise MismatchError(f"{path} is refused: {named_line(error)}", REFUSED) from error
    missing = [name for name in REQUIRED if name not in rows]
    if missing:
        switch = "actor_rollout_ref.rollout.calculate_log_probs=True records rollout_log_probs"
        raise MismatchError(f"{path} has no {', '.join(missing)}", switch)
    return rows, prompts


def _batch(path: Path) -> tuple[dict[str, Any], list[str] | None]:
    tensors: Any
    with path.open("rb") as file:
        state = getattr(Outer(file).load(), "state", None)
    if not isinstance(state, tuple) or len(state) != 3 or not isinstance(state[0], bytes):
        raise pickle.UnpicklingError("it is no DataProto of verl")
    with zipfile.ZipFile(io.BytesIO(state[0])) as archive:
        tensors = Inner(archive).load()
    if not isinstance(tensors, dict):
        raise pickle.UnpicklingError("its batch is no consolidated TensorDict")
    uids = state[1].get("uid") if isinstance(state[1], dict) else None
    return tensors, None if uids is None else [str(uid) for uid in uids]


def _queue(path: Path) -> tuple[dict[str, Any], list[str] | None]:
    """Keys are ``{uid}_{session}_{index}``; a field that is no list of rows is left out."""
    with zipfile.ZipFile(path) as archive:
        saved: Any = Queue(archive).load()
    fields = saved.get("tensordict") if isinstance(saved, dict) else None
    if not isinstance(fields, dict):
        raise pickle.UnpicklingError("it holds no batch of a TransferQueue")
    keys = [str(key) for key in saved["keys"]]
    rows = {
        name: values
        for name, values in fields.items()
        if isinstance(values, list | np.ndarray) and len(values) == len(keys)
    }
    return rows, [key.split("_")[0] for key in keys]
