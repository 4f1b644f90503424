"""Log-probabilities out of a file: a trainer on another machine scored the tokens of a run.

The tokens go out by ``mismatch tokens RUN FILE``, a row per sequence. The same file comes back with
more columns (Parquet or JSONL): ``logprobs``, and where the trainer has them ``entropy`` and the
side passes ``logprobs_repeated``, ``logprobs_regrouped``, ``logprobs_alone``, ``logprobs_fp32``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.errors import MismatchError, first_line
from mismatch.processes.adapter import scoring_from, variant_of
from mismatch.run.manifest import WRONG
from mismatch.specs import FILE_SCORER, Pass
from mismatch.types import Rollout, Scoring, SideFacts

SUFFIXES = (".parquet", ".jsonl")
FIX = "write it with `mismatch tokens RUN FILE`, then add the column logprobs"


def column_of(name: str) -> str:
    """Return the column that holds a pass.

    >>> column_of("fsdp"), column_of("fsdp:fp32")
    ('logprobs', 'logprobs_fp32')
    """
    variant = variant_of(name)
    return "logprobs" if variant == "own" else f"logprobs_{variant}"


def rows_of(rollout: Rollout) -> dict[str, list[Any]]:
    """Return the columns of the file that goes out."""
    sequences = rollout.sequences()
    masks = np.split(rollout.action_mask, rollout.offsets[1:-1])
    return {
        "sequence": list(range(len(sequences))),
        "token_ids": [ids.tolist() for ids in sequences],
        "action_mask": [mask.astype(int).tolist() for mask in masks],
        "temperature": [rollout.sampling.scored_temperature] * len(sequences),
    }


def write_tokens(path: Path, rollout: Rollout) -> None:
    """Write a run's tokens as Parquet or JSONL, by the file's suffix."""
    import pandas as pd

    table = pd.DataFrame(rows_of(rollout))
    if path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.to_json(path, orient="records", lines=True)


def read_scores(path: Path, passes: Sequence[Pass], rollout: Rollout) -> dict[str, Scoring]:
    """Return the passes that a file holds; the trainer's own is always there.

    Raises:
        MismatchError: no such file, other sequences or tokens than the run's, or a wrong count.
    """
    import pandas as pd

    try:
        read = pd.read_parquet(path) if path.suffix == ".parquet" else None
        table = pd.read_json(path, orient="records", lines=True) if read is None else read
        table = table.set_index("sequence").sort_index()
        expected = rows_of(rollout)
        if table.index.tolist() != expected["sequence"]:
            raise MismatchError(
                f"{path} holds {len(table)} sequences, not the run's {len(expected['sequence'])} "
                "once each",
                FIX,
            )
        for row, ids in enumerate(expected["token_ids"] if "token_ids" in table else ()):
            if list(table["token_ids"][row]) != ids:
                raise MismatchError(f"{path}: sequence {row} has other tokens than the run", FIX)
        if "logprobs" not in table:
            raise MismatchError(f"{path} has no column logprobs", FIX)
        masks = [np.asarray(mask, bool) for mask in expected["action_mask"]]
        found = {}
        for pass_ in passes:
            if (column := column_of(pass_.name)) not in table:
                continue
            arrays = {"logprobs": _flat(path, table[column], masks)}
            if column == "logprobs" and "entropy" in table:
                arrays["entropy"] = _flat(path, table["entropy"], masks)
            facts: SideFacts = {
                "code": f"unknown code, whose log-probabilities were read from {path.name}",
                "file": path.name,
                "dtype": pass_.spec.dtype,
                "notes": [f"the dtype {pass_.spec.dtype} is what the command said"],
            }
            found[pass_.name] = scoring_from(arrays, facts, pass_, rollout)
    except (OSError, *WRONG) as error:
        raise MismatchError(f"{path} cannot be read: {first_line(error)}", FIX) from error
    return found


def _flat(path: Path, column: Any, masks: list[Any]) -> Any:
    """Return [A] a column's numbers of action tokens; a row may have all tokens or these alone."""
    parts = []
    for number, (values, mask) in enumerate(zip(column, masks, strict=True)):
        row = np.asarray(values, float)
        if len(row) == len(mask):
            row = row[mask]
        if len(row) != mask.sum():
            raise MismatchError(
                f"{path}: sequence {number} has {len(row)} {column.name}, but {mask.sum()} action "
                f"tokens of {len(mask)}",
                "write one per action token, or one per token",
            )
        parts.append(row)
    return np.concatenate(parts)


def require_file(path: str | None) -> Path:
    """Return the file of ``--scorer file``.

    Raises:
        MismatchError: none is named, or it is not there.
    """
    if path is None or not Path(path).is_file():
        fault = f"--scorer {FILE_SCORER}: {path or 'no file'} to read log-probabilities from"
        fix = "--scorer-config FILE, a .parquet or .jsonl file; docs/how-to/your-trainer.md"
        raise MismatchError(fault, fix)
    return Path(path)
