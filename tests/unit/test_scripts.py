"""Every script of benchmarks/ and tools/ can be imported, and answers --help without any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAIN = 'if __name__ == "__main__":\n'
WORKERS = {"locate_planted"}  # started by another script, with a job in a file
CHILD = """
import contextlib, importlib, io, json, runpy, sys, traceback
from pathlib import Path

asked, wrong = json.loads(sys.argv[1]), {}
for name in asked["modules"]:
    try:
        importlib.import_module(name)
    except BaseException:
        wrong[name] = traceback.format_exc()
path = list(sys.path)
for script in asked["scripts"]:
    sys.argv, sys.path[:] = [script, "--help"], [str(Path(script).parent), *path[1:]]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
        wrong[script] = "it ran"
    except SystemExit as end:
        if end.code or not said.getvalue().startswith("usage: "):
            wrong[script] = f"exit {end.code}: {said.getvalue()}"
    except BaseException:
        wrong[script] = traceback.format_exc()
print(json.dumps(wrong))
"""


def files_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_a_script_reads_its_command_line_before_it_works(folder: str) -> None:
    """Otherwise --help, or a flag that is misspelt, starts what takes an hour."""
    texts = {path.stem: path.read_text("utf-8") for path in files_of(folder)}
    scripts = {name: text for name, text in texts.items() if MAIN in text}
    assert len(scripts) > 10
    deaf = {name for name, text in scripts.items() if "ArgumentParser(" not in text}
    assert deaf <= WORKERS


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_scripts_are_imported_and_answer_help(folder: str) -> None:
    """In one process: what they import of the package is read once."""
    asked = {
        "modules": [f"{folder}.{path.stem}" for path in files_of(folder)],
        "scripts": [
            str(path)
            for path in files_of(folder)
            if MAIN in (text := path.read_text("utf-8")) and "ArgumentParser(" in text
        ],
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(asked)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
