"""The script that makes environments: which one, of which flavour, and what a GPU machine lacks."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.played_driver import play_driver

SCRIPT = Path(__file__).parents[2] / "tools" / "make_env.py"


@pytest.fixture
def tool() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def machine(tmp_path: Path, driver: str | None, **programs: str) -> dict[str, str]:
    """Return the environment of a machine with these programs, and a GPU unless driver is None."""
    place = tmp_path / "bin"
    place.mkdir(exist_ok=True)
    scripts = dict(programs)
    if driver is not None:
        scripts["nvidia-smi"] = f'[ "$1" = -L ] && echo "GPU 0: H100" || echo {driver}'
    for name, script in scripts.items():
        (place / name).write_text(f"#!/bin/sh\n{script}\n")
        (place / name).chmod(0o755)
    return {**os.environ, "PATH": str(place)}


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("driver", "arguments", "directory"),
    [
        (None, (), ".venv"),
        (None, ("--tests",), ".venv"),
        (None, ("--tests", "--sglang"), ".venv-sglang"),
        ("580.65", (), ".venv"),
        ("580.65", ("--sglang",), ".venv-sglang"),
        ("580.65", ("--tests",), ".venv-cpu"),
        ("580.65", ("--tests", "--sglang"), ".venv-sglang-cpu"),
    ],
)
def test_tests_have_an_environment_of_their_own_beside_a_gpu(
    tmp_path: Path, driver: str | None, arguments: tuple[str, ...], directory: str
) -> None:
    done = run(machine(tmp_path, driver), *arguments, "--print-directory")
    assert (done.returncode, done.stdout) == (0, f"{directory}\n"), done.stderr


def test_an_old_driver_and_a_missing_compiler_are_named_before_anything_is_downloaded(
    tmp_path: Path,
) -> None:
    """The script is copied, so that no environment of this checkout is touched."""
    checkout = tmp_path / "checkout"
    for name in ("pyproject.toml", "constraints/cpu.txt", "tools/make_env.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes((SCRIPT.parents[1] / name).read_bytes())
    command = [sys.executable, str(checkout / "tools" / "make_env.py")]
    env = machine(tmp_path, "550.54.14")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "550.54.14" in done.stderr
    assert " gcc" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_machine_that_has_everything_lacks_nothing(
    tool: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", machine(tmp_path, "580.65.06", cc="true")["PATH"])
    room: dict[str, Any] = {"total": 100 * 10**9, "used": 0, "free": 16 * 10**9}
    usage = tool.missing_for_cuda.__globals__["shutil"]
    monkeypatch.setattr(usage, "disk_usage", lambda place: SimpleNamespace(**room))
    assert tool.missing_for_cuda(tmp_path) == []
    room["free"] = 14 * 10**9
    (missing,) = tool.missing_for_cuda(tmp_path)
    assert "14 GB" in missing


@pytest.mark.parametrize(
    ("driver", "code", "version", "said"),
    [
        ("570.10", 0, 13_000, []),  # a container with CUDA's forward-compatibility package
        ("570.10", 0, 12_080, ["570.10", "580"]),
        ("580.65", 0, 13_000, []),
        ("580.65", 803, 13_000, ["580.65", "803", "CUDA_ERROR_PLAYED"]),
    ],
)
def test_the_driver_itself_is_asked_whether_it_runs_cuda_13(
    tool: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    code: int,
    version: int,
    said: list[str],
) -> None:
    play_driver(tmp_path / "lib", monkeypatch, code, version)
    monkeypatch.setenv("PATH", machine(tmp_path, driver, cc="true")["PATH"])
    monkeypatch.setattr(
        tool.missing_for_cuda.__globals__["shutil"],
        "disk_usage",
        lambda place: SimpleNamespace(free=10**12),
    )
    missing = tool.missing_for_cuda(tmp_path)
    assert len(missing) == bool(said)
    assert all(word in missing[0] for word in said)


@pytest.mark.parametrize("name", ["cpu.txt", "sglang-cpu.txt"])
def test_every_package_of_a_list_has_hashes(name: str) -> None:
    """pip then takes nothing else, and refuses a list in which one lacks them."""
    text = (SCRIPT.parents[1] / "constraints" / name).read_text("utf-8")
    entries = [
        entry for entry in text.replace("\\\n", "").splitlines() if entry and entry[0] != "#"
    ]
    assert len(entries) > 100
    hashed = re.compile(r"[\w.-]+==[\w.]+( +--hash=sha256:[0-9a-f]{64})+")
    assert [entry for entry in entries if not hashed.fullmatch(entry)] == []
