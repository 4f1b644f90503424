"""Convert a file of torch or pickle to rows, in a child process of the framework's environment.

The parent never opens these files. The child is this file, run by path; it imports torch, and
tensordict where it is installed (which allows its classes), and reads with ``weights_only=True``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MINUTES = 10
VERL = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs",
        "old_log_probs", "rm_scores")  # fmt: skip
# slime's name of a list with one entry per sequence -> name in a row.
SLIME = {
    "tokens": "tokens",
    "response_lengths": "response_length",
    "loss_masks": "loss_mask",
    "rollout_log_probs": "rollout_log_probs",
    "log_probs": "log_probs",
    "entropy": "entropy",
    "rewards": "reward",
}


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of every line that is not blank."""
    from mismatch.errors import MismatchError  # not at the top: a child has no mismatch

    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                fault = f"{path}:{number} is not JSON: {error}"
                fix = "was it cut off? one JSON object per line is expected"
                raise MismatchError(fault, fix) from error
            if not isinstance(entry, dict):
                raise MismatchError(f"{path}:{number} is no JSON object", "write one per line")
            yield number, entry


def converted(path: Path, python: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of every row of a file of torch or pickle.

    Args:
        python: interpreter of the environment that wrote the file.

    Raises:
        MismatchError: no interpreter was given, or its torch refuses the file.
    """
    from mismatch.errors import MismatchError

    if python is None:
        raise MismatchError(
            f"{path} is a file of torch or pickle, which mismatch does not open itself: reading "
            "one can run code",
            "name the environment that wrote it: --python ENV/bin/python (torch reads it there, "
            "with weights_only=True)",
        )
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        try:
            done = subprocess.run(
                [python, "-I", __file__, str(path), str(rows)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60 * MINUTES,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            fault = f"{path} was not read by {python}: {error}"
            raise MismatchError(fault, "check --python, or write JSONL") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            fault = f"{path} was not read by {python}: {last}"
            fix = "name the environment that wrote it, or write JSONL: docs/how-to/recorded-runs.md"
            raise MismatchError(fault, fix)
        yield from json_lines(rows)


def main() -> int:
    """Write the rows of the file ``sys.argv[1]`` as JSON lines to ``sys.argv[2]``."""
    with Path(sys.argv[2]).open("w") as out:
        for row in rows_of(Path(sys.argv[1])):
            out.write(json.dumps(row) + "\n")
    return 0


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dump of verl, slime or miles."""
    batch, padded = load(path)
    if isinstance(batch, dict) and isinstance(batch.get("rollout_data"), dict):
        data = batch["rollout_data"]
        for number in range(len(data["tokens"])):
            row = {name: plain(data[key][number]) for key, name in SLIME.items() if key in data}
            yield row | {"rank": str(batch.get("rank")), "step": str(batch.get("rollout_id"))}
        return
    names = [name for name in VERL if name in batch.keys()]  # noqa: SIM118 (a TensorDict)
    if "responses" not in names:
        raise ValueError("neither a batch of verl nor a train dump of slime or miles")
    for values in zip(*(batch[name] for name in names), strict=True):
        row = {name: plain(value) for name, value in zip(names, values, strict=True)}
        yield row | {"padded": padded}


def load(path: Path) -> tuple[Any, bool]:
    """Return the batch of a file, and whether its rows are padded.

    verl's ``gen_batch.dp`` is a pickle that holds a file of torch as bytes: these are cut out of it
    without unpickling.
    """
    import importlib.util
    import io
    import pickletools

    import torch

    if importlib.util.find_spec("tensordict") is not None:
        import tensordict  # noqa: F401 (allows its classes to torch.load)
    with path.open("rb") as file:
        zipped = file.read(2) == b"PK"
        file.seek(0)
        source: Any = file
        if not zipped:
            values = (value for _, value, _ in pickletools.genops(file))
            held = next((v for v in values if type(v) is bytes and v[:2] == b"PK"), None)
            if held is None:
                raise ValueError("a pickle without a file of torch inside")
            source = io.BytesIO(held)
        batch = torch.load(source, weights_only=True, map_location="cpu")
    if isinstance(batch, dict) and "tensordict" in batch:
        batch = batch["tensordict"]
    return batch, not zipped


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return value.tolist() if hasattr(value, "tolist") else value


if __name__ == "__main__":
    raise SystemExit(main())
