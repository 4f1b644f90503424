"""`mismatch serve`: the runs of a folder as pages, on this machine alone.

Safe beside hostile runs and hostile pages in the same browser:

- no path of a request is ever joined to the folder: a run is looked up by its name among those that
  a scan has found, and only its ``report.html`` is read;
- a ``Host`` that is a name other than localhost is refused, so that no foreign site can rebind its
  name to this address and read the pages;
- every response has a content security policy without network; a saved report, which may come from
  elsewhere, is sandboxed and may run no script but those that ship with this package;
- only GET and HEAD are answered, and nothing is written.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from mismatch.errors import MismatchError
from mismatch.pipeline.saved_runs import History, find_runs, history
from mismatch.pipeline.side_by_side import side_by_side
from mismatch.reports import html
from mismatch.reports.formatting import TONES, line, packaged
from mismatch.reports.metric_labels import metric_label
from mismatch.reports.saved_runs import beside_page, history_page, metric_format
from mismatch.reports.section import Cell, Column

PAGE = "report.html"
LARGEST = 64 << 20  # bytes of a report that are read
MOST = 8  # runs side by side
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
OWN = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One response.

    Attributes:
        policy: its Content-Security-Policy.
    """

    status: HTTPStatus
    body: str
    policy: str = OWN
    kind: str = "text/html"


class Site:
    """What is shown at which address; knows nothing of sockets."""

    def __init__(self, folder: Path, metric: str) -> None:
        self.folder, self.metric = folder, metric
        self._lock = threading.Lock()

    def runs(self) -> dict[str, Path]:
        """Name in addresses -> directory."""
        root = self.folder.resolve()
        return {
            path.resolve().relative_to(root).as_posix(): path for path in find_runs(self.folder)
        }

    def answer(self, target: str) -> Answer:
        """The response to a request for a path with its query."""
        address = urlsplit(target)
        try:
            with self._lock:  # matplotlib's settings are of the whole process
                if address.path == "/":
                    return self._index()
                if address.path == "/compare":
                    return self._compare(parse_qs(address.query).get("run", []))
                if address.path.startswith("/run/"):
                    return self._report(unquote(address.path.removeprefix("/run/")))
        except MismatchError as error:
            return _refusal(HTTPStatus.UNPROCESSABLE_ENTITY, f"{error.message}: {error.fix}")
        return _refusal(HTTPStatus.NOT_FOUND, "no such page")

    def _index(self) -> Answer:
        past: History = history(self.folder, self.metric)
        runs, newest = self.runs(), past.points[::-1]
        label = metric_label(self.metric).label
        shown = html.template("serve.html").render(
            page=history_page(past),
            points=newest,
            cells=[Cell(point.value) for point in newest],
            column=Column(label, metric_format(self.metric, [p.value for p in newest]), interval=1),
            label=label,
            tones=TONES,
            links={
                name: f"/run/{quote(name, safe='')}"
                for name, path in runs.items()
                if (path / PAGE).is_file()
            },
            css=packaged("report.css") + packaged("serve.css"),
        )
        return Answer(HTTPStatus.OK, shown)

    def _compare(self, names: list[str]) -> Answer:
        runs = self.runs()
        if missing := [name for name in names if name not in runs]:
            return _refusal(HTTPStatus.NOT_FOUND, f"no such run: {missing[0]}")
        if not 2 <= len(names) <= MOST:
            return _refusal(HTTPStatus.BAD_REQUEST, f"choose 2 to {MOST} runs")
        # The list is newest first, and a run is held against those before it.
        result = side_by_side([runs[name] for name in reversed(names)])
        return Answer(HTTPStatus.OK, html.show_page(beside_page(result)))

    def _report(self, name: str) -> Answer:
        run = self.runs().get(name)
        path = None if run is None else run / PAGE
        if path is None or path.is_symlink() or not path.is_file():
            return _refusal(
                HTTPStatus.NOT_FOUND, "no such report; `mismatch report RUN` writes one"
            )
        if path.stat().st_size > LARGEST:
            return _refusal(HTTPStatus.UNPROCESSABLE_ENTITY, f"{PAGE} is over {LARGEST >> 20} MiB")
        return Answer(HTTPStatus.OK, path.read_text("utf-8", "replace"), _sandbox())


def _sandbox() -> str:
    """Of a saved report: an origin of its own, our scripts, nothing from anywhere."""
    return (
        f"sandbox allow-scripts; default-src 'none'; script-src {html.own_scripts()}; "
        "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _refusal(status: HTTPStatus, text: str) -> Answer:
    return Answer(status, line(text) + "\n", kind="text/plain")


class Handler(BaseHTTPRequestHandler):
    """GET and HEAD; every other method is answered with 501 by the base class."""

    server: Server
    server_version, sys_version = "mismatch", ""
    timeout = 30  # seconds of silence after which a connection is dropped

    def do_GET(self) -> None:
        if not allowed(self.headers.get_all("Host") or [], self.server.host):
            self._send(_refusal(HTTPStatus.FORBIDDEN, "this host name is not served here"))
        else:
            self._send(self.server.site.answer(self.path))

    do_HEAD = do_GET

    def _send(self, answer: Answer) -> None:
        body = answer.body.encode("utf-8", "replace")
        self.send_response(answer.status)
        self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", answer.policy)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses hold names that would need to be made safe for the terminal."""


class Server(ThreadingHTTPServer):
    """Listens at once; its threads end with it."""

    daemon_threads = True

    def __init__(self, site: Site, host: str, port: int) -> None:
        self.site, self.host = site, host
        if ":" in host:
            import socket

            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise MismatchError(
                f"cannot listen on {host} port {port}: {error}", "another --port, or --port 0"
            ) from error

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is nobody's fault; a fault of ours is shown."""
        import sys
        import traceback

        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            traceback.print_exc()


def allowed(hosts: list[str], own: str) -> bool:
    """Whether a request's Host is an address or a name of this machine's own.

    A site that rebinds its name to this address still sends its name.

    >>> allowed(["127.0.0.1:8000"], "127.0.0.1"), allowed(["evil.example:8000"], "127.0.0.1")
    (True, False)
    """
    if len(hosts) != 1:
        return False
    try:
        name = urlsplit(f"//{hosts[0]}").hostname or ""
    except ValueError:
        return False
    return name in {*LOOPBACK, own} or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
