"""What there is to load: configuration, files, the model's bare structure, its dtype at rest.

FSDP2 casts what it gathers to the dtype of the computation. A value stored in bfloat16 comes out
the same whether it rested in bfloat16 or in float32, so a checkpoint whose values all are bfloat16
(MXFP4 dequantises to that) needs half the memory at rest, unless a buffer's dtype follows loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from mismatch.errors import MismatchError, first_line
from mismatch.models.auto_class import auto_class
from mismatch.run.files import LARGEST_JSON, open_regular, parse_json
from mismatch.run.hub import INDEX, weight_places
from mismatch.run.manifest import WRONG
from mismatch.specs import MasterDtype, TrainSpec

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
OTHER_MODEL = "give a hub id, or a directory that holds config.json, weights and tokenizer"


def quieten() -> None:
    """Have transformers write errors alone into this process's log."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def read_config(spec: TrainSpec) -> Any:
    """Return the model's configuration; MismatchError if there is none or it is not supported."""
    from transformers import AutoConfig

    path = Path(spec.model)
    if (path.is_absolute() or spec.model.startswith(".")) and not path.is_dir():
        raise MismatchError(f"model directory {spec.model} does not exist", OTHER_MODEL)
    try:
        config: Any = AutoConfig.from_pretrained(
            spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    except Exception as error:  # whatever a family's class raises at a value it dislikes
        fault = f"cannot read the configuration of {spec.model}: {first_line(error)}"
        fix = f"{OTHER_MODEL}; code from the model's repository runs only with --trust-remote-code"
        raise MismatchError(fault, fix) from error
    parts = (config, *(getattr(config, name, None) for name in config.sub_configs))
    for part in () if spec.trust_remote_code else parts:
        for what in ("_attn_implementation", "_experts_implementation"):
            if "/" in str(getattr(part, what, "")):
                fault = f"{spec.model} names a kernel from a hub: {what[1:]} {getattr(part, what)}"
                fix = "it is code: --trust-remote-code, or take the entry out of its config.json"
                raise MismatchError(fault, fix)
    return config


def skeleton(config: Any, trust_remote_code: bool = False, dtype: torch.dtype | None = None) -> Any:
    """Return the model on the meta device: its modules and names, no memory.

    Args:
        dtype: that it is built in; None: its configuration's.
    """
    build: Any = auto_class(config.model_type).from_config
    try:
        with torch.device("meta"):
            options = {} if dtype is None else {"dtype": dtype}
            return build(config, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # likewise
        fault = f"architecture {config.model_type!r} is not supported: {first_line(error)}"
        fix = "a causal language model of transformers is needed; new models need a new version"
        raise MismatchError(fault, fix) from error


def quantisation_of(config: Any) -> str:
    """Return the method that a checkpoint is quantised with; "": none."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return ""
    method = quantised["quant_method"] if isinstance(quantised, dict) else quantised.quant_method
    return str(getattr(method, "value", method))


def dequantising(config: Any) -> dict[str, Any]:
    """Options of ``from_pretrained`` that dequantise MXFP4, rather than run kernels of a hub."""
    if quantisation_of(config) != "mxfp4":
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def model_directory(spec: TrainSpec) -> Path | None:
    """Return the directory of the model's files, in the hub's cache if need be."""
    if Path(spec.model).is_dir():
        return Path(spec.model)
    config = _file(spec, "config.json")
    return None if config is None else config.parent


SINGLE = "model.safetensors"
BF16_ONLY = {"BF16"}
INTEGERS = {"U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL"}  # blocks, scales, ids


def resolve_master(files: TrainSpec, config: Any) -> MasterDtype:
    """Return the dtype that parameters rest in.

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
    """Return dtypes of all tensors of a checkpoint, as safetensors spells them; empty: not known.

    Reads the headers; a hub model's files are downloaded, as loading would.
    """
    index = _file(files, INDEX)
    names = [SINGLE] if index is None else sorted(set(weight_places(index.parent).values()))
    paths = [_file(files, name) for name in names]
    if None in paths:
        return set()
    return set().union(*(header_dtypes(path) for path in paths if path is not None))


def header_dtypes(path: Path) -> set[str]:
    """Return dtypes of the tensors of one safetensors file; empty if it is damaged."""
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(size, LARGEST_JSON + 1)))
        return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, *WRONG):
        return set()  # loading says what is wrong


def buffers_are_fixed(config: Any, trust_remote_code: bool) -> bool:
    """Return whether no floating buffer of the model follows the dtype that it is built in."""
    narrow, wide = (
        [(name, buffer.dtype) for name, buffer in bare.named_buffers()]
        for bare in (
            skeleton(config, trust_remote_code, dtype) for dtype in (torch.bfloat16, torch.float32)
        )
    )
    return narrow == wide


def _file(files: TrainSpec, name: str) -> Path | None:
    from transformers.utils.hub import cached_file

    if Path(files.model).is_dir():
        path = Path(files.model) / name
        return path if path.is_file() else None
    cached = cached_file(
        files.model, name, revision=files.revision, _raise_exceptions_for_missing_entries=False
    )
    return Path(cached) if cached else None
