"""In which dtype parameters rest: the checkpoint's own where that changes no number.

FSDP2 casts what it gathers to the dtype of the computation. A value that is stored in bfloat16
comes out the same whether it rested in bfloat16 or in float32, so a checkpoint whose values all are
bfloat16 (MXFP4 dequantises to such) needs half the memory at rest. Two things could differ: tensors
that are stored wider, and buffers whose dtype follows the dtype of loading.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mismatch.specs import MasterDtype, TrainSpec
from mismatch.training.source import skeleton

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BF16_ONLY = {"BF16"}
INTEGERS = {"U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"}  # blocks, scales, ids


def resolve_master(files: TrainSpec, config: Any) -> MasterDtype:
    """The dtype that parameters rest in.

    Args:
        files: names the checkpoint that is loaded.
        config: its configuration, of transformers.
    """
    if files.master_dtype != "auto":
        return files.master_dtype
    stored = stored_dtypes(files)
    same = stored - INTEGERS == BF16_ONLY and buffers_are_fixed(config, files.trust_remote_code)
    return "bf16" if same else "fp32"


def stored_dtypes(files: TrainSpec) -> set[str]:
    """Dtypes of all tensors of a checkpoint, as safetensors spells them; empty: not known.

    Reads the headers; a hub model's files are downloaded, as loading would.
    """
    index = _file(files, INDEX)
    if index is None:
        single = _file(files, SINGLE)
        return header_dtypes(single) if single is not None else set()
    names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    paths = [_file(files, name) for name in names]
    if None in paths:
        return set()
    return set().union(*(header_dtypes(path) for path in paths if path is not None))


def header_dtypes(path: Path) -> set[str]:
    """Dtypes of the tensors of one safetensors file; empty if it is damaged."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size))
        except (ValueError, OverflowError, MemoryError):
            return set()  # loading says what is wrong
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


def buffers_are_fixed(config: Any, trust_remote_code: bool) -> bool:
    """Whether no floating buffer of the model follows the dtype that it is built in."""
    narrow, wide = (
        {
            name: buffer.dtype
            for name, buffer in skeleton(config, trust_remote_code, dtype).named_buffers()
        }
        for dtype in (torch.bfloat16, torch.float32)
    )
    return narrow == wide


def _file(files: TrainSpec, name: str) -> Path | None:
    from transformers.utils.hub import cached_file

    if Path(files.model).is_dir():
        path = Path(files.model) / name
        return path if path.is_file() else None
    found = cached_file(
        files.model,
        name,
        revision=files.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return Path(found) if found else None
