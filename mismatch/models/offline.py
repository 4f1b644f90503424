"""A model's config.json without a network: from its directory, the hub's cache, or the package."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.models.aliases import find_alias

SHIPPED = "shipped with mismatch"


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    """A parsed config.json and where it was found.

    Attributes:
        source: "its directory", "the hub's cache" or "shipped with mismatch".
        weights: a directory that holds the weights as well, or None: they are not here yet.
    """

    values: dict[str, Any]
    source: str
    weights: Path | None


def find_config(model: str, revision: str | None = None) -> OfflineConfig:
    """The config.json of a resolved model (a directory or a hub id).

    Raises:
        MismatchError: it is neither here nor shipped, or cannot be read.
    """
    if Path(model).is_dir():
        return OfflineConfig(_read(Path(model) / "config.json"), "its directory", Path(model))
    cached = cached_snapshot(model, revision)
    if cached is not None and (cached / "config.json").is_file():
        here = cached if any(cached.glob("*.safetensors")) else None
        return OfflineConfig(_read(cached / "config.json"), "the hub's cache", here)
    alias = find_alias(model)
    if alias is not None and revision is None:
        return OfflineConfig(alias.config, SHIPPED, None)
    at = f" at revision {revision}" if revision else ""
    raise MismatchError(
        f"the config.json of {model}{at} is not on this machine",
        f"fetch it: hf download {model} config.json; or give a directory that holds it",
    )


def cached_snapshot(model: str, revision: str | None = None) -> Path | None:
    """The snapshot of a hub model in the hub's cache, as huggingface_hub lays it out."""
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    name = revision or "main"
    pointer = folder / "refs" / name
    commit = pointer.read_text().strip() if pointer.is_file() else name
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def hub_cache() -> Path:
    """Where huggingface_hub keeps models, by the same variables that it reads."""
    if found := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(found).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = Path(os.environ.get("HF_HOME", cache / "huggingface"))
    return (home / "hub").expanduser()


def _read(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MismatchError(
            f"{path} cannot be read: {error}", "give a model directory with a valid config.json"
        ) from error
    if not isinstance(parsed, dict):
        raise MismatchError(f"{path} is not a JSON object", "give a valid config.json")
    return parsed


def offline() -> bool:
    """Whether the user forbade the hub, by the variables that huggingface_hub reads."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)
