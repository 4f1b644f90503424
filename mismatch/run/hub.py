"""The Hugging Face hub as this machine knows it: its cache, its host, and whether it is forbidden.

huggingface_hub decides where the cache is and how it is laid out. Only :func:`small_files`
downloads.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

# What describes a model and its tokenizer.
SMALL = ("*config.json", "tokenizer.json", "special_tokens_map.json", "*.jinja")
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def cached_snapshot(model: str, revision: str | None = None) -> Path | None:
    """Return the cached folder that holds a hub model's config.json; None where none does.

    Its name is the commit.
    """
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
