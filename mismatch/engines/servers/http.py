"""One HTTP request to one server: API key, TLS, deadline, size limit, and what failures mean.

``http.client``, a connection per request: beside seconds of sampling a handshake costs nothing. A
timer shuts the connection at the deadline, whatever is being waited for; what cannot be read is
:class:`Unavailable`, by :func:`usable_answer` and nowhere else.
Discovery and probes retry here; :mod:`mismatch.engines.servers.scheduler` decides about the work,
which may go to another server.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from mismatch.engines.servers.address import HIDDEN, KEY_VARIABLE, Address, redacted
from mismatch.errors import MismatchError

CONNECT_S = 10.0
CHUNK = 1 << 16
LARGEST_ANSWER = 1 << 30  # bytes of a sample with its routed experts
LARGEST_OTHER = 16 << 20  # of what a server says about itself, and of an error
HIDDEN_FROM = 8  # characters: a shorter key is a word that answers hold anyway
# Statuses after which the same request may succeed later or on another server. Proxies have 5xx
# statuses of their own; 501 alone is final.
TEMPORARY = frozenset({408, 425, 429, *range(500, 600)}) - {501}
BUSY = frozenset({429, 503})
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
LONGEST_RETRY_AFTER_S = 300.0  # a longer Retry-After is cut to this
ATTEMPTS = 4  # of a client with retries


class Unavailable(Exception):
    """No usable answer to this request, this time.

    Attributes:
        reason: one phrase.
        kind: "busy" (429, 503), "slow" (no answer before the deadline), "absent" (no connection),
            "failed" (anything else).
        retry_after_s: when the server wants to be asked again; None: it did not say.
    """

    def __init__(
        self,
        reason: str,
        kind: Literal["failed", "busy", "slow", "absent"] = "failed",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason, self.kind, self.retry_after_s = reason, kind, retry_after_s


class Refused(Exception):
    """The server rejects this request, now and later.

    Attributes:
        status: of HTTP.
        reason: in the server's words, in one line.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {reason}")
        self.status, self.reason = status, reason


@contextmanager
def usable_answer() -> Iterator[None]:
    """Around all that reads an answer; also a decorator. The one place where faults get a name.

    Raises:
        Unavailable: the answer is not what its kind of server gives, whatever is wrong with it.
    """
    try:
        yield
    except (Unavailable, Refused, MismatchError):
        raise
    except Exception as error:
        # The words of other errors may repeat the server's, and those a key.
        lacks = f" {error}" if isinstance(error, KeyError) else ""
        raise Unavailable(
            f"an answer that cannot be used ({type(error).__name__}{lacks})"
        ) from error


