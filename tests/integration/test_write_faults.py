"""A sample of ``python -m benchmarks.write_faults``, and a fault of ours that it has to see."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
EVERY = 193  # of about 1,200 trials
SABOTAGED = """
import sys
from pathlib import Path
from mismatch.run import manifest
from tests.write_faults import run_scenario

def save(run_dir, known):
    document = {"schema": manifest.SCHEMA, "artefacts": known}
    (run_dir / manifest.NAME).write_text(manifest.json.dumps(document))

tried = []

def wanted(number, fault, operation):
    return (fault, operation) == ("kill", "write run/manifest.json") and not tried

def report(number, fault, operation, wrong):
    tried.append(number)
    print(wrong, flush=True)

manifest._save = save
run_scenario("check", Path(sys.argv[1]), wanted, report)
"""


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keeps the recording for both tests."""
    return tmp_path_factory.mktemp("faults")


@pytest.mark.grid
@pytest.mark.parametrize("scenario", ["check", "fixes"])
def test_a_write_that_fails_changes_no_number(folder, scenario):
    state = folder / f"{scenario}.jsonl"
    done = python(
        *("-m", "benchmarks.write_faults", "--scenario", scenario, "--every", EVERY),
        *("--state", state, "--place", folder),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = [json.loads(line) for line in state.read_text().splitlines()]
    assert len(trials) >= 5
    assert {trial["fault"] for trial in trials} >= {"ENOSPC", "EIO", "kill"}


@pytest.mark.grid
def test_a_manifest_that_is_written_in_place_is_seen(folder):
    done = python("-c", SABOTAGED, folder / "check")
    assert "manifest.json" in done.stdout, done.stdout + done.stderr
    assert "cannot be read" in done.stdout
