"""The Hugging Face hub as this machine knows it: its cache, its host, and whether it is forbidden.

huggingface_hub decides where its cache is. Only :func:`small_files` and :func:`download` fetch.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mismatch.codec import from_json
from mismatch.errors import MismatchError, one_line
from mismatch.run.files import parse_json, read_regular
from mismatch.run.manifest import WRONG

# What describes a model and its tokenizer.
SMALL = ("*config.json", "tokenizer.json", "special_tokens_map.json", "*.jinja")
# What engines and trainers read: gpt-oss has its weights twice more, in other layouts. The hub's
# patterns match across "/".
FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
NOT_FETCHED = ("original/*", "metal/*", "*/*.safetensors", "consolidated*", "*.fp16.safetensors")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
INDEX = "model.safetensors.index.json"
OFFLINE = (
    "without a network: download it where there is one (hf download {model}), copy the cache and "
    "set HF_HUB_OFFLINE=1, or give the directory: --model DIR"
)
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def cached_snapshot(model: str, revision: str | None = None) -> Path | None:
    """Return the cached folder that holds a hub model's config.json; None where none does.

    Its name is the commit.
    """
    if not os.path.isdir(cache_folder() / f"models--{model.replace('/', '--')}"):
        return None  # and no import of the hub's client, which takes a fifth of a second
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # no name that a hub model can have, such as a path
        return None
    return Path(path).parent if isinstance(path, str) else None


def small_files(model: str, revision: str | None = None) -> Path:
    """Return the folder with the configuration and tokenizer of a directory or hub id.

    Those of a hub model are fetched where they are not here.

    Raises:
        OSError, ValueError: the hub has no such model, or cannot be asked.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=list(SMALL)))


def cache_folder() -> Path:
    """Return the folder where the cache is, or will be."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def offline() -> bool:
    """Return whether the user forbade the hub (``HF_HUB_OFFLINE``)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def unknown_host() -> tuple[str, str] | None:
    """Return the hub's host and why its name cannot be looked up; None: it can, or a proxy does.

    The hub's client would try for half a minute.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if not host or any(os.environ.get(name) for name in PROXIES):
        return None
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        return host, error.strerror or str(error)
    return None


@contextmanager
def asking_the_hub(model: str, revision: str | None) -> Iterator[None]:
    """Give what the hub's client raises within the block a sentence and a fix.

    Raises:
        MismatchError: the hub is forbidden or out of reach, no such model, no access to it.
    """
    from huggingface_hub import errors

    fix = OFFLINE.format(model=model)
    if offline():
        fault = f"{model} is not wholly in the cache {cache_folder()}, and HF_HUB_OFFLINE is set"
        raise MismatchError(fault, fix)
    if unknown := unknown_host():
        raise MismatchError(f"{model}: the hub cannot be reached: {': '.join(unknown)}", fix)
    try:
        yield
    except errors.GatedRepoError as error:
        fault = f"{model}: access has to be asked for on the hub"
        raise MismatchError(fault, "ask there, then: hf auth login") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        at = f" at revision {revision}" if revision else ""
        fault = f"the hub has no model {model}{at}, or it is private"
        raise MismatchError(fault, "check the name; for a private model: hf auth login") from error
    except Exception as error:  # the client and its transport raise many kinds
        fault = f"{model} cannot be had from the hub: {one_line(error)}"
        raise MismatchError(fault, f"try again, or {fix}") from error


def fetch(model: str, revision: str | None, say: Callable[[str], None]) -> None:
    """Download what the cache lacks of a hub model, with the client's progress bars.

    Engines would do so behind "starting". Weights that are not safetensors are left to them.

    Raises:
        MismatchError: too little space, or as :func:`asking_the_hub`.
    """
    snapshot = None if Path(model).is_dir() else cached_snapshot(model, revision)
    if Path(model).is_dir() or (snapshot is not None and whole(snapshot)):
        return
    with asking_the_hub(model, revision):
        files = download(model, revision, dry_run=True)
        missing = [file.file_size for file in files if file.will_download]
    if not missing:
        return
    cache, size = cache_folder(), sum(missing)
    if (free := shutil.disk_usage(cache).free) < size:
        needs = f"{model}: {size / 1e9:.1f} GB to download"
        fault = f"{needs}, and {cache} has {free / 1e9:.1f} GB free"
        raise MismatchError(fault, "free space, or set HF_HOME to a directory on a larger disk")
    say(f"downloading {model} into {cache}: {len(missing)} files, {size / 1e9:.3g} GB")
    with asking_the_hub(model, revision):
        download(model, revision)


def download(model: str, revision: str | None, dry_run: bool = False) -> Any:
    """Return the folder of a hub model whose files are then here; in a dry run, what it takes."""
    from huggingface_hub import snapshot_download

    patterns: Any = {"allow_patterns": list(FETCHED), "ignore_patterns": list(NOT_FETCHED)}
    return snapshot_download(model, revision=revision, dry_run=dry_run, **patterns)


def weight_places(directory: Path) -> dict[str, str]:
    """Return which file of a checkpoint holds each tensor, as its index says; {}: it has none.

    Raises:
        MismatchError: the index cannot be read.
    """
    path = directory / INDEX
    try:
        return from_json(dict[str, str], parse_json(read_regular(path))["weight_map"], "weight_map")
    except FileNotFoundError:
        return {}
    except (OSError, *WRONG) as error:
        fault = f"{path} cannot be read: {error}"
        raise MismatchError(fault, "fetch the checkpoint again") from error


def whole(snapshot: Path) -> bool:
    """Whether a folder of the cache holds weights: all that its index names, or any others."""
    held = {path.name for path in snapshot.iterdir() if path.suffix in WEIGHTS and path.is_file()}
    with suppress(OSError, MismatchError):  # loading says what is wrong with an index
        parts = set(weight_places(snapshot).values())
        if parts and all((snapshot / part).is_file() for part in parts):
            return True
        held -= parts
    return bool(held)
