"""Artefacts on disk: written to a temporary name and renamed, read with their schema checked.

A run directory holds::

    spec.json                 the CheckSpec
    rollout.parquet           one row per sequence
    scores/<name>.parquet     one row per sequence: logprobs, entropy … of its action tokens
    routing/<name>.safetensors  experts per token and layer
    tokens.parquet            one row per action token: both logprobs side by side
    report.json, report.html, report.md
    logs/, errors/            what the child processes said
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.errors import MismatchError
from mismatch.types import Rollout, Routing, Sampling, Scoring

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

ROLLOUT_SCHEMA = "mismatch.rollout/1"
SCORING_SCHEMA = "mismatch.scoring/1"
ROUTING_SCHEMA = "mismatch.routing/1"
TOKENS_SCHEMA = "mismatch.tokens/1"
REQUIRED_COLUMNS = {
    ROLLOUT_SCHEMA: {"token_ids", "action_mask", "turn", "prompt_index", "finish_reason"},
    SCORING_SCHEMA: {"token_ids", "logprobs"},
    TOKENS_SCHEMA: {"sequence", "position", "rollout_logprob", "train_logprob", "delta"},
}


def write_atomic(path: Path, write: Callable[[Path], object]) -> Path:
    """Call ``write(temporary)`` and rename: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise MismatchError(
            f"cannot write {path}: {error.strerror or error}",
            "free disk space or choose another directory: --out DIR",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_text(path: Path, text: str) -> Path:
    return write_atomic(path, lambda target: target.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any) -> Path:
    """Strict JSON: NaN and infinity are errors, not invalid documents."""
    return write_text(path, json.dumps(data, indent=1, allow_nan=False, default=_plain) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MismatchError(f"{path} does not exist", "make it: mismatch check --model …") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise MismatchError(f"{path} cannot be read: {error}", "run the stage again") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


# ---------------------------------------------------------------- rollout


def save_rollout(run_dir: Path | str, rollout: Rollout) -> Path:
    """Write ``rollout.parquet``."""
    rows: dict[str, Any] = {
        "token_ids": _ragged(rollout.token_ids, rollout.offsets),
        "action_mask": _ragged(rollout.action_mask, rollout.offsets),
        "turn": _ragged(rollout.turn, rollout.offsets),
        "prompt_index": rollout.prompt_index,
        "finish_reason": list(rollout.finish_reason),
    }
    if rollout.rewards is not None:
        rows["reward"] = rollout.rewards
    header = {
        "sampling": dataclasses.asdict(rollout.sampling),
        "fingerprint": rollout.fingerprint,
    }
    return _write_parquet(Path(run_dir) / "rollout.parquet", rows, ROLLOUT_SCHEMA, header)


def load_rollout(run_dir: Path | str) -> Rollout:
    """Read ``rollout.parquet``; MismatchError if absent, truncated or of another schema."""
    table, header = _read_parquet(Path(run_dir) / "rollout.parquet", ROLLOUT_SCHEMA)
    token_ids, offsets = _flat(table, "token_ids")
    return Rollout(
        token_ids=token_ids.astype(np.int64),
        offsets=offsets,
        action_mask=_flat(table, "action_mask")[0].astype(np.bool_),
        turn=_flat(table, "turn")[0].astype(np.int64),
        prompt_index=table.column("prompt_index").to_numpy().astype(np.int64),
        finish_reason=tuple(table.column("finish_reason").to_pylist()),
        sampling=Sampling(**header["sampling"]),
        fingerprint=header["fingerprint"],
        rewards=table.column("reward").to_numpy().astype(np.float64)
        if "reward" in table.column_names
        else None,
    )


# ---------------------------------------------------------------- scorings


def save_scoring(run_dir: Path | str, scoring: Scoring, rollout: Rollout) -> Path:
    """Write ``scores/<name>.parquet`` and, where experts were captured, their routing file."""
    run_dir = Path(run_dir)
    offsets = action_offsets(rollout)
    columns = {
        "token_ids": scoring.token_ids,
        "logprobs": scoring.logprobs.astype(np.float64),
        "entropy": scoring.entropy,
        "top1": scoring.top1,
        **{f"extra.{name}": values for name, values in scoring.extra.items()},
    }
    rows = {name: _ragged(v, offsets) for name, v in columns.items() if v is not None}
    header: dict[str, Any] = {"name": scoring.name, "fingerprint": scoring.fingerprint}
    if scoring.routing is not None:
        _save_routing(run_dir / "routing" / f"{_stem(scoring.name)}.safetensors", scoring.routing)
        header["routing"] = True
    path = run_dir / "scores" / f"{_stem(scoring.name)}.parquet"
    return _write_parquet(path, rows, SCORING_SCHEMA, header)


def load_scoring(run_dir: Path | str, name: str) -> Scoring:
    """Read one scoring by its name, e.g. ``"vllm:decode"``."""
    run_dir = Path(run_dir)
    path = run_dir / "scores" / f"{_stem(name)}.parquet"
    table, header = _read_parquet(path, SCORING_SCHEMA)
    flat = {column: _flat(table, column)[0] for column in table.column_names}
    routing = None
    if header.get("routing"):
        routing = _load_routing(run_dir / "routing" / f"{_stem(name)}.safetensors")
    return Scoring(
        name=header["name"],
        token_ids=flat["token_ids"].astype(np.int64),
        logprobs=flat["logprobs"].astype(np.float64),
        fingerprint=header["fingerprint"],
        entropy=flat.get("entropy"),
        top1=flat.get("top1"),
        routing=routing,
        extra={k.removeprefix("extra."): v for k, v in flat.items() if k.startswith("extra.")},
    )


def scoring_names(run_dir: Path | str) -> list[str]:
    """Names of all scorings in a run directory, sorted."""
    import pyarrow.parquet as pq

    files = sorted((Path(run_dir) / "scores").glob("*.parquet"))
    metadata = [pq.read_schema(file).metadata or {} for file in files]
    return [json.loads(entry[b"header"])["name"] for entry in metadata]


def action_offsets(rollout: Rollout) -> np.ndarray:
    """Offsets of every sequence into the action tokens, [N + 1]."""
    starts = np.concatenate([[0], np.cumsum(rollout.action_mask)])
    return starts[rollout.offsets].astype(np.int64)


def _stem(name: str) -> str:
    return name.replace(":", "-").replace("/", "-")


def _save_routing(path: Path, routing: Routing) -> None:
    from safetensors.numpy import save_file

    tensors = {"ids": routing.ids, "present": routing.present}
    if routing.weights is not None:
        tensors["weights"] = routing.weights.astype(np.float32)
    if routing.margin is not None:
        tensors["margin"] = routing.margin.astype(np.float32)
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    metadata = {
        "schema": ROUTING_SCHEMA,
        "layers": json.dumps(routing.layers),
        "num_experts": str(routing.num_experts),
    }
    write_atomic(path, lambda target: save_file(tensors, target, metadata))


def _load_routing(path: Path) -> Routing:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise MismatchError(
            f"{path} cannot be read: {error}", "run the stage that makes it again"
        ) from error
    _require_schema(path, metadata.get("schema"), ROUTING_SCHEMA)
    return Routing(
        layers=tuple(json.loads(metadata["layers"])),
        num_experts=int(metadata["num_experts"]),
        ids=tensors["ids"],
        present=tensors["present"],
        weights=tensors.get("weights"),
        margin=tensors.get("margin"),
    )


# ---------------------------------------------------------------- token table


def save_vocabulary(run_dir: Path | str, texts: dict[int, str]) -> Path:
    """Write ``vocabulary.json``: the text of every id that occurs in the rollout."""
    return write_json(Path(run_dir) / "vocabulary.json", {str(k): v for k, v in texts.items()})


def load_vocabulary(run_dir: Path | str) -> dict[int, str]:
    """Texts of the ids in the rollout; empty where none were saved."""
    path = Path(run_dir) / "vocabulary.json"
    return {int(k): v for k, v in read_json(path).items()} if path.exists() else {}


def save_tokens(run_dir: Path | str, frame: pd.DataFrame) -> Path:
    """Write ``tokens.parquet``: one row per action token, both sides next to each other."""
    columns = {name: frame[name].array for name in frame.columns}
    return _write_parquet(Path(run_dir) / "tokens.parquet", columns, TOKENS_SCHEMA, {})


def load_tokens(run_dir: Path | str) -> pd.DataFrame:
    table, _ = _read_parquet(Path(run_dir) / "tokens.parquet", TOKENS_SCHEMA)
    frame: pd.DataFrame = table.to_pandas()
    return frame


# ---------------------------------------------------------------- parquet


def _ragged(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
    import pyarrow as pa

    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def _flat(table: pa.Table, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets of a list column, whatever slices the reader made."""
    import pyarrow.compute as pc

    lists = table.column(column)
    lengths = pc.list_value_length(lists).to_numpy()
    values = pc.list_flatten(lists).to_numpy()
    return values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _write_parquet(path: Path, columns: dict[str, Any], schema: str, header: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns)
    text = json.dumps(header, allow_nan=False, default=_plain)
    table = table.replace_schema_metadata({"schema": schema, "header": text})
    return write_atomic(path, lambda target: pq.write_table(table, target, compression="zstd"))


def _read_parquet(path: Path, schema: str) -> tuple[pa.Table, dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        raise MismatchError(f"{path} does not exist", "make it: mismatch check --model …")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise MismatchError(
            f"{path} is not a readable Parquet file (truncated or foreign): {reason}",
            "run the stage that makes it again",
        ) from error
    metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    _require_schema(path, metadata.get("schema"), schema)
    missing = REQUIRED_COLUMNS[schema] - set(table.column_names)
    if missing:
        raise MismatchError(f"{path} lacks the columns {sorted(missing)}", "run the stage again")
    return table, json.loads(metadata["header"])


def _require_schema(path: Path, found: str | None, wanted: str) -> None:
    if found != wanted:
        raise MismatchError(
            f"{path} has schema {found or 'none'}, this version reads {wanted}",
            "make it again with this version of mismatch",
        )
