"""Addresses of servers: read them, check them, and show them without their secrets."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from mismatch.errors import MismatchError

KEY_VARIABLE = "MISMATCH_API_KEY"  # where the key is given, in place of the address
HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def text(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def parse_address(text: str) -> Address:
    """Read a ``--server`` address.

    >>> parse_address("http://127.0.0.1:8000/v1").text
    'http://127.0.0.1:8000'

    Raises:
        MismatchError: no http(s) URL, or one that holds a name, a password, a query or a fragment:
            addresses are written into artefacts, secrets are not. The message shows neither.
    """
    fix = "give scheme, host and port: --server http://127.0.0.1:8000"
    refused = MismatchError(f"--server {redacted(text)}: no address", fix)
    try:
        parts = urlsplit(text.strip())
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:  # UnicodeError is one
        raise refused from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise MismatchError(
            f"--server {redacted(text)}: an address with a password or a query is not taken, "
            "because addresses are kept in the run",
            f"put the key into the environment: {KEY_VARIABLE}=… mismatch …",
        )
    plain = text.strip().isprintable() and " " not in text.strip()
    if not plain or parts.scheme not in ("http", "https") or not parts.hostname:
        raise refused
    path = parts.path.rstrip("/").removesuffix("/v1")
    default = 443 if parts.scheme == "https" else 80
    return Address(parts.scheme, parts.hostname, default if port is None else port, path)


def unprotected(address: Address) -> bool:
    """Tell whether a key sent there could be read on its way: plain http to another machine."""
    here = address.host == "localhost" or address.host.startswith("127.") or address.host == "::1"
    return address.scheme == "http" and not here


def redacted(text: str) -> str:
    """Return an address as it may be shown: without user, password, query and fragment."""
    _, at, rest = text.rpartition("@")
    shown = (rest if at else text).partition("?")[0].partition("#")[0]
    scheme = text.partition("://")[0] + "://" if "://" in text else "://"
    return f"{scheme}{HIDDEN}@{shown}" if at else shown
