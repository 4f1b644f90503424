"""verl's RolloutSkip dumps, ``gen_batch.dp``: pickles, read without running anything in them.

Written by ``DataProto.save_to_disk``: a pickle of the class with a state of three parts, of which
the first is a ``torch.save`` (a zip with a pickle) of a consolidated TensorDict. Read in verl's
sources of 2026-08-22 (1dda039: ``verl/utils/skip/rollout_skip.py``, ``verl/protocol.py``) and
tensordict 0.15.3 (``_reductions.py``). Neither they nor torch are imported: a name that the file
asks for is one of the few below, or the file is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.errors import MismatchError, named_line

NAME = "gen_batch.dp"
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
REQUIRED = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs")
REFUSED = "the file may be hostile or of another version: write the batch as the generic form"


class Batch:
    """Stands for verl's DataProto: keeps its state and does nothing with it."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Outer(pickle.Unpickler):
    """Knows the batch's class and numpy's arrays, and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        """As the base class; refuses what is not listed."""
        if (module, name) == ("verl.protocol", "DataProto"):
            return Batch
        if module in NUMPY.get(name, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


class Inner(pickle.Unpickler):
    """The pickle in a ``torch.save``: one storage of bytes, cut into tensors."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        (place,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        super().__init__(io.BytesIO(archive.read(place)))
        self.archive, self.root = archive, place.removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        """Stand-ins for what is listed; refuses the rest."""
        listed = {
            "tensordict._reductions._rebuild_tensordict_files_consolidated": _leaves,
            "torch._utils._rebuild_tensor_v2": _bytes,
            "torch.ByteStorage": bytes,
            "collections.OrderedDict": dict,
        }
        if f"{module}.{name}" in listed:
            return listed[f"{module}.{name}"]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> np.ndarray:
        """A storage, by its number: ("storage", kind, number, device, bytes)."""
        return np.frombuffer(self.archive.read(f"{self.root}data/{int(pid[2])}"), np.uint8)


def _bytes(storage: np.ndarray, offset: int, shape: tuple[int, ...], *_: Any) -> np.ndarray:
    """A one-dimensional tensor of bytes."""
    (size,) = shape
    return storage[offset : offset + size]


def _leaves(metadata: dict[str, Any], storage: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a consolidated TensorDict: name -> (dtype, shape, start, stop, padding)."""
    found = {}
    for name, (kind, shape, start, stop, *_) in metadata["leaves"].items():
        part = storage[start:stop].tobytes()
        if kind == "torch.bfloat16":
            values: Any = (np.frombuffer(part, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(part, KINDS[kind])
        found[name] = values[: math.prod(shape)].reshape(shape)
    return found


def read_dump(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors of a dump by name, [B, ...], and its lists beside them, such as ``uid``.

    Raises:
        MismatchError: it cannot be read, asks for a name that is not listed, or lacks a tensor.
    """
    tensors: Any
    try:
        with path.open("rb") as file:
            state = getattr(Outer(file).load(), "state", None)
        if not isinstance(state, tuple) or len(state) != 3 or not isinstance(state[0], bytes):
            raise pickle.UnpicklingError("it is no DataProto of verl")
        with zipfile.ZipFile(io.BytesIO(state[0])) as archive:
            tensors = Inner(archive).load()
        if not isinstance(tensors, dict):
            raise pickle.UnpicklingError("its batch is no consolidated TensorDict")
    except OSError as error:
        raise MismatchError(f"{path}: {error.strerror}", "give a file that can be read") from error
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise MismatchError(f"{path} is refused: {named_line(error)}", REFUSED) from error
    missing = [name for name in REQUIRED if name not in tensors]
    if missing:
        switch = "actor_rollout_ref.rollout.calculate_log_probs=True records rollout_log_probs"
        raise MismatchError(f"{path} has no {', '.join(missing)}", switch)
    return tensors, state[1] if isinstance(state[1], dict) else {}
