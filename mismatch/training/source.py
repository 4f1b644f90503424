"""What there is to load: configuration, files, and the model's bare structure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mismatch.errors import MismatchError
from mismatch.specs import TrainSpec

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
OTHER_MODEL = "give a hub id, or a directory that holds config.json, weights and tokenizer"


def read_config(spec: TrainSpec) -> Any:
    """The model's configuration; MismatchError if there is none or it is not supported."""
    from transformers import AutoConfig

    path = Path(spec.model)
    if (path.is_absolute() or spec.model.startswith(".")) and not path.is_dir():
        raise MismatchError(f"model directory {spec.model} does not exist", OTHER_MODEL)
    try:
        return AutoConfig.from_pretrained(
            spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise MismatchError(
            f"cannot read the configuration of {spec.model}: {first_line(error)}",
            f"{OTHER_MODEL}; code from the model's repository runs only with --trust-remote-code",
        ) from error


def skeleton(config: Any, trust_remote_code: bool = False, dtype: torch.dtype | None = None) -> Any:
    """The model on the meta device: its modules and names, no memory.

    Args:
        dtype: that it is built in; None: its configuration's.
    """
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            options = {} if dtype is None else {"dtype": dtype}
            return build(config, trust_remote_code=trust_remote_code, **options)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise MismatchError(
            f"architecture {config.model_type!r} is not supported: {first_line(error)}",
            "a causal language model of transformers is needed; upgrade transformers for new ones",
        ) from error


def quantisation_of(config: Any) -> str:
    """The method that a checkpoint is quantised with; "": none."""
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
    """Directory of the model's files, in the hub's cache if need be."""
    from transformers.utils.hub import cached_file

    if Path(spec.model).is_dir():
        return Path(spec.model)
    found = cached_file(
        spec.model,
        "config.json",
        revision=spec.revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return Path(found).parent if found else None


def require_tokenizer(directory: Path) -> None:
    """MismatchError unless the directory holds a tokenizer beside the weights."""
    if any((directory / name).exists() for name in TOKENIZER_FILES):
        return
    raise MismatchError(
        f"{directory} holds no tokenizer ({', '.join(TOKENIZER_FILES)})",
        "copy the tokenizer's files next to the weights: tokenizer.save_pretrained(DIRECTORY)",
    )


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
