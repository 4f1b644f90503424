"""What a proof of a GPU has to hold, and what the documentation takes from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import gpu_page, site_pages

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "gpu-results.md"
TEMPLATE = ROOT / ".github" / "ISSUE_TEMPLATE" / "gpu-proof.yml"


def committed() -> dict[str, Any]:
    """Return the first committed proof, to be changed."""
    document: dict[str, Any] = json.loads(next(iter(gpu_page.PROOFS.glob("*.json"))).read_text())
    return document


def written(folder: Path, document: dict[str, Any], name: str = "proof.json") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def cells(text: str) -> list[list[str]]:
    """Return the cells of every row of a text's tables."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_committed_proof_is_one_of_its_card() -> None:
    found = gpu_page.proofs()
    assert found
    assert {proof.file for proof in found} == {path.name for path in gpu_page.PROOFS.iterdir()}


def test_the_page_holds_what_the_command_prints() -> None:
    done = subprocess.run(
        [sys.executable, "tools/gpu_page.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() in site_pages.filled(PAGE.read_text("utf-8"))
    rows = cells(done.stdout)
    for proof in gpu_page.proofs():
        for name, step in proof.steps.items():
            row = next(row for row in rows if row[:2] == [name, step["title"]])
            assert row[3].startswith(step["state"])
            assert float(row[5]) == round(step["seconds"])
            sampled = step["numbers"]["timings"]["engine"]["sampled"]
            assert any(r[0] == name and r[2] == f"{sampled:.0f}" for r in rows)


def changed(**steps: Any) -> dict[str, Any]:
    return committed()["steps"]["A"] | steps


@pytest.mark.parametrize(
    "fault",
    [
        {"schema": "mismatch.gpu-proof/0"},
        {"rehearsal": True},
        {"machine": {"gpus": []}},
        {"date": "yesterday"},
        {"commit": ""},
        {"steps": {}},
        {"steps": {"Z": changed()}},
        {"steps": {"A": changed(state="fine")}},
        {"steps": {"A": changed(state="passed", numbers={"verdict": "tolerable"})}},
        {"steps": {"F": changed(state="left out", reason="")}},
        {"steps": {"A": changed(command="mismatch check --model /home/someone/model")}},
        {"steps": {"A": "passed"}},
    ],
    ids=lambda fault: "-".join(fault),
)
def test_what_is_no_proof_is_refused(fault: dict[str, Any], tmp_path: Path) -> None:
    gpu_page.read(written(tmp_path, committed()))
    with pytest.raises(gpu_page.Unfit):
        gpu_page.read(written(tmp_path, committed() | fault))


def test_no_json_is_no_proof(tmp_path: Path) -> None:
    (tmp_path / "proof.json").write_text("{")
    with pytest.raises(gpu_page.Unfit):
        gpu_page.read(tmp_path / "proof.json")


def test_the_constraints_are_those_of_the_newest_run_that_was_healthy(tmp_path: Path) -> None:
    first = committed()
    passed = changed(state="passed", numbers={"verdict": "healthy"})

    def proof(date: str, card: str, version: str, step: dict[str, Any]) -> dict[str, Any]:
        packages = {"torch": version, "mismatch": "0.1.0", "Accelerate": "1.0"}
        gpus = [{"name": card, "mib": 81559}]
        machine = first["machine"] | {"gpus": gpus, "packages": packages}
        return first | {"date": date, "machine": machine, "steps": {"A": step}}

    folder = tmp_path / "proofs"
    folder.mkdir()
    gpu_page.take_in(written(tmp_path / "sent", first), folder)
    assert gpu_page.constraints(folder) == ""  # it says no packages
    for document in (
        proof("2027-01-02", "NVIDIA H200", "2.13", passed),
        proof("2027-02-03", "NVIDIA L40S", "2.14", passed),
        proof("2027-03-04", "NVIDIA A100-SXM4-80GB", "2.15", changed(state="unfinished")),
    ):
        gpu_page.take_in(written(tmp_path / "sent", document), folder)
    lines = gpu_page.constraints(folder).splitlines()
    assert lines[0].startswith("#")
    assert lines[1:] == ["Accelerate==1.0", "torch==2.14"]


def test_a_sent_proof_takes_the_place_of_the_one_of_its_card(tmp_path: Path) -> None:
    folder, sent = tmp_path / "proofs", tmp_path / "sent"
    folder.mkdir()
    first, later = committed(), committed() | {"date": "2027-01-02"}
    other = committed()
    other["machine"]["gpus"] = [{"name": "NVIDIA L40S", "mib": 46068}] * 2
    for document in (first, other, later):
        gpu_page.take_in(written(sent, document), folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{first['date']}-2xl40s-48gb.json", "2027-01-02-h100-80gb.json"]
    assert [proof.card for proof in gpu_page.proofs(folder)] == ["2xL40S-48GB", "H100-80GB"]
    written(folder, first, f"{first['date']}-h100-80gb.json")
    with pytest.raises(gpu_page.Unfit):
        gpu_page.proofs(folder)


def test_the_tables_hold_what_a_finished_step_measured(tmp_path: Path) -> None:
    document = committed()
    step = document["steps"]["A"]
    step |= {"state": "passed", "exit_code": 0}
    step["numbers"] |= {
        "verdict": "healthy",
        "excess": {"engine": [1.01, 0.9, 1.125], "trainer": None},
        "gaps": {"vllm:fp32 / reference:fp32": [3.5e-7, 2e-7, 4e-7, 8e-8]},
        "headline": {"k3_kl": [0.25, 0.125, 0.5]},
        "noise": {"fsdp / fsdp:grad": {"clip_fraction": [0.0625, 0.03125, 0.09375]}},
        "peak_bytes": {"fsdp": 3 << 30},
    }
    step["numbers"]["timings"] |= {"float32-engine": {"ready": 77.0}, "train": {"fsdp": 8.0}}
    folder = tmp_path / "proofs"
    folder.mkdir()
    gpu_page.take_in(written(tmp_path, document), folder)
    rows = cells(gpu_page.tables(folder))
    assert rows[2][3:5] == ["passed", "healthy"]
    measured = {row[1]: row[2:] for row in rows if row[0] == "A"}
    planned = step["plan"]
    seconds = planned["seconds"]
    stood = seconds["vllm in float32: start"] + seconds["vllm in float32: weights"]
    peak = planned["bytes"]["fsdp"][0] / 2**30
    expected = {
        "excess, engine": ["1.01 [0.9, 1.12]", "–"],
        "float32 gap, vllm:fp32 / reference:fp32, nats": ["3.5e-07", "–"],
        "k3_kl, headline": ["0.25 [0.125, 0.5]", "–"],
        "clip_fraction, fsdp / fsdp:grad": ["0.0625 [0.0312, 0.0938]", "–"],
        "vllm in float32 until it stood, seconds": ["77", f"{stood:.0f}"],
        "fsdp, seconds": ["8", f"{seconds['fsdp']:.0f}"],
        "fsdp, peak GiB": ["3.0", f"{peak:.1f}"],
    }
    assert {name: measured.get(name) for name in expected} == expected
    assert "excess, trainer" not in measured


def test_the_issue_template_asks_for_the_proof() -> None:
    form = yaml.safe_load(TEMPLATE.read_text("utf-8"))
    proof = next(field for field in form["body"] if field.get("id") == "proof")
    assert proof["validations"]["required"] is True
    assert proof["attributes"]["render"] == "json"
