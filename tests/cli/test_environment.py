"""What a machine may be like: its paths, locale, home, clock, proxies and network."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mismatch.engines.servers.address import parse_address
from mismatch.engines.servers.client import Client, wait_for
from mismatch.errors import MismatchError
from mismatch.run import directory, store
from mismatch.run.directory import RUN, RUN_SCHEMA, new_directory, newest_unfinished
from mismatch.specs import spec_hash

from ..command import mismatch
from ..made_run import make_run, spec

ROOT = Path(__file__).parents[2]
ODD = "ein Läuf 漢字 $(x) 'y'"


def compared(run: Path, *, cwd: Path) -> tuple[int, str]:
    """`mismatch compare RUN`: its exit code and its verdict."""
    done = mismatch("compare", str(run), cwd=cwd)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The outcome where nothing is odd."""
    folder = tmp_path_factory.mktemp("plain")
    return compared(make_run(folder / "run"), cwd=folder)


def test_a_path_with_spaces_and_other_scripts(tmp_path, plain):
    assert compared(make_run(tmp_path / ODD / "run"), cwd=tmp_path) == plain


def test_a_run_behind_a_link(tmp_path, plain):
    make_run(tmp_path / "elsewhere")
    (tmp_path / "run").symlink_to("elsewhere")
    assert compared(tmp_path / "run", cwd=tmp_path) == plain
    assert (tmp_path / "run").is_symlink()
    assert (tmp_path / "elsewhere" / "report.json").exists()


def test_a_new_run_behind_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    assert new_directory(tmp_path / "run", "m") == tmp_path / "run"
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(MismatchError, match=r"cannot create .*dangling"):
        new_directory(tmp_path / "dangling", "m")


def in_an_interpreter(run: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """`mismatch compare RUN`; Python reads these variables when it starts."""
    done = subprocess.run(
        [sys.executable, "-m", "mismatch", "compare", str(run)],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert b"Traceback" not in done.stderr
    return done


C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ELSEWHERE = {"HOME": "/proc", "XDG_CACHE_HOME": "/proc/x", "XDG_CONFIG_HOME": "/proc/x"}


@pytest.mark.slow
def test_a_locale_of_ascii_and_a_home_that_cannot_be_written(tmp_path, plain):
    done = in_an_interpreter(make_run(tmp_path / "run"), **C, **ELSEWHERE)
    assert done.returncode == plain[0], done.stderr
    assert plain[1].rpartition(" – ")[2].encode() in done.stdout


def test_a_name_that_is_no_text_in_this_locale_is_refused(tmp_path):
    run = make_run(tmp_path / "Läuf")
    before = sorted(path.name for path in run.iterdir())
    done = in_an_interpreter(run, **C)
    assert done.returncode == 2
    assert b"LC_ALL=C.UTF-8" in done.stderr
    assert sorted(path.name for path in run.iterdir()) == before


def test_what_a_command_left_that_was_ended_at_once_can_be_used(tmp_path):
    out = new_directory(tmp_path / "run", "m")
    (out / ".spec.json.1.partial").write_text("{")
    assert new_directory(out, "m") == out
    (out / "notes.txt").write_text("mine")
    with pytest.raises(MismatchError, match="not empty"):
        new_directory(out, "m")


# ---------------------------------------------------------------- clock


WALL_CLOCK = re.compile(
    r"\btime\.time(?:_ns)?\(|\bfrom time import|\bdate(?:time)?\.(?:now|utcnow|today)\("
    r"|\b(?:gm|local)time\(|\bCLOCK_REALTIME\b|\bst_mtime\b(?!_ns)"
)


def test_durations_are_not_of_a_clock_that_can_be_set():
    """A clock that is set back makes no time-out longer and no stage negative."""
    used = {
        str(path.relative_to(ROOT)): calls
        for path in (ROOT / "mismatch").rglob("*.py")
        if (calls := WALL_CLOCK.findall(path.read_text("utf-8")))
    }
    assert used == {
        "mismatch/models/file_tokenizer.py": ["datetime.now("],  # a chat template's date
        "mismatch/run/directory.py": ["datetime.now("],  # names of runs
        "mismatch/run/provenance.py": ["datetime.now("],
    }


def test_a_clock_that_is_set_back_overwrites_no_run(tmp_path, monkeypatch):
    class Stopped(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(directory, "datetime", Stopped)
    names = [new_directory(None, "m").name for _ in range(3)]
    assert names == ["20260101-000000-m", "20260101-000000-m-2", "20260101-000000-m-3"]


def test_an_unfinished_run_from_the_future_is_found(tmp_path):
    run = make_run(tmp_path / "20991231-235959-m")
    entry = {"verb": "check", "spec_hash": spec_hash(spec()), "finished": None, "command": "x"}
    store.write_json(run / RUN, {"schema": RUN_SCHEMA, "invocations": [entry]})
    os.utime(run / RUN, (4e9, 4e9))
    assert newest_unfinished(tmp_path, "check", spec()) == run


# ---------------------------------------------------------------- network


class Hello(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        pass


def answered(host: str, family: int) -> str:
    """The address of a server that got a request of ours and whose answer arrived."""

    class Server(ThreadingHTTPServer):
        address_family = family

    with Server((host, 0), Hello) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{server.server_address[1]}"
        assert wait_for(Client(parse_address(url), 10.0).get("/")) == {}
        server.shutdown()
    return url


def test_a_server_on_ipv6():
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("machine: no IPv6 here")
    assert answered("::1", socket.AF_INET6).startswith("http://[::1]:")


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_servers_are_asked_themselves_whatever_proxies_are_named(monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody is there
    assert answered("127.0.0.1", socket.AF_INET)


# ---------------------------------------------------------------- copies


def test_a_copy_without_its_hidden_files_is_read(tmp_path, plain):
    original = make_run(tmp_path / "made")
    shutil.copytree(original, tmp_path / "copy", ignore=shutil.ignore_patterns(".*"))
    assert compared(tmp_path / "copy", cwd=tmp_path) == plain


WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(name, *rest):
    return None if name.partition(".")[0] in ("torch", "transformers") else found(name, *rest)
PathFinder.find_spec = staticmethod(find_spec)  # as where they are not installed
from mismatch.cli.main import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "kernels", "loop", "sync-probe"])
def test_a_missing_package_is_answered_with_the_line_that_installs_it(command, tmp_path):
    flags = [] if command == "kernels" else ["--model", "tiny-gpt-oss"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, command, *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout
    assert "pip install 'train-infer-mismatch[" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.rglob("*.parquet"))