def api_key() -> str | None:
    """The key for all servers, from the environment and from nowhere else.

    Raises:
        MismatchError: it could not be sent in a header.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise MismatchError(f"{KEY_VARIABLE} holds characters that no key has", "set it anew")
    return key or None


def backoff_s(failures: int, retry_after_s: float | None) -> float:
    """Seconds to leave a server alone after so many failures in a row.

    What it asked for, else twice as long each time; with jitter, so that several clients do not
    come back at the same moment.
    """
    if retry_after_s is not None:
        return min(retry_after_s, LONGEST_RETRY_AFTER_S) * (1.0 + 0.1 * random.random())
    doubled = FIRST_BACKOFF_S * 2.0 ** max(0, failures - 1)
    return min(LONGEST_BACKOFF_S, doubled) * (0.5 + random.random())


class RetryingClient:
    """Sends requests to one server.

    Args:
        timeout_s: deadline of one request, from connecting to the last byte.
        key: sent as a bearer token, and cut out of everything the server says.
        attempts: at a request that found the server busy or failed, so that a busy moment is not
            read as a missing feature. Without a connection, or past the deadline, there is no
            second one: the address may be wrong.
    """

    def __init__(
        self, address: Address, timeout_s: float, key: str | None = None, attempts: int = 1
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._attempts = attempts
        self._key = key
        self._tls = ssl.create_default_context() if address.scheme == "https" else None

    def without_retries(self) -> RetryingClient:
        """The same server, for a caller that decides itself when to try again."""
        return RetryingClient(self.address, self.timeout_s, self._key)

    def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON at ``path``; see :meth:`post`."""
        return self._parse(self._send("GET", path, None, timeout_s), _no_number)

    def text(self, path: str, timeout_s: float | None = None) -> str:
        """The text at ``path``; see :meth:`post`."""
        return self._send("GET", path, None, timeout_s).decode("utf-8", "replace")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that ``body`` is answered with.

        Raises:
            Unavailable: it may work later or on another server.
            Refused: it will not.
            MismatchError: key or certificate are not accepted.
        """
        return self._parse(self._send("POST", path, json.dumps(body).encode(), None))

    @usable_answer()
    def _parse(self, data: bytes, constant: Callable[[str], Any] = float) -> Any:
        """JSON without the key, however that is spelt; ``constant`` reads NaN and infinity."""
        try:
            answer = json.loads(data, parse_constant=constant)
        except ValueError as error:
            raise Unavailable(f"the answer is no JSON ({len(data)} bytes)") from error
        return self._without_key(answer) if self._key and b"\\" in data else answer

    def _without_key(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, list):
            return [self._without_key(item) for item in value]
        if isinstance(value, dict):
            return {self._hide(name): self._without_key(item) for name, item in value.items()}
        return value

    def _hide(self, text: str) -> str:
        hidden = self._key is not None and len(self._key) >= HIDDEN_FROM
        return text.replace(str(self._key), HIDDEN) if hidden else text

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> bytes:
        for failures in range(1, self._attempts):
            try:
                return self._send_once(method, path, body, timeout_s)
            except Unavailable as error:
                if error.kind in ("slow", "absent"):
                    raise
                time.sleep(min(LONGEST_BACKOFF_S, backoff_s(failures, error.retry_after_s)))
        return self._send_once(method, path, body, timeout_s)

    def _send_once(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> bytes:
        allowed = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + allowed
        sock = self._socket(min(CONNECT_S, allowed))
        connection = http.client.HTTPConnection(self.address.host, self.address.port)
        expired = threading.Event()
        with closing_at(sock, deadline, expired):
            try:
                connection.sock = self._secure(sock, min(CONNECT_S, allowed))
                connection.sock.settimeout(allowed)
                connection.request(method, self.address.path + path, body, self._headers(body))
                response = connection.getresponse()
                limit = LARGEST_ANSWER if body and response.status == 200 else LARGEST_OTHER
                data = _read(response, limit)
            except ssl.SSLCertVerificationError as error:
                raise MismatchError(
                    f"{self.address.text}: its certificate is not accepted: {error.verify_message}",
                    "name the authority that signed it: SSL_CERT_FILE=FILE.pem mismatch …",
                ) from error
            except Unavailable:
                raise
            except Exception as error:
                if expired.is_set() or isinstance(error, TimeoutError):
                    raise Unavailable(f"no answer in {allowed:g} s", "slow") from error
                raise Unavailable(self._one_line(_describe(error))) from error
            finally:
                connection.close()
        if expired.is_set():
            raise Unavailable(f"no answer in {allowed:g} s", "slow")
        if self._key and len(self._key) >= HIDDEN_FROM:
            data = data.replace(self._key.encode(), HIDDEN.encode())
        self._require_ok(response, data)
        return data

    def _socket(self, timeout_s: float) -> socket.socket:
        """A connection.

        Raises:
            Unavailable: none came about.
        """
        try:
            return socket.create_connection((self.address.host, self.address.port), timeout_s)
        except TimeoutError as error:
            raise Unavailable(f"no connection in {timeout_s:g} s", "absent") from error
        except (OSError, ValueError) as error:
            raise Unavailable(self._one_line(_describe(error)), "absent") from error

    def _secure(self, sock: socket.socket, timeout_s: float) -> socket.socket:
        if self._tls is None:
            return sock
        try:
            return self._tls.wrap_socket(sock, server_hostname=self.address.host)
        except TimeoutError as error:
            raise Unavailable(f"no connection in {timeout_s:g} s", "absent") from error

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
        message = self._one_line(_error_message(data) or response.reason or "")
        if status in (401, 403):
            has = "does not accept the key in" if self._key else "asks for a key: set"
            raise MismatchError(
                f"{self.address.text} {has} {KEY_VARIABLE} (HTTP {status})",
                f"{KEY_VARIABLE}=… mismatch …; it is read from the environment only",
            )
        if status in TEMPORARY:
            wait = _retry_after(response.getheader("Retry-After"))
            kind: Literal["failed", "busy"] = "busy" if status in BUSY else "failed"
            raise Unavailable(f"HTTP {status}: {message}", kind, wait)
        if 300 <= status < 400:
            target = self._one_line(redacted(response.getheader("Location") or "elsewhere"))
            raise Refused(status, f"moved to {target}; redirections are not followed")
        raise Refused(status, message)

    def _one_line(self, text: str) -> str:
        """One short line of what a server said, without the key that it may repeat."""
        shown = text.replace(self._key, HIDDEN) if self._key else text
        return " ".join(shown.split())[:300]


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


@contextmanager
def closing_at(sock: socket.socket, deadline: float, expired: threading.Event) -> Iterator[None]:
    """Shut a connection at the deadline, whatever waits on it: a handshake, headers, chunks."""
    guard = sock.dup()  # TLS takes the socket itself away

    def shut() -> None:
        expired.set()
        with suppress(OSError):
            guard.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        guard.close()
        sock.close()


def _read(response: http.client.HTTPResponse, limit: int) -> bytes:
    """The whole body, in chunks."""
    data = bytearray()
    while not response.isclosed():  # newer Pythons close it, and the socket, with the last byte
        chunk = response.read1(CHUNK)
        if not chunk:
            break
        data += chunk
        if len(data) > limit:
            raise http.client.HTTPException(f"the answer has more than {limit} bytes")
    length = response.getheader("Content-Length") or ""
    if length.isascii() and length.isdigit() and len(data) < int(length[:18]):
        raise http.client.IncompleteRead(bytes(data), int(length[:18]) - len(data))
    return bytes(data)


def _describe(error: Exception) -> str:
    match error:
        case http.client.IncompleteRead():
            return f"the answer broke off after {len(error.partial)} bytes"
        case ConnectionRefusedError():
            return "connection refused"
        case http.client.RemoteDisconnected() | ConnectionResetError():
            return "the connection was lost"
        case ssl.SSLError():
            return f"no TLS connection ({error.reason or error})"
        case OSError(strerror=str(text)):
            return text
    return str(error) or type(error).__name__


def _error_message(data: bytes) -> str:
    """What an error's body says, in vLLM's, SGLang's or anybody's form."""
    text = data[:2000].decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for key in ("error", "message", "detail"):
        while isinstance(body, dict) and key in body:
            body = body[key]
    return body if isinstance(body, str) else text


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return None if math.isnan(seconds) else max(0.0, seconds)
