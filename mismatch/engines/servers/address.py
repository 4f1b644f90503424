"""Addresses of servers: read them, check them, and show them without their secrets."""

from __future__ import annotations

from urllib.parse import urlsplit

from mismatch.errors import MismatchError

KEY_VARIABLE = "MISMATCH_API_KEY"  # where the key is given, in place of the address
HIDDEN = "***"


def parse_address(text: str) -> str:
    """Return a ``--server`` address as it is asked and kept: scheme, host, port and path.

    >>> parse_address("http://127.0.0.1:8000/v1")
    'http://127.0.0.1:8000'

    Raises:
        MismatchError: no http(s) URL, or one that holds a name, a password, a query or a fragment:
            addresses are written into artefacts, secrets are not. The message shows neither.
    """
    fix = "give scheme, host and port: --server http://127.0.0.1:8000"
    refused = MismatchError(f"--server {redacted(text)}: no address", fix)
    text = text.strip()
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:  # UnicodeError is one
        raise refused from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise MismatchError(
            f"--server {redacted(text)}: an address with a password or a query is not taken, "
            "because addresses are kept in the run",
            f"put the key into the environment: {KEY_VARIABLE}=… mismatch …",
        )
    if not text.isprintable() or " " in text or parts.scheme not in ("http", "https") or not host:
        raise refused
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/').removesuffix('/v1')}"


def unprotected(address: str) -> bool:
    """Tell whether a key sent there could be read on its way: plain http to another machine."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    here = host in ("localhost", "::1") or host.startswith("127.")
    return parts.scheme == "http" and not here


def redacted(text: str) -> str:
    """Return an address as it may be shown: without user, password, query and fragment."""
    _, at, rest = text.rpartition("@")
    shown = (rest if at else text).partition("?")[0].partition("#")[0]
    scheme = text.partition("://")[0] + "://" if "://" in text else "://"
    return f"{scheme}{HIDDEN}@{shown}" if at else shown
