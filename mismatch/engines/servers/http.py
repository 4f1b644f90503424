"""One HTTP request to one server: API key, TLS, time-outs, and what failures mean.

Plain ``http.client``: what is sent and when it is sent again is decided here and in
:mod:`mismatch.engines.servers.pool`, not in a library. Every request has a connection of its own;
beside seconds of sampling a handshake costs nothing, and none is ever half-closed.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from typing import Any

from mismatch.engines.servers.address import HIDDEN, KEY_VARIABLE, Address, redacted
from mismatch.errors import MismatchError

CONNECT_S = 10.0
CHUNK = 1 << 16
# Answers after which the same request may work later, or elsewhere: proxies have 5xx of their own,
# and 501 alone says that it never will.
PASSING = frozenset({408, 425, 429, *range(500, 600)}) - {501}
BUSY = frozenset({429, 503})


class Unavailable(Exception):
    """No useful answer this time.

    Attributes:
        reason: one phrase.
        retry_after_s: when the server wants to be asked again; None: it did not say.
        busy: it is there, and has too much to do.
        slow: it did not answer in time.
        absent: no connection could be made.
    """

    def __init__(
        self,
        reason: str,
        retry_after_s: float | None = None,
        busy: bool = False,
        slow: bool = False,
        absent: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.busy = busy
        self.slow = slow
        self.absent = absent

    @property
    def says_nothing(self) -> bool:
        """Whether it tells nothing of what the server can do."""
        return self.busy or self.slow or self.absent


class Refused(Exception):
    """The server says no to this request, now and later.

    Attributes:
        status: of HTTP.
        reason: in the server's words, in one line.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status = status
        self.reason = reason


def api_key() -> str | None:
    """The key for all servers, from the environment and from nowhere else.

    Raises:
        MismatchError: it could not be sent in a header.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise MismatchError(f"{KEY_VARIABLE} holds characters that no key has", "set it anew")
    return key or None


class Client:
    """Asks one server.

    Args:
        timeout_s: that one request may take, from connecting to the last byte.
        key: sent as a bearer token, and cut out of everything the server says.
    """

    def __init__(self, address: Address, timeout_s: float, key: str | None = None) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._key = key
        self._tls = ssl.create_default_context() if address.scheme == "https" else None

    def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON at ``path``; see :meth:`post`."""
        return self._json(self._ask("GET", path, None, timeout_s))

    def text(self, path: str, timeout_s: float | None = None) -> str:
        """The text at ``path``; see :meth:`post`."""
        return self._ask("GET", path, None, timeout_s).decode("utf-8", "replace")

    def post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """The JSON that ``body`` is answered with.

        Raises:
            Unavailable: it may work later or elsewhere.
            Refused: it will not.
            MismatchError: key or certificate are not accepted.
        """
        return self._json(self._ask("POST", path, json.dumps(body).encode(), timeout_s))

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> bytes:
        allowed = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + allowed
        connection = self._connection(min(CONNECT_S, allowed))
        try:
            self._connect(connection)
            sock = connection.sock
            sock.settimeout(_left(deadline))
            connection.request(method, self.address.path + path, body, self._headers(body))
            response = connection.getresponse()
            data = _read(response, sock, deadline)
        except ssl.SSLCertVerificationError as error:
            raise MismatchError(
                f"{self.address.text}: its certificate is not accepted: {error.verify_message}",
                "name the authority that signed it: SSL_CERT_FILE=FILE.pem mismatch …",
            ) from error
        except TimeoutError as error:
            raise Unavailable(f"no answer in {allowed:g} s", slow=True) from error
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(self._plain(_what(error))) from error
        finally:
            connection.close()
        self._require_ok(response, data)
        return data

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        address = self.address
        if self._tls is None:
            return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
        return http.client.HTTPSConnection(
            address.host, address.port, timeout=timeout_s, context=self._tls
        )

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except ssl.SSLCertVerificationError:
            raise
        except TimeoutError as error:
            reason = f"no connection in {connection.timeout:g} s"
            raise Unavailable(reason, absent=True) from error
        except OSError as error:
            raise Unavailable(_what(error), absent=True) from error

    def _headers(self, body: bytes | None) -> dict[str, str]:
        headers = {"Accept": "application/json", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers

    def _require_ok(self, response: http.client.HTTPResponse, data: bytes) -> None:
        status = response.status
        if status == 200:
            return
        said = self._plain(_message(data) or response.reason or "")
        if status in (401, 403):
            has = "does not accept the key in" if self._key else "asks for a key: set"
            raise MismatchError(
                f"{self.address.text} {has} {KEY_VARIABLE} (HTTP {status})",
                f"{KEY_VARIABLE}=… mismatch …; it is read from the environment only",
            )
        if status in PASSING:
            wait = _retry_after(response.getheader("Retry-After"))
            raise Unavailable(f"HTTP {status}: {said}", wait, busy=status in BUSY)
        if 300 <= status < 400:
            target = redacted(response.getheader("Location") or "elsewhere")
            raise Refused(status, f"moved to {target}; redirections are not followed")
        raise Refused(status, said)

    def _json(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise Unavailable(f"the answer is no JSON ({len(data)} bytes)") from error

    def _plain(self, text: str) -> str:
        """One short line of what a server said, without the key that it may repeat."""
        shown = text.replace(self._key, HIDDEN) if self._key else text
        return " ".join(shown.split())[:300]


def _read(response: http.client.HTTPResponse, sock: socket.socket, deadline: float) -> bytes:
    """The whole body; a server that sends a byte a minute is late too."""
    parts = []
    while not response.isclosed():  # newer Pythons close it with the last byte, and the socket
        sock.settimeout(_left(deadline))
        part = response.read1(CHUNK)
        if not part:
            break
        parts.append(part)
    data = b"".join(parts)
    length = response.getheader("Content-Length") or ""
    if length.isdigit() and len(data) < int(length):
        raise http.client.IncompleteRead(data, int(length) - len(data))
    return data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _what(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return f"the answer broke off after {len(error.partial)} bytes"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError):
        return "the connection was lost"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection ({error.reason or error})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _message(data: bytes) -> str:
    """What an error's body says, in vLLM's, SGLang's or anybody's form."""
    text = data[:2000].decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except ValueError:
        return text
    for key in ("error", "message", "detail"):
        while isinstance(found, dict) and key in found:
            found = found[key]
    return found if isinstance(found, str) else text


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
