"""A hub on this machine: it serves one folder as a model, and counts what is fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(folder: Path, name: str, claimed: dict[str, int] | None = None) -> Iterator[Hub]:
    """Serve a folder as the model ``name``, on a free port.

    Args:
        claimed: file -> bytes that the hub says it has, whatever there is.
    """
    hub = Hub(folder, name, claimed or {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub.handler())
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Hub:
    def __init__(self, folder: Path, name: str, claimed: dict[str, int]) -> None:
        self.folder, self.name, self.claimed, self.address = folder, name, claimed, ""
        self.fetched: list[str] = []

    def files(self) -> list[str]:
        found = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return [path.relative_to(self.folder).as_posix() for path in found]

    def size(self, file: str) -> int:
        return self.claimed.get(file, (self.folder / file).stat().st_size)

    def listing(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": file, "size": self.size(file), "oid": etag(file)}
            for file in self.files()
        ]

    def handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path.startswith(f"/api/models/{hub.name}/tree/"):
                    return self.answer(json.dumps(hub.listing()).encode())
                if path.startswith(f"/api/models/{hub.name}"):
                    files = [{"rfilename": file, "size": hub.size(file)} for file in hub.files()]
                    facts = {"id": hub.name, "sha": COMMIT, "siblings": files}
                    return self.answer(json.dumps(facts).encode())
                if path.startswith(f"/{hub.name}/resolve/"):
                    file = path.removeprefix(f"/{hub.name}/resolve/").partition("/")[2]
                    if (hub.folder / file).is_file():
                        if self.command == "GET":
                            hub.fetched.append(file)
                        data = (hub.folder / file).read_bytes()
                        return self.answer(data, etag(file), hub.size(file))
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def answer(self, data: bytes, tag: str = "", size: int | None = None) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(data) if size is None else size))
                self.send_header("Content-Type", "application/json")
                self.send_header("X-Repo-Commit", COMMIT)
                if tag:
                    self.send_header("ETag", f'"{tag}"')
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def etag(file: str) -> str:
    return hashlib.sha1(file.encode()).hexdigest()
