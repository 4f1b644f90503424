"""`mismatch serve` over real HTTP: what it shows, and what it refuses."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote

import pytest

from mismatch.errors import MismatchError
from mismatch.reports.run_server import Server, Site, allowed, is_loopback
from tests.command import mismatch
from tests.unit.test_side_by_side import save

EVIL = "<script>alert(1)</script>\n'\"&run=x"
SECRET = "of another folder"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, one of a hostile name and report, beside a file and a run that are not served."""
    root = tmp_path_factory.mktemp("serve")
    runs = root / "runs"
    evil = EVIL.replace("/", "|")
    for name in ("first", "team/second"):
        save(runs / name)
        (runs / name / "report.html").write_text(f"<p>report of {name}</p>")
    save(runs / evil, created="2026-02-01T00:00:00", model=EVIL, version=EVIL)
    (runs / evil / "report.html").write_text("<script>fetch('/')</script>")
    (root / "secret.txt").write_text(SECRET)
    save(root / "outside")
    (root / "outside" / "report.html").write_text(SECRET)
    (runs / "link").symlink_to(root / "outside")
    save(runs / "linked")
    (runs / "linked" / "report.html").symlink_to(root / "secret.txt")
    return runs


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    served = Server(Site(folder, "k3_kl"), "127.0.0.1", 0)
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join(10)
    assert not thread.is_alive()


class Reply:
    def __init__(self, server: Server, path: str, method: str = "GET", **headers: str) -> None:
        connection = HTTPConnection(*server.server_address[:2], timeout=60)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        self.status, self.headers = response.status, response.headers
        self.text = response.read().decode()
        connection.close()


def test_the_list_shows_every_run_and_links_those_with_a_report(server: Server) -> None:
    reply = Reply(server, "/")
    assert reply.status == 200
    assert reply.text.count('type="checkbox"') == 4
    assert 'href="/run/first"' in reply.text
    assert 'href="/run/team%2Fsecond"' in reply.text
    assert "<svg" in reply.text
    for name in ("first", "team/second"):
        assert Reply(server, f"/run/{quote(name, safe='')}").text == f"<p>report of {name}</p>"


def test_two_runs_are_compared(server: Server) -> None:
    reply = Reply(server, "/compare?run=first&run=team%2Fsecond")
    assert reply.status == 200
    assert "2 runs" in reply.text
    assert "against second: first" in reply.text  # the list is newest first: the oldest is held to
    assert Reply(server, "/compare?run=first").status == 400
    assert Reply(server, "/compare?" + "&".join(["run=first"] * 9)).status == 400
    assert Reply(server, "/compare?run=first&run=first").status == 422
    assert Reply(server, "/compare?run=first&run=..").status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/run/..",
        "/run/../../secret.txt",
        "/run/..%2f..%2fsecret.txt",
        "/run/%2e%2e%2foutside",
        "/run//etc/passwd",
        "/run/first/../../outside",
        "/run/first%00",
        "/run/link",
        "/run/linked",
        "/run/",
        "/run/.",
        "/run/first/report.json",
        "//127.0.0.1/run/first/..",
        "/first/report.html",
    ],
)
def test_no_path_leaves_the_folder(server: Server, path: str) -> None:
    reply = Reply(server, path)
    assert reply.status == 404
    assert SECRET not in reply.text


def test_hostile_names_stay_text(server: Server, folder: Path) -> None:
    text = Reply(server, "/").text
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;|script&gt;" in text
    evil = EVIL.replace("/", "|")
    link = re.search(r'href="(/run/[^"]*alert[^"]*)"', text)
    assert link
    assert Reply(server, link[1]).status == 200
    both = Reply(server, f"/compare?run=first&run={quote(evil, safe='')}")
    assert both.status == 200
    assert "<script" not in both.text
    gone = Reply(server, f"/compare?run=first&run={quote('<b>', safe='')}")
    assert gone.status == 404
    assert gone.headers["Content-Type"].startswith("text/plain")


def test_every_answer_forbids_the_network_and_foreign_scripts(server: Server) -> None:
    for path in ("/", "/run/first", "/compare?run=first&run=team/second", "/nowhere"):
        headers = Reply(server, path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "'unsafe-inline'" not in policy.replace("style-src 'unsafe-inline'", "")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Access-Control-Allow-Origin"] is None
    policy = Reply(server, "/run/first").headers["Content-Security-Policy"]
    assert policy.startswith("sandbox allow-scripts;")
    assert "allow-same-origin" not in policy


def test_scripts_of_our_reports_are_those_that_are_allowed(server: Server, folder: Path) -> None:
    from mismatch.reports.html import to_html
    from tests.reports_fixture import make_report, make_tokens

    document = to_html(make_report(), make_tokens())
    in_page = set(re.findall(r"'sha256-[^']+'", document))
    policy = Reply(server, "/run/first").headers["Content-Security-Policy"]
    assert in_page
    assert in_page <= set(re.findall(r"'sha256-[^']+'", policy))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "127.0.0.1.evil", "["]
)
def test_a_foreign_host_name_is_refused(server: Server, host: str) -> None:
    reply = Reply(server, "/run/first", Host=host)
    assert reply.status == 403
    assert "report of" not in reply.text


def test_hosts_of_this_machine_are_served(server: Server) -> None:
    port = server.server_address[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert Reply(server, "/run/first", Host=host).status == 200
    assert not allowed([], "127.0.0.1")
    assert not allowed(["127.0.0.1", "evil.example"], "127.0.0.1")
    assert allowed(["box.lan:8765"], "box.lan")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_nothing_but_reading_is_answered(server: Server, method: str) -> None:
    assert Reply(server, "/", method).status == 501


def test_head_has_no_body(server: Server) -> None:
    reply = Reply(server, "/run/first", "HEAD")
    assert (reply.status, reply.text) == (200, "")
    assert int(reply.headers["Content-Length"]) > 0


def test_a_damaged_report_is_listed_and_the_rest_served(server: Server, folder: Path) -> None:
    broken = folder / "broken"
    broken.mkdir()
    (broken / "report.json").write_text('{"schema": "<script>"}')
    try:
        text = Reply(server, "/").text
        assert "Not readable" in text
        assert "<script" not in text
        assert Reply(server, "/compare?run=first&run=broken").status == 422
    finally:
        (broken / "report.json").unlink()
        broken.rmdir()


def test_only_loopback_is_silent() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "localhost", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.1", "box"))


def test_a_port_in_use_is_said(server: Server, folder: Path) -> None:
    with pytest.raises(MismatchError, match="cannot listen"):
        Server(Site(folder, "k3_kl"), "127.0.0.1", server.server_address[1])


def test_an_empty_folder_is_refused_before_anything_listens(tmp_path: Path) -> None:
    done = mismatch("serve", ".", "--port", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "no run" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_and_frees_the_port(folder: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mismatch.cli.main", "serve", str(folder), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", line)[1])  # type: ignore[index]
        held = socket.create_connection(("127.0.0.1", port))  # a browser that keeps its connection
        time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(60) == 0
        held.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    finally:
        process.kill()
        process.communicate()
