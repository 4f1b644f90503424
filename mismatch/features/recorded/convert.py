"""Convert a file of torch or pickle to rows, in a child process of the framework's environment.

The parent never opens these files. The child is this file, run by path; it imports torch, and
tensordict where it is installed (which allows its classes), and reads with ``weights_only=True``.
That reader knows no pickle of today's protocols, which SkyRL writes: see :class:`OfSkyRL`.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

VERL = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs",
        "old_log_probs", "rm_scores")  # fmt: skip
# SkyRL removes rewards and uids before it writes.
SKYRL = ("sequences", "attention_mask", "loss_mask", "rollout_logprobs", "action_log_probs")
# What a batch of SkyRL names; until March 2026 it held its tensors twice.
NAMED = (
    "training_batch._rebuild_tensor_batch training_batch.TrainingInputBatch torch.device "
    "torch._utils._rebuild_tensor_v2 torch.storage._load_from_bytes collections.OrderedDict "
    "numpy.dtype numpy.core.multiarray.scalar numpy._core.multiarray.scalar"
)
# A file can make older versions run code, also with weights_only (CVE-2025-32434 up to 2.5.1,
# CVE-2026-24747 up to 2.9.1).
SAFE_TORCH = (2, 10)
READING, TIMES = 768 << 20, 16  # bytes that a file may take in the child, and those per byte of it
# slime's lists with one entry per sequence, and those whose names it gives an s.
SLIME = ("tokens", "rollout_log_probs", "log_probs", "entropy")
SLIMES = ("response_length", "loss_mask", "reward")


def converted(path: Path, python: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of every row of a file of torch or pickle.

    Args:
        python: interpreter of the environment that wrote the file.

    Raises:
        MismatchError: no interpreter was given, or its torch refuses the file.
    """
    # Not at the top: a child has no mismatch.
    from mismatch.errors import MismatchError
    from mismatch.features.recorded.parts import Part

    if python is None:
        fault = f"{path} is a file of torch or pickle, and reading one here can run code"
        fix = "name the environment that wrote it, which reads it safely: --python ENV/bin/python"
        raise MismatchError(fault, fix)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        command = [python, "-I", __file__, str(path), str(rows)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
            )
            if done.returncode:
                raise OSError((done.stderr.strip().splitlines() or ["no message"])[-1])
        except (OSError, subprocess.TimeoutExpired) as error:
            fault = f"{path} was not read by {python}: {error}"
            fix = "name the environment that wrote it, or write JSONL: docs/how-to/recorded-runs.md"
            raise MismatchError(fault, fix) from error
        yield from Part(rows, 0).json_lines()


def main() -> None:
    """Write the rows of the file ``sys.argv[1]`` as JSON lines to ``sys.argv[2]``.

    Raises:
        ValueError: the rows hold more values than the file has bytes: one value is seen as many.
    """
    left = Path(sys.argv[1]).stat().st_size
    with Path(sys.argv[2]).open("w") as out:
        for row in rows_of(Path(sys.argv[1])):
            left -= sum(map(count, row.values()))
            if left < 0:
                raise ValueError("it holds more values than bytes")
            out.write(json.dumps({name: plain(value) for name, value in row.items()}) + "\n")


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dump of verl, SkyRL, slime or miles."""
    batch, padded = load(path)
    if isinstance(batch, dict) and isinstance(batch.get("rollout_data"), dict):
        data = batch["rollout_data"]
        lists = {name: data.get(name) for name in SLIME}
        lists |= {name: data.get(f"{name}s") for name in SLIMES}
        for number in range(len(data["tokens"])):
            row = {name: held[number] for name, held in lists.items() if held is not None}
            yield row | {"rank": str(batch.get("rank")), "step": str(batch.get("rollout_id"))}
        return
    held = batch.keys()  # of a TensorDict only these are names
    names = [name for name in (SKYRL if "sequences" in held else VERL) if name in held]
    if names[:1] != ["sequences"] and "responses" not in names:
        raise ValueError("neither a batch of verl or SkyRL nor a train dump of slime or miles")
    for values in zip(*(batch[name] for name in names), strict=True):
        yield dict(zip(names, values, strict=True)) | {"padded": padded}


def load(path: Path) -> tuple[Any, bool]:
    """Return the batch of a file, and whether its rows are padded.

    verl's ``gen_batch.dp`` is a pickle that holds a file of torch as bytes: these are cut out of it
    without unpickling.
    """
    import importlib.util
    import io
    import pickletools

    import torch

    version = str(torch.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < SAFE_TORCH:
        needs = ".".join(map(str, SAFE_TORCH))
        raise ValueError(f"a file can run code in its torch {version}; this needs {needs} or later")
    limit_memory(path)
    if importlib.util.find_spec("tensordict") is not None:
        import tensordict  # noqa: F401 (allows its classes to torch.load)
    with path.open("rb") as file:
        zipped = file.read(2) == b"PK"
        file.seek(0)
        source: Any = file
        if not zipped:
            for _, value, _ in pickletools.genops(file):
                if type(value) is str and "training_batch" in value:  # comes before the tensors
                    file.seek(0)
                    return tensors_of(OfSkyRL(file).load()), True
                if type(value) is bytes and value[:2] == b"PK":
                    source = io.BytesIO(value)
                    break
            else:
                raise ValueError("a pickle with neither a file of torch nor a batch of SkyRL")
        batch = torch.load(source, weights_only=True, map_location="cpu")
    if isinstance(batch, dict) and "tensordict" in batch:
        batch = batch["tensordict"]
    return batch, not zipped


class Held(dict[Any, Any]):
    """Stands for whatever a batch's pickle names: takes what it is given, and runs nothing."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    __setstate__ = __init__


class OfSkyRL(pickle.Unpickler):
    """Reads a pickle of SkyRL's ``training_batch.py`` (a956457) without any of its classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a known name; refuse others, which are not imported."""
        module = "training_batch" if module.endswith(".training_batch") else module
        if f"{module}.{name}" not in NAMED.split():
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a batch of SkyRL")
        return Held


def tensors_of(batch: Any) -> dict[str, Any]:
    """Return the arrays of a batch of SkyRL, without the rows that fill up its last step."""
    import io

    import numpy as np
    import torch

    state, arrays = batch.given[-1], dict[str, Any]()
    for name in SKYRL:
        held = state["batch_dict"].get(name)
        if held is None:
            continue
        if held.get("format") == "torch":  # of a type that numpy lacks, e.g. bfloat16
            arrays[name] = torch.load(io.BytesIO(held["data"]), weights_only=True)
        else:
            array = np.frombuffer(held["data"], np.dtype(str(held["dtype"])))
            arrays[name] = array.reshape(held["shape"])
    added = (state["metadata"] or {}).get("pad_size", 0)
    return {name: array[: len(array) - added] for name, array in arrays.items()}


def limit_memory(path: Path) -> None:
    """Let this process take no more memory than it has now and some per byte of a file."""
    import resource

    with suppress(OSError), open("/proc/self/statm", "rb") as file:  # not on macOS
        now = int(file.read().split()[0]) * resource.getpagesize()
        most = now + READING + TIMES * path.stat().st_size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def count(value: Any) -> int:
    """Return the number of values in a tensor, an array or a list."""
    if hasattr(value, "tolist"):
        return int(value.numel() if hasattr(value, "numel") else value.size)
    return len(value) if type(value) is list else 1


def plain(value: Any) -> Any:
    """Return a value as JSON has it; None for lists of lists and other objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    flat = value if type(value) is list else [value]
    return value if {*map(type, flat)} <= {int, float, bool, str, type(None)} else None


if __name__ == "__main__":
    main()
