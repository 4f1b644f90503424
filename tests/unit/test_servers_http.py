"""Requests to servers: addresses without secrets, time-outs, and what every failure means."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from email.utils import formatdate
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mismatch.engines.servers import http
from mismatch.engines.servers.address import parse_address, redacted
from mismatch.engines.servers.http import Refused, RetryingClient, Unavailable
from mismatch.errors import MismatchError
from tests.scripted_server import ScriptedServer
from tests.texts import numbers

SAMPLE: dict[str, Any] = {
    "prompt": [1, 2],
    "max_tokens": 4,
    "temperature": 1.0,
    "top_k": 0,
    "stop_token_ids": [],
    "logprobs": 0,
}
SECRET = "sk-very-secret"


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
    assert parse_address(given).text == kept


@pytest.mark.parametrize(
    "given",
    [
        f"http://me:{SECRET}@host:8000",
        f"http://{SECRET}@host:8000/v1",
        f"http://host:8000/?api_key={SECRET}",
        f"http://host:8000/#{SECRET}",
        f"me:{SECRET}@host",
    ],
)
def test_addresses_with_secrets_are_refused_and_not_shown(given: str) -> None:
    with pytest.raises(MismatchError) as caught:
        parse_address(given)
    assert SECRET not in str(caught.value)
    assert SECRET not in redacted(given)


@pytest.mark.parametrize(
    "given", ["host:8000", "", "ftp://host", "http://", "http://h:port", "http://a..b"]
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(MismatchError, match="no address") as caught:
        parse_address(given)
    assert "--server http://" in caught.value.fix


def client(
    server: ScriptedServer, timeout_s: float = 5.0, key: str | None = None
) -> RetryingClient:
    return RetryingClient(parse_address(server.url), timeout_s, key)


def failure(fault: str, timeout_s: float = 5.0) -> Unavailable:
    with ScriptedServer(faults=lambda number, body: fault) as server:
        with pytest.raises(Unavailable) as caught:
            client(server, timeout_s).post("/v1/completions", SAMPLE)
        return caught.value


def test_an_answer_arrives_whole() -> None:
    with ScriptedServer() as server:
        answer = client(server).post("/v1/completions", SAMPLE)
    assert len(answer["choices"][0]["token_ids"]) == 4


def test_a_response_may_be_closed_with_its_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = HTTPResponse.read1

    def as_newer_pythons_do(self: HTTPResponse, n: int = -1) -> bytes:
        data = plain(self, n)
        if not self.length:
            self.close()
        return data

    monkeypatch.setattr(HTTPResponse, "read1", as_newer_pythons_do)
    test_an_answer_arrives_whole()


def test_where_nobody_answers_no_request_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(Unavailable) as caught:
        RetryingClient(parse_address(f"https://127.0.0.1:{mute.getsockname()[1]}"), 60.0).get(
            "/version"
        )
    assert numbers(caught.value.reason) == [http.CONNECT_S]
    assert caught.value.kind == "absent"


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_says_when_to_come_back(status: int) -> None:
    error = failure(f"status:{status}:7")
    assert (error.kind, error.retry_after_s) == ("busy", 7.0)
    assert "not now" in error.reason


def test_a_date_is_a_time_to_come_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    error = failure(f"status:429:{formatdate(time.time() + 60, usegmt=True)}")
    assert error.retry_after_s == pytest.approx(60, abs=3)
    assert failure("status:429:soon").retry_after_s is None


def test_server_errors_pass_and_bad_requests_do_not() -> None:
    for status in (500, 502, 504, 524):  # the last is a proxy's
        assert failure(f"status:{status}").kind == "failed"
    with (
        ScriptedServer(faults=lambda *_: "status:400") as server,
        pytest.raises(Refused, match="400: not now"),
    ):
        client(server).post("/v1/completions", SAMPLE)


def test_redirections_are_not_followed() -> None:
    with (
        ScriptedServer(faults=lambda *_: "status:307") as server,
        pytest.raises(Refused, match="moved"),
    ):
        client(server).post("/v1/completions", SAMPLE)


@pytest.mark.parametrize("fault", ["hang:2", "dribble"])
def test_a_late_answer_is_none(fault: str) -> None:
    began = time.monotonic()
    error = failure(fault, timeout_s=0.4)
    assert error.kind == "slow"
    assert "0.4 s" in error.reason
    assert time.monotonic() - began < 1.5


def test_lost_and_broken_answers_are_told_apart() -> None:
    assert "lost" in failure("reset").reason
    assert "broke off" in failure("half").reason
    assert "no JSON" in failure("text").reason
    with ScriptedServer() as server:
        gone = client(server)
    with pytest.raises(Unavailable, match="refused"):
        gone.get("/version")


def test_the_key_is_sent_and_never_repeated() -> None:
    with ScriptedServer(key="right") as server:
        with pytest.raises(MismatchError, match=http.KEY_VARIABLE) as caught:
            client(server).get("/v1/models")
        assert "HTTP 401" in caught.value.message
        with pytest.raises(MismatchError, match="does not accept") as caught:
            client(server, key=SECRET).get("/v1/models")
        assert SECRET not in str(caught.value)
        assert client(server, key="right").get("/v1/models")["data"]
        server.faults = lambda number, body: "status:400"
        server.misbehave = lambda web, fault, body: server.send(  # type: ignore[method-assign]
            web, 400, {"message": f"who is {web.headers['Authorization']}?"}
        )
        with pytest.raises(Refused) as refused:
            client(server, key="right").post("/v1/completions", SAMPLE)
        assert "right" not in str(refused.value)
        assert http.HIDDEN in str(refused.value)


def test_no_part_of_a_key_is_left_where_a_message_is_cut() -> None:
    with ScriptedServer(key=SECRET, faults=lambda *_: "status:400") as server:
        message = "x" * 295 + SECRET
        server.misbehave = lambda web, fault, body: server.send(  # type: ignore[method-assign]
            web, 400, {"message": message}
        )
        with pytest.raises(Refused) as refused:
            client(server, key=SECRET).post("/v1/completions", SAMPLE)
    assert SECRET[:3] not in refused.value.reason


def test_the_key_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(http.KEY_VARIABLE, raising=False)
    assert http.api_key() is None
    monkeypatch.setenv(http.KEY_VARIABLE, f" {SECRET}\n")
    assert http.api_key() == SECRET
    monkeypatch.setenv(http.KEY_VARIABLE, "a\nb")
    with pytest.raises(MismatchError) as caught:
        http.api_key()
    assert "a\nb" not in str(caught.value)


@pytest.fixture
def tls_server(tmp_path: Path) -> Any:
    """An HTTPS server with a certificate that nobody has signed: (url, certificate)."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(
            [*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")

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
    with pytest.raises(MismatchError, match="its certificate") as caught:
        RetryingClient(parse_address(url), 5.0).get("/")
    assert "SSL_CERT_FILE" in caught.value.fix
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    assert RetryingClient(parse_address(url), 5.0).get("/") == {}
