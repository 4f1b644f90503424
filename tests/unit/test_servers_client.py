"""Requests to servers: addresses without secrets, deadlines, limits, and what failures mean."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mismatch.cli.session import warn_of_key
from mismatch.engines.base import ExpertLayout
from mismatch.engines.servers import client as module
from mismatch.engines.servers import sglang_api, vllm_api
from mismatch.engines.servers.address import (
    HIDDEN,
    KEY_VARIABLE,
    parse_address,
    redacted,
    unprotected,
)
from mismatch.engines.servers.client import Client, RequestFailed, api_key, wait_for
from mismatch.engines.servers.sglang_api import SglangServer
from mismatch.engines.servers.vllm_api import VllmServer
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec, RolloutSpec
from tests.scripted_server import ScriptedServer

KEY = "sk-abcdef123456"
WITH_EXPERTS = 40 << 20  # in place of a GiB
BUFFERS = 12 << 20  # of the kernel and of httpx: what was sent and not read
SAMPLE = {"prompt": [1, 2], "max_tokens": 4, "temperature": 1.0, "top_k": 0, "stop_token_ids": []}


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every request once, and wait for nothing."""
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    monkeypatch.setattr(module, "BUSY_ATTEMPTS", 1)
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_BACKOFF_S", 0.02)


def get(url: str, timeout_s: float = 5.0, key: str | None = None, path: str = "/version") -> Any:
    return wait_for(Client(parse_address(url), timeout_s, key).get(path))


def post(server: ScriptedServer, timeout_s: float = 5.0) -> Any:
    client = Client(parse_address(server.url), timeout_s)
    return wait_for(
        client.post("/v1/completions", SAMPLE, lambda answer: answer, module.SMALL_ANSWER)
    )


def failure(fault: str, timeout_s: float = 5.0) -> RequestFailed:
    with ScriptedServer(faults=lambda number, body: fault) as server:
        with pytest.raises(RequestFailed) as caught:
            post(server, timeout_s=timeout_s)
        return caught.value


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("https://host/team/a", "https://host:443/team/a"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses_are_kept_plain(given: str, kept: str) -> None:
    assert parse_address(given) == kept


@pytest.mark.parametrize(
    "given",
    [
        f"http://me:{KEY}@host:8000",
        f"http://{KEY}@host:8000/v1",
        f"http://host:8000/?api_key={KEY}",
        f"http://host:8000/#{KEY}",
        f"me:{KEY}@host",
        *("host:8000", "", "ftp://host", "http://", "http://h:port", "http://a..b"),
        *("http://x y:80", "http://a\0b:1"),
    ],
)
def test_bad_addresses_are_refused_and_their_secrets_not_shown(given: str) -> None:
    with pytest.raises(MismatchError) as caught:
        parse_address(given)
    assert caught.value.fix
    assert KEY not in str(caught.value)
    assert KEY not in redacted(given)


def test_a_key_over_plain_http_to_another_host_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    safe = ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://example.com")
    risky = ("http://example.com", "http://10.0.0.7:8000")

    def shown(url: str) -> str:
        warn_of_key(RolloutSpec(engine=EngineSpec(engine="server", servers=(url,))))
        return capsys.readouterr().out

    assert not shown(risky[0])  # no key is sent
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    for url in safe:
        assert not unprotected(parse_address(url))
        assert not shown(url)
    for url in risky:
        assert unprotected(parse_address(url))
        assert parse_address(url) in shown(url)
        assert KEY not in shown(url)


# ---------------------------------------------------------------- what failures mean


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("status:429", "busy", "not now"),
        ("status:503", "busy", "503"),
        ("status:500", "failed", "500"),
        ("status:400", "refused", "400: not now"),
        ("status:501", "refused", "501"),
        ("status:307", "refused", "redirect"),
        ("reset", "failed", ""),
        ("half", "failed", ""),
        ("text", "failed", "JSON"),
        ("dribble", "slow", "0.6 s"),
    ],
)
def test_every_failure_has_a_kind(fault: str, kind: str, says: str) -> None:
    late = kind == "slow"  # on a loaded machine any other answer may take a second, too
    error = failure(fault, timeout_s=0.6 if late else 60.0)
    assert error.kind == kind
    assert says in str(error)
    assert str(error)


