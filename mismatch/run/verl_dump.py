"""verl's RolloutSkip dumps, ``gen_batch.dp``: pickles, read without running anything in them.

Written by ``DataProto.save_to_disk``: a pickle of the class with a state of three parts, of which
the first is a ``torch.save`` of a consolidated TensorDict. Read in verl's sources of 2026-08-22
(1dda039: ``verl/utils/skip/rollout_skip.py``, ``verl/protocol.py``) and tensordict 0.15.3
(``_reductions.py``). Neither package is imported: a name that the file asks for is one of the few
below, or the file is refused.
"""

from __future__ import annotations

import io
import math
import pickle
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
TENSORS = "tensordict._reductions._rebuild_tensordict_files_consolidated"
REQUIRED = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs")
REFUSED = "the file may be hostile or of another version: write the batch as the generic form"


class Batch:
    """Stands for verl's DataProto: keeps its state and does nothing with it."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Restricted(pickle.Unpickler):
    """Knows the batch's class and numpy's arrays, and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        """As the base class; refuses what is not listed."""
        if (module, name) == ("verl.protocol", "DataProto"):
            return Batch
        if module in NUMPY.get(name, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_dump(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors of a dump by name, [B, ...], and its lists beside them, such as ``uid``.

    Raises:
        MismatchError: it cannot be read, asks for a name that is not listed, or lacks a tensor.
    """
    try:
        with path.open("rb") as file:
            batch = Restricted(file).load()
    except OSError as error:
        raise MismatchError(f"{path}: {error.strerror}", "give a file that can be read") from error
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise MismatchError(f"{path} is refused: {named_line(error)}", REFUSED) from error
    state = getattr(batch, "state", None)
    if not isinstance(state, tuple) or len(state) != 3 or not isinstance(state[0], bytes):
        raise MismatchError(f"{path} is no DataProto of verl", REFUSED)
    tensors = _tensors(path, state[0])
    missing = [name for name in REQUIRED if name not in tensors]
    if missing:
        switch = "actor_rollout_ref.rollout.calculate_log_probs=True records rollout_log_probs"
        raise MismatchError(f"{path} has no {', '.join(missing)}", switch)
    return tensors, state[1] if isinstance(state[1], dict) else {}


def _tensors(path: Path, data: bytes) -> dict[str, np.ndarray]:
    import torch

    allowed: list[Any] = [(_leaves, TENSORS)]
    try:
        with torch.serialization.safe_globals(allowed):
            tensors = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # torch says in many ways that it refuses
        raise MismatchError(f"{path} is refused: {named_line(error)}", REFUSED) from error
    if not isinstance(tensors, dict):
        raise MismatchError(f"{path}: its batch is no consolidated TensorDict", REFUSED)
    return tensors


def _leaves(metadata: dict[str, Any], storage: Any) -> dict[str, np.ndarray]:
    """The tensors of a consolidated TensorDict: name -> (dtype, shape, start, stop, padding)."""
    import torch

    found = {}
    for name, (kind, shape, start, stop, *_) in metadata["leaves"].items():
        dtype = getattr(torch, str(kind).removeprefix("torch."))
        if not isinstance(dtype, torch.dtype) or name.startswith("<NJT"):
            raise TypeError(f"{name} is no plain tensor")
        part = storage[start:stop].clone().view(dtype)[: math.prod(shape)].view(shape)
        found[name] = (part.float() if dtype.is_floating_point else part).numpy()
    return found
