"""Files, models, folders and servers of a stranger, for each row of the table of tests/foreign.py.

What is no file, no model or no server is an error within two minutes, with a fix, for every command
that takes it. Of rows with the same reader the first alone is outside the longer grid.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mismatch.models.digests import RECORD
from mismatch.run.hub import INDEX

from ..command import ROOT
from ..conftest import grid
from ..foreign import INPUTS, Row, call
from ..made_run import make_run

pytestmark = pytest.mark.slow
MODEL = ROOT / "mismatch" / "models" / "tiny-gpt-oss"
GOOD = {"prompt_token_ids": [5, 6], "response_token_ids": [7, 8], "logprobs": [-0.5, -0.5]}
GOOD |= {"train_logprobs": [-0.5, -0.25], "step": 3}
FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "deep": lambda path: path.write_text("[" * 10_000),
    "no text": lambda path: path.write_bytes(bytes(range(128, 256)) * 64),
    "device": lambda path: path.symlink_to("/dev/zero"),
}
# Bodies of every answer of a server.
ANSWERS: dict[str, bytes] = {
    "no text": bytes(range(128, 256)) * 64,
    "deep": b"[" * 100_000,
    "null": b"null",
    "page": b"<html>\n::error::x</html>",
    "names": json.dumps(
        {"data": [{"id": "\n::error::x", "owned_by": "vllm"}], "version": 3}
    ).encode(),
}


def cases(*kinds: str) -> list[Any]:
    """Return (command, flag) of every row of some kinds."""
    seen: set[tuple[str, str]] = set()
    found = []
    for command, rows in INPUTS.items():
        for flag, row in rows.items():
            if row.kind in kinds:
                later = (row.kind, flag) in seen or flag == "accelerate_config"
                later |= row.kind == "model"
                seen.add((row.kind, flag))
                marks = [pytest.mark.grid] * later
                found.append(pytest.param(command, flag, marks=marks, id=f"{command}-{flag}"))
    return found


def refused(command: str, row: Row, given: object, folder: Path) -> str:
    more: dict[str, object] = {}
    if "GOOD" in row.line:
        more["GOOD"] = make_run(folder / "good")
    if "DUMP" in row.line:
        more["DUMP"] = folder / "good.jsonl"
        (folder / "good.jsonl").write_text(json.dumps(GOOD) + "\n")
    done = call(command, row, given, folder, **more)
    assert done.returncode == 2 or not row.read, (command, row, done.stdout)
    assert done.returncode < 2 or "error: " in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("attack", grid(FILES, "pipe", "deep"))
@pytest.mark.parametrize(("command", "flag"), cases("file", "dump"))
def test_a_file_that_is_none_is_refused(
    command: str, flag: str, attack: str, tmp_path: Path
) -> None:
    row = INPUTS[command][flag]
    path = tmp_path / f"in{row.suffix}"
    FILES[attack](path)
    refused(command, row, path, tmp_path)


@pytest.mark.parametrize(("command", "flag"), cases("model"))
def test_a_model_whose_files_are_none_is_refused(command: str, flag: str, tmp_path: Path) -> None:
    """One file at a time, or a broken adapter would hide a broken configuration.

    A command need not read the others: it must only end, without a traceback.
    """
    adapter = "adapter" in flag
    cases = [("adapter_config.json" if adapter else "config.json", attack) for attack in FILES]
    row = INPUTS[command][flag]
    others = [("tokenizer_config.json", "deep"), ("tokenizer.json", "pipe")]
    others += [("chat_template.jinja", "no text"), (RECORD, "deep"), (INDEX, "device")]
    for name, attack in [*cases, *others]:
        folder = tmp_path / f"{name}-{attack.replace(' ', '-')}"
        model = Path(shutil.copytree(MODEL, folder / "model"))
        (model / name).unlink(missing_ok=True)
        FILES[attack](model / name)
        refused(command, row._replace(read=row.read and (name, attack) in cases), model, folder)


@pytest.mark.parametrize("attack", grid(FILES, "pipe", "deep"))
@pytest.mark.parametrize(("command", "flag"), cases("dumps"))
def test_a_file_among_dumps_that_is_none_ends_nothing(
    command: str, flag: str, attack: str, tmp_path: Path
) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    for step in (1, 3):
        (folder / f"step_{step}.jsonl").write_text(json.dumps(GOOD | {"step": step}) + "\n")
    FILES[attack](folder / "step_2.jsonl")
    done = call(command, INPUTS[command][flag], folder, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [each.split(":")[0] for each in done.stdout.splitlines()]
    assert [each for each in lines if each.startswith("step ")] == ["step 1", "step 3"]


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("attack", ANSWERS)
@pytest.mark.parametrize(("command", "flag"), cases("server"))
def test_a_server_that_is_none_is_refused(
    command: str, flag: str, attack: str, tmp_path: Path
) -> None:
    with answering(ANSWERS[attack]) as url:
        said = refused(command, INPUTS[command][flag], url, tmp_path)
    assert url in said
    assert not (tmp_path / "out").exists()