def test_an_address_without_a_server_is_absent() -> None:
    with ScriptedServer() as server:
        assert len(post(server)["choices"][0]["token_ids"]) == 4
    with pytest.raises(RequestFailed, match="connection refused") as caught:
        get(server.url)
    assert caught.value.kind == "absent"


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [("status:500", 3), ("status:503", 5), ("reset", 3), ("status:400", 1), ("hang:1", 1)],
)
def test_attempts_are_bounded(monkeypatch: pytest.MonkeyPatch, fault: str, attempts: int) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 3)
    monkeypatch.setattr(module, "BUSY_ATTEMPTS", 5)
    with ScriptedServer(faults=lambda number, body: fault) as server:
        with pytest.raises(RequestFailed):
            post(server, timeout_s=0.3 if fault.startswith("hang") else 60.0)
        assert server.sampled == attempts


# ---------------------------------------------------------------- time and size


@contextmanager
def raw_server(
    pieces: list[bytes],
    pause_s: float = 0.0,
    repeat: bytes | None = None,
    sent: list[int] | None = None,
) -> Iterator[str]:
    """Send bytes as they are, one piece after the other, then ``repeat`` for ever.

    Args:
        sent: gets how many bytes of ``repeat`` each connection was offered.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def feed(peer: socket.socket) -> None:
        try:
            peer.recv(65536)
            for piece in pieces:
                peer.sendall(piece)
                time.sleep(pause_s)
            if sent is not None:
                sent.append(0)
            while repeat and not stopped.is_set():
                if sent is not None:
                    sent[-1] += len(repeat)  # before: the reader may end while this one is sent
                peer.sendall(repeat)
                time.sleep(pause_s)
        except OSError:
            pass
        finally:
            peer.close()

    def serve() -> None:
        while not stopped.is_set():
            try:
                peer, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=feed, args=(peer,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        stopped.set()
        listening.close()


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
DRIPS = {
    "headers, byte by byte": ([HEAD], b"x"),
    "endless 100 Continue": ([], b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunks of one byte": ([CHUNKED], b"1\r\n \r\n"),
    "a body, byte by byte": ([HEAD + b"Content-Length: 100000\r\n\r\n"], b" "),
    "a TLS handshake that never ends": ([b"\x16\x03\x03"], b"\x00"),
}


@pytest.mark.parametrize("case", DRIPS)
def test_one_deadline_holds_for_the_whole_request(case: str) -> None:
    pieces, repeat = DRIPS[case]
    with raw_server(pieces, 0.1, repeat) as url:
        start = time.monotonic()
        with pytest.raises(RequestFailed) as caught:
            get(url.replace("http", "https") if "TLS" in case else url, timeout_s=1.0)
    assert time.monotonic() - start < 20
    assert caught.value.kind in ("slow", "failed", "absent")


IDS = list(range(4000))
ROUTES = ExpertLayout((0,), num_experts=4, top_k=1)
LIMITS: dict[str, tuple[Callable[[Client], Any], int]] = {
    "what it says of itself": (lambda client: client.get("/v1/models"), module.SMALL_ANSWER),
    "a sample of vLLM": (
        lambda client: vllm(client).generate(IDS, {"max_tokens": 96}, likeliest=2),
        module.SMALL_ANSWER + 4096 * (vllm_api.UNASKED + 2) * module.VALUE_BYTES,
    ),
    "a scoring of vLLM": (
        lambda client: vllm(client).score(IDS, 0),
        module.SMALL_ANSWER + 4000 * module.VALUE_BYTES,
    ),
    "a sample of SGLang": (
        lambda client: sglang(client).generate(IDS, {"max_new_tokens": 1000}),
        module.SMALL_ANSWER + 1000 * module.VALUE_BYTES,
    ),
    "experts of vLLM": (
        lambda client: vllm(client, ROUTES).generate(IDS, {"max_tokens": 1}),
        WITH_EXPERTS,
    ),
    "experts of SGLang": (
        lambda client: sglang(client, ROUTES).generate(IDS, {"max_new_tokens": 1}),
        WITH_EXPERTS,
    ),
}


def vllm(client: Client, layout: ExpertLayout | None = None) -> VllmServer:
    return VllmServer(client, "0", ("tiny",), layout=layout)


def sglang(client: Client, layout: ExpertLayout | None = None) -> SglangServer:
    return SglangServer(client, "0", ("tiny",), layout=layout)


@pytest.mark.parametrize("case", LIMITS)
def test_an_endless_answer_is_read_to_the_limit_of_its_kind_and_once(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    ask, limit = LIMITS[case]
    monkeypatch.setattr(module, "ATTEMPTS", 3)
    for api in (module, vllm_api, sglang_api):
        monkeypatch.setattr(api, "LARGEST_ANSWER", WITH_EXPERTS)
    sent = list[int]()
    endless = raw_server([HEAD + b"\r\n"], 0.0, b" " * 65536, sent)
    with endless as url, pytest.raises(RequestFailed, match=f"{limit:,}") as caught:
        wait_for(ask(Client(parse_address(url), 60.0)))
    assert caught.value.kind == "large"
    (taken,) = sent  # one connection
    assert limit < taken < limit + BUFFERS


NONSENSE = {
    "no status": b"hello\r\n\r\n",
    "endless digits": HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    "deep JSON": HEAD + b"\r\n" + b"[" * 100_000,
    "deep error": b"HTTP/1.1 500 Bad\r\n\r\n" + b"[" * 2000,
    "bad chunk": CHUNKED + b"zz\r\n",
    "compressed": HEAD + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b",
    "headers without end": HEAD + b"X: " + b"a" * 200_000 + b"\r\n\r\n{}",
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_a_failed_request(case: str) -> None:
    with raw_server([NONSENSE[case]]) as url, pytest.raises(RequestFailed) as caught:
        get(url)
    assert caught.value.kind == "failed"
    assert len(str(caught.value)) < 400


def test_it_runs_within_a_loop_of_the_caller() -> None:
    async def caller(url: str) -> Any:
        return get(url)

    with ScriptedServer() as server:
        assert asyncio.run(caller(server.url)) == {"version": server.version}


# ---------------------------------------------------------------- keys and certificates

ECHOES = {
    "location": f"HTTP/1.1 302 Moved\r\nLocation: http://h/{KEY}\r\n\r\n",
    "error": f'HTTP/1.1 400 Bad\r\n\r\n{{"error": "no {KEY}"}}',
    "escaped error": 'HTTP/1.1 400 Bad\r\n\r\n{"error": "no \\u0073k-abcdef123456"}',
    "cut error": f'HTTP/1.1 400 Bad\r\n\r\n{{"error": "{"x" * 295}{KEY}"}}',
    "reason": f"HTTP/1.1 400 {KEY}\r\n\r\n",
    "status line": f"{KEY}\r\n\r\n",
}


@pytest.mark.parametrize("case", ECHOES)
def test_a_key_that_is_echoed_is_not_shown(case: str) -> None:
    with raw_server([ECHOES[case].encode()]) as url:
        with pytest.raises(RequestFailed) as caught:
            get(url, key=KEY)
        assert KEY[:4] not in str(caught.value)


@pytest.mark.parametrize("text", [KEY, KEY.replace("s", "\\u0073", 1), "\\u0073" + KEY[1:]])
def test_a_key_in_an_answer_is_cut_out(text: str) -> None:
    body = f'{{"version": "{text}", "{text}": ["{text}"]}}'
    with raw_server([HEAD + b"\r\n" + body.encode()]) as url:
        answer = json.dumps(get(url, key=KEY))
    assert KEY not in answer
    assert HIDDEN in answer


def test_a_wrong_key_is_an_error_that_names_the_variable() -> None:
    with ScriptedServer(key="right") as server:
        for key in (None, KEY):
            with pytest.raises(MismatchError) as caught:
                get(server.url, key=key, path="/v1/models")
            assert {KEY_VARIABLE, "401)"} <= set(caught.value.message.split())
            assert KEY not in str(caught.value)
        assert get(server.url, key="right", path="/v1/models")["data"]


def test_the_key_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert api_key() is None
    monkeypatch.setenv(KEY_VARIABLE, f" {KEY}\n")
    assert api_key() == KEY
    assert KEY not in repr(Client(parse_address("http://h"), 1.0, api_key()))
    monkeypatch.setenv(KEY_VARIABLE, "a\nb")
    with pytest.raises(MismatchError) as caught:
        api_key()
    assert "a\nb" not in str(caught.value)


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An HTTPS server with a certificate that nobody has signed: (url, certificate)."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(
            [*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("machine: no openssl to make a certificate with")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"https://127.0.0.1:{server.server_address[1]}", cert
    server.shutdown()
    server.server_close()


def test_certificates_are_verified(tls_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, cert = tls_server
    with pytest.raises(MismatchError, match="certificate") as caught:
        get(url)
    assert "SSL_CERT_FILE" in caught.value.fix
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    assert get(url) == {}
