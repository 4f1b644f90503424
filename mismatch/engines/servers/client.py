"""Ask one server over HTTP: key, TLS, deadline, size limit, retries, and what a failure means.

httpx does the protocol. Every request has a separate connection: against seconds of sampling a
handshake costs nothing, and nothing stays open between requests. This module does not know what
answers mean: callers give a function that reads them, and whatever that raises is a failed request.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import httpx

from mismatch.engines.servers.address import HIDDEN, KEY_VARIABLE
from mismatch.errors import MismatchError

T = TypeVar("T")
CONNECT_S = 10.0
DESCRIBE_S = 30.0  # deadline of a request for what a server says about itself
SMALL_ANSWER = 16 << 20  # bytes of what a server says about itself
LARGEST_ANSWER = 1 << 30  # bytes of a sample with its routed experts
VALUE_BYTES = 256  # of a log-probability with its id and text, at most
HIDDEN_FROM = 8  # characters: a shorter key is a word that answers contain anyway
# Statuses after which the same request may succeed later. Proxies have other 5xx statuses;
# 501 alone is final.
TEMPORARY = frozenset({408, 425, 429, *range(500, 600)}) - {501}
ATTEMPTS = 4  # in all, of a request that failed
BUSY_ATTEMPTS = 10  # the same of a busy server: two minutes
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
# Why there is no answer. busy: 429 or 503; slow: none before the deadline; absent: no connection;
# refused: the same request will be rejected again; large: it has no end that can be waited for.
Kind = Literal["failed", "busy", "slow", "absent", "refused", "large"]
FINAL = ("refused", "slow", "large")


class RequestFailed(Exception):
    """A request without a usable answer; its text is one phrase."""

    def __init__(self, reason: str, kind: Kind = "failed") -> None:
        super().__init__(reason)
        self.kind = kind


@contextmanager
def usable_answer() -> Iterator[None]:
    """Raise RequestFailed for whatever goes wrong while an answer is read."""
    try:
        yield
    except RequestFailed:
        raise
    except MismatchError as error:  # what would end a local engine may pass here
        raise RequestFailed(error.headline) from error
    except Exception as error:
        # The text of other errors may repeat the server's, and that a key.
        lacks = f" {error}" if isinstance(error, KeyError) else ""
        raise RequestFailed(
            f"an answer that cannot be used ({type(error).__name__}{lacks})"
        ) from error


def answer_bytes(tokens: int, values: int = 1) -> int:
    """Return the most bytes of an answer with so many log-probabilities of each token."""
    return min(LARGEST_ANSWER, SMALL_ANSWER + tokens * values * VALUE_BYTES)


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also within a program that runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def api_key() -> str | None:
    """Return the key for all servers, from the environment and from nowhere else.

    Raises:
        MismatchError: it could not be sent in a header.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise MismatchError(f"{KEY_VARIABLE} contains characters that no key has", "set it again")
    return key or None


def reason_of(error: BaseException) -> str:
    """Return the system's words for a connection that was not made, else those of the error.

    httpx says "All connection attempts failed"; the first attempt's error is among its causes.
    """
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno is not None:
            return os.strerror(inner.errno)
        attempts = getattr(inner, "exceptions", None)
        inner = attempts[0] if attempts else inner.__cause__ or inner.__context__
    return str(error)


