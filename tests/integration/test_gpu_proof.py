"""The proof on a GPU, rehearsed: the same steps with tiny models, real vLLM and no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_proof import SCHEMA, STEPS

ROOT = Path(__file__).parents[2]


def proved(out: Path, *flags: str) -> tuple[int, str, dict[str, Any]]:
    """Run the script; its exit code, what it printed, and its document."""
    command = [sys.executable, "benchmarks/gpu_proof.py", "--out", str(out), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    file = out / "proof.json"
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text("utf-8"))


@pytest.mark.grid
def test_the_steps_are_rehearsed_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "proof"
    code, told, proof = proved(out, "--rehearse", "--steps", "B", "D", "G")
    assert code == 0, told
    assert (proof["schema"], proof["rehearsal"]) == (SCHEMA, True)
    states = {name: step["state"] for name, step in proof["steps"].items()}
    assert states == {"B": "passed", "D": "left out", "G": "passed"}
    planted = proof["steps"]["B"]
    assert planted["numbers"]["verdict"] == "broken"
    assert planted["numbers"]["side"] == "trainer"
    assert planted["numbers"]["timings"]["engine"]["ready"] > 0
    assert {"engine", "fsdp:fp32"} <= planted["plan"]["bytes"].keys()
    assert str(tmp_path) not in planted["command"]  # it is sent to others
    with zipfile.ZipFile(out / "reports.zip") as archive:
        assert {"B/report.json", "B/logs/engine.log", "B.txt"} <= {*archive.namelist()}
    again = subprocess.run(
        [sys.executable, "benchmarks/gpu_proof.py", "--out", str(out), "--rehearse"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 1  # it would overwrite a proof
    assert "--resume" in again.stderr
    code, told, resumed = proved(out, "--rehearse", "--resume", "--steps", "B", "D", "G")
    assert code == 0
    assert resumed["steps"] == proof["steps"]


@pytest.mark.grid
def test_a_proof_that_fails_says_so(tmp_path: Path) -> None:
    """The expected result is planted away: the engine cannot start."""
    out = tmp_path / "proof"
    (out / "models" / "gpt-oss-2-layers").mkdir(parents=True)
    (out / "models" / "gpt-oss-2-layers" / "config.json").write_text("{}")
    code, told, proof = proved(out, "--rehearse", "--steps", "C")
    assert code == 1, told
    assert proof["steps"]["C"]["state"] == "failed"
    assert proof["steps"]["C"]["reason"]


def test_every_step_has_a_limit_within_the_proofs_minutes() -> None:
    assert all(30 < limit <= 540 for _, _, limit, _ in STEPS.values())
    assert sum(limit for _, _, limit, _ in STEPS.values()) < 40 * 60
