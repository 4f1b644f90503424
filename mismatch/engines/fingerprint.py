"""Facts of a fingerprint that do not depend on the engine."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from mismatch.engines.registry import engine_info, engine_packages
from mismatch.specs import TORCH_NAMES, EngineSpec

PACKAGES = ("torch", "transformers", "numpy")  # beside those of the engines


def short_dtype(dtype: Any) -> str:
    """ "bf16" of torch.bfloat16 or "bfloat16"; other names as they are."""
    name = str(dtype).removeprefix("torch.")
    return next((short for short, long in TORCH_NAMES.items() if long == name), name)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on, of the packages that are installed."""
    found = {"python": platform.python_version()}
    engines = [package for package in engine_packages() if package not in PACKAGES]
    for package in (*engines, *PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def model_facts(spec: EngineSpec) -> dict[str, Any]:
    """Model, versions and hashes of the source files."""
    from mismatch.models.digests import source_hashes

    directory = model_directory(spec)
    known, packages = versions(), engine_info(spec.engine).packages
    return {
        "model": spec.model,
        "revision": spec.revision,
        "weights_form": spec.weights,
        "versions": known,
        "version": next((known[name] for name in packages if name in known), "unknown"),
        "source_files": source_hashes(str(directory)) if directory else {},
    }


def model_directory(spec: EngineSpec) -> Path | None:
    """Where the model's files are on this machine, also for a hub id that was downloaded."""
    if Path(spec.model).is_dir():
        return Path(spec.model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(spec.model, "config.json", revision=spec.revision)
    return Path(found).parent if isinstance(found, str) else None


def checkpoint_names(spec: EngineSpec) -> list[str]:
    """Names of all tensors in the model's safetensors files, from their headers."""
    from safetensors import safe_open

    directory = model_directory(spec)
    names: list[str] = []
    for path in sorted(directory.glob("*.safetensors")) if directory else []:
        with safe_open(path, framework="numpy") as file:
            names.extend(file.keys())
    return names