@dataclass
class Client:
    """Sends requests to one server."""

    address: str
    timeout_s: float
    """Deadline of one request, from connecting to the last byte."""
    key: str | None = field(default=None, repr=False)
    """Sent as a bearer token, and removed from everything the server says."""

    @cached_property
    def _tls(self) -> ssl.SSLContext | bool:
        """The authorities of the system, or of SSL_CERT_FILE; False: plain HTTP has none."""
        return self.address.startswith("https:") and ssl.create_default_context()

    async def get(self, path: str, read: Callable[[bytes], Any] | None = None) -> Any:
        """Return the JSON at ``path``, or what ``read`` makes of it; see :meth:`post`."""
        return await self._ask(path, None, read or self._json, SMALL_ANSWER)

    async def post(self, path: str, body: dict[str, Any], read: Callable[[Any], T], most: int) -> T:
        """Return what ``read`` makes of the answer's JSON, after as many attempts as allowed.

        Args:
            most: bytes of the answer: :func:`answer_bytes`, or LARGEST_ANSWER with experts.

        Raises:
            RequestFailed: no usable answer.
            MismatchError: the key or the certificate is not accepted.
        """
        return await self._ask(path, body, lambda data: read(self._json(data)), most)

    async def _ask(
        self, path: str, body: dict[str, Any] | None, read: Callable[[bytes], T], largest: int
    ) -> T:
        """Ask until there is an answer, where asking again may help.

        A request that ran out of time is not repeated: its answer was long, and the sample
        would have short answers in its place. What a server says about itself is asked at the
        start, where no connection means a wrong address.
        """
        tried: Counter[Kind] = Counter()
        while True:
            try:
                data = await self._exchange(path, body, largest)
                with usable_answer():
                    return read(data)
            except RequestFailed as error:
                tried[error.kind] += 1
                most = BUSY_ATTEMPTS if error.kind == "busy" else ATTEMPTS
                final = error.kind in FINAL or (error.kind == "absent" and not body)
                if final or tried[error.kind] >= most:
                    raise
            doubled = FIRST_BACKOFF_S * 2.0 ** (tried.total() - 1)
            # Requests that failed together do not come back at the same moment.
            await asyncio.sleep(min(LONGEST_BACKOFF_S, doubled) * (0.5 + random.random()))

    async def _exchange(self, path: str, body: dict[str, Any] | None, largest: int) -> bytes:
        """Return the body of one answer, with the key cut out of it."""
        # No compression: a small answer could be unpacked to any size.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        method, allowed_s = "POST", self.timeout_s
        if body is None:
            method, allowed_s = "GET", min(DESCRIBE_S, self.timeout_s)
        timeout = httpx.Timeout(None, connect=min(CONNECT_S, allowed_s))
        url, data = self.address + path, bytearray()
        try:
            async with (
                asyncio.timeout(allowed_s),
                # No proxies of the environment.
                httpx.AsyncClient(verify=self._tls, timeout=timeout, trust_env=False) as http,
                http.stream(method, url, headers=headers, json=body) as response,
            ):
                async for chunk in response.aiter_raw():
                    data += chunk
                    if len(data) > largest:
                        raise RequestFailed(f"the answer has more than {largest:,} bytes", "large")
        except TimeoutError as error:
            raise RequestFailed(f"no answer in {allowed_s:g} s", "slow") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                fault = f"{self.address}: its certificate is not accepted: {error}"
                fix = "name the authority that signed it: SSL_CERT_FILE=FILE.pem mismatch …"
                raise MismatchError(fault, fix) from error
            unreached = (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL)
            reason = self._one_line(reason_of(error) or "the connection was lost").lower()
            kind: Kind = "absent" if isinstance(error, unreached) else "failed"
            raise RequestFailed(reason, kind) from error
        if self.key and len(self.key) >= HIDDEN_FROM:
            data = data.replace(self.key.encode(), HIDDEN.encode())
        if response.status_code != 200:
            raise self._failure(response, bytes(data[:2000]))
        return bytes(data)

    def _json(self, data: bytes) -> Any:
        """Parse JSON without the key, also where that is written with escapes."""
        try:
            answer = json.loads(data)
        except ValueError as error:
            raise RequestFailed(f"the answer is no JSON ({len(data)} bytes)") from error
        if self.key and len(self.key) >= HIDDEN_FROM and b"\\" in data:
            written = json.dumps(self.key)[1:-1]
            answer = json.loads(json.dumps(answer).replace(written, HIDDEN))
        return answer

    def _failure(self, response: httpx.Response, data: bytes) -> Exception:
        """Say what a status other than 200 means."""
        status = response.status_code
        if status in (401, 403):
            has = "does not accept the key in" if self.key else "asks for a key: set"
            fix = f"{KEY_VARIABLE}=… mismatch …; it is read from the environment only"
            return MismatchError(f"{self.address} {has} {KEY_VARIABLE} (HTTP {status})", fix)
        says = self._one_line(_error_message(data) or response.reason_phrase)
        if status in TEMPORARY:
            kind: Kind = "busy" if status in (429, 503) else "failed"
            return RequestFailed(f"HTTP {status}: {says}", kind)
        if 300 <= status < 400:
            says = "moved; redirections are not followed"
        return RequestFailed(f"HTTP {status}: {says}", "refused")

    def _one_line(self, text: str) -> str:
        """Shorten what a server said to one line, without the key that it may repeat."""
        shown = text.replace(self.key, HIDDEN) if self.key else text
        return " ".join(shown.split())[:300]


def _error_message(data: bytes) -> str:
    """Return what an error's body says, in vLLM's, SGLang's or anybody's form."""
    text = data.decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for key in ("error", "message", "detail"):
        while isinstance(body, dict) and key in body:
            body = body[key]
    return body if isinstance(body, str) else text
