"""The Hugging Face hub as this machine knows it: its cache, its host, and whether it is forbidden.

huggingface_hub decides where the cache is and how it is laid out. Nothing here downloads.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

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
