"""Copy a checkpoint with a planted fault; the source stays as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError
from mismatch.models.config import read_config
from mismatch.models.derived import Shards, open_tensors, require_space
from mismatch.run.hub import INDEX

if TYPE_CHECKING:
    import torch

LARGEST_BYTES = 8 << 30  # of a checkpoint that is written once a fault
Tensors = Iterator[tuple[str, "torch.Tensor"]]
Weights = Callable[[str, "torch.Tensor", float], "torch.Tensor"]
Config = Callable[[dict[str, Any], float], bool]
BIG = 2  # dimensions of a matrix


def plant(source: Path, target: Path, fault: str, size: float) -> Path:
    """Write the checkpoint with one fault.

    Raises:
        MismatchError: the model has nothing in which this fault could be planted, or is too large.
    """
    if sum(path.stat().st_size for path in source.glob("*.safetensors")) > LARGEST_BYTES:
        raise MismatchError(
            f"{source} is too large to be written once a fault",
            "use a small model of the same family, such as its first layers",
        )
    target.mkdir(parents=True)
    require_space(source, target)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".bin", INDEX)):
            shutil.copyfile(path, target / path.name)
    config, changed = read_config(source), False
    if fault in CONFIGS:
        changed = CONFIGS[fault](config, size)
        (target / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    shards = Shards(target)
    with ExitStack() as stack:
        files = open_tensors(source, stack)
        for name, file in files.items():
            tensor = before = file.get_tensor(name)
            if fault == "swapped-experts":
                tensor = _expert(name, tensor, files)
            elif fault in WEIGHTS:
                tensor = WEIGHTS[fault](name, tensor, size)
            changed |= tensor is not before
            shards.add(name, tensor)
    shards.finish()
    if not changed:
        raise MismatchError(f"this model has nothing in which {fault} could be planted")
    return target


def _noise(tensor: torch.Tensor, size: float) -> torch.Tensor:
    """Every value times 1 + size x noise."""
    import torch

    if tensor.ndim < BIG or not tensor.is_floating_point() or tensor.element_size() < BIG:
        return tensor
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    return (tensor.float() * (1 + size * noise)).to(tensor.dtype)


def _layer(name: str, tensor: torch.Tensor, size: float) -> torch.Tensor:
    return _noise(tensor, size) if ".layers.1." in name else tensor


def _stale(name: str, tensor: torch.Tensor, size: float) -> torch.Tensor:
    return _noise(tensor, size) if ".layers." in name else tensor


def _head(name: str, tensor: torch.Tensor, size: float) -> torch.Tensor:
    return _noise(tensor, size) if name.startswith("lm_head.") else tensor


def _sinks(name: str, tensor: torch.Tensor, size: float) -> torch.Tensor:
    return tensor - size if name.endswith("sinks") else tensor


def _expert(name: str, tensor: torch.Tensor, files: dict[str, Any]) -> torch.Tensor:
    """Exchange the first two experts of the second layer, and not in their router."""
    if ".layers.1." not in name or ".experts." not in name:
        return tensor
    for own, other in ((".experts.0.", ".experts.1."), (".experts.1.", ".experts.0.")):
        if own in name:
            swapped: torch.Tensor = files[name.replace(own, other)].get_tensor(
                name.replace(own, other)
            )
            return swapped
    if name.partition(".experts.")[2].partition(".")[0].isdigit():
        return tensor
    fused = tensor.clone()
    fused[:2] = tensor[:2].flip(0)
    return fused


def _scaled(key: str) -> Config:
    def change(config: dict[str, Any], size: float) -> bool:
        """Multiply a number of the configuration wherever it is."""
        changed = False
        for name, value in list(config.items()):
            if isinstance(value, dict):
                changed |= change(value, size)
            elif name == key and isinstance(value, int | float) and value:
                config[name] = type(value)(value * size)
                changed = True
        return changed

    return change


WEIGHTS: dict[str, Weights] = {
    "layer-noise": _layer,
    "stale-weights": _stale,
    "stale-head": _head,
    "no-sinks": _sinks,
}
CONFIGS: dict[str, Config] = {
    "norm-eps": _scaled("rms_norm_eps"),
    "rope": _scaled("rope_theta"),
    "window": _scaled("sliding_window"),
}
