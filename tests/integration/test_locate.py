"""`mismatch locate` on real runs: a planted fault is the first source, clean runs have none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.planted_checkpoint import plant
from mismatch.cli import session
from mismatch.errors import MismatchError
from mismatch.features.locate.judge import from_document
from mismatch.features.locate.kinds import MODULE
from mismatch.features.locate.recording import locate_in
from mismatch.features.locate.results import Location
from mismatch.pipeline.document import schema
from mismatch.run.directory import load_spec
from tests.integration.conftest import Run, run_check

CHECK = (
    *("--num-prompts", "12", "--samples-per-prompt", "1"),
    *("--max-tokens", "24", "--exact-kl", "0", "--nproc-per-node", "1"),
)
FEW = ("--sequences", "3", "--max-sequence-tokens", "80")


def located(source: Path, folder: Path, *flags: str) -> tuple[int, str, Path]:
    """Exit code, output and directory of the command on a copy of a run."""
    run = folder / "run"
    if not run.exists():
        shutil.copytree(source, run)
    command = [sys.executable, "-m", "mismatch", "locate", str(run), *FEW, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr, run


def document(run: Path) -> Any:
    return json.loads((run / "locate.json").read_text())


def location_of(run: Path) -> Location:
    return from_document(document(run))


@pytest.mark.grid
def test_a_clean_run_on_vllm_has_no_source(default_run: Run, tmp_path: Path) -> None:
    code, output, run = located(default_run.directory, tmp_path)
    assert code == 0, output
    sides = {side.role: side for side in location_of(run).sides}
    assert sides.keys() == {"engine", "trainer"}
    assert all(side.groups == () for side in sides.values())
    assert all(side.held is not None and side.held < 1e-3 for side in sides.values()), output
    assert {effect.site for effect in sides["engine"].sites} == {
        effect.site for effect in sides["trainer"].sites
    }
    assert not (run / "locate").exists()  # what was recorded is gone


@pytest.mark.grid
def test_swapped_experts_are_named_with_their_layer_in_two_ranks(
    default_run: Run, tmp_path: Path
) -> None:
    """The run was recorded by one rank; vLLM's two hold half of the heads and experts each."""
    run = tmp_path / "run"
    shutil.copytree(default_run.directory, run)
    spec = json.loads((run / "spec.json").read_text())
    spec["train"]["model"] = str(
        plant(Path(spec["train"]["model"]), tmp_path / "planted", "swapped-experts", 1)
    )
    cores = sorted(os.sched_getaffinity(0))[:2]
    spec["rollout"]["engine"] |= {
        "tensor_parallel_size": len(cores),
        "env": [["VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores))]],  # one NUMA node
    }
    (run / "spec.json").write_text(json.dumps(spec))
    code, output, run = located(run, tmp_path, "--trust-run")
    assert code == 1, output
    engine, trainer = sorted(location_of(run).sides, key=lambda side: side.role)
    assert trainer.source is None  # the reference holds its weights
    assert engine.source is not None
    assert (engine.source.site, engine.source.layers) == ("mlp", (1,))
    assert {effect.location for effect in engine.sites} == {
        effect.location for effect in trainer.sites
    }


@pytest.mark.grid
def test_an_engine_that_shows_nothing_leaves_the_trainer(tiny_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    spec = json.loads((run / "spec.json").read_text())
    spec["rollout"]["engine"] |= {"engine": "vllm", "servers": ["http://127.0.0.1:9"]}
    (run / "spec.json").write_text(json.dumps(spec))
    code, output, run = located(run, tmp_path, "--trust-run")
    assert code == 0, output
    result = location_of(run)
    assert [side.role for side in result.sides] == ["trainer"]
    assert [reason.what.split()[-1] for reason in result.not_tested] == ["vllm"]


# ---------------------------------------------------------------- within a check


def evidence_of(run: Run) -> dict[str, Any]:
    """What speaks for the first cause of a run."""
    return {item["what"]: item["value"] for item in run.report["causes"]["ranked"][0]["evidence"]}


def test_a_check_whose_gap_fails_names_the_module_by_itself(tmp_path: Path) -> None:
    run = run_check(tmp_path / "run", *CHECK, "--attention", "no-sinks", locate=True)
    assert run.code == 1, run.output
    assert "implementation-gap-trainer" in run.failed
    engine, trainer = sorted(location_of(run.directory).sides, key=lambda side: side.role)
    assert (engine.dtype, engine.source, engine.kind) == ("fp32", None, None)
    assert trainer.source is not None
    assert (trainer.source.site, trainer.source.layers) == ("attention", (0, 1, 2, 3))
    assert (trainer.dtype, trainer.kind) == ("fp32", "function")
    assert trainer.source.explains > 0.9
    Draft202012Validator(schema()).validate(run.report)
    named = document(run.directory)
    assert run.report["locate"] == {name: named[name] for name in run.report["locate"]}
    assert all(side.held is not None and side.held < 1e-5 for side in (engine, trainer))
    first = run.report["causes"]["ranked"][0]
    assert (first["id"], first["side"]) == ("attention-sinks", "trainer")
    place = evidence_of(run)[MODULE]
    assert place.endswith("in fsdp")
    assert location_of(run.directory).reference == "tiny-gpt-oss"  # no path of this machine
    fixes = {check["id"]: check["fix"] for check in run.report["checks"]}
    assert place in fixes["implementation-gap-trainer"]
    assert place in " ".join(run.output.split())
    assert 'id="locate' in (run.directory / "report.html").read_text()


def test_a_check_in_which_nothing_fails_does_not_locate(default_run: Run) -> None:
    assert not (default_run.directory / "locate.json").exists()
    assert "locate" not in {entry["what"] for entry in default_run.report["not_tested"]}


@pytest.mark.grid
def test_weights_that_differ_are_named_with_their_module(tiny_run: Path, tmp_path: Path) -> None:
    model = Path(load_spec(tiny_run).train.model)
    planted = plant(model, tmp_path / "planted", "swapped-experts", 1)
    flags = (*CHECK, "--engine", "transformers", "--train-model", str(planted))
    run = run_check(tmp_path / "run", *flags, locate=True)
    assert run.code == 1, run.output
    engine, trainer = sorted(location_of(run.directory).sides, key=lambda side: side.role)
    assert trainer.source is None  # the reference holds its weights
    assert engine.source is not None
    assert (engine.source.site, engine.source.layers, engine.kind) == ("mlp", (1,), "weights")
    first = run.report["causes"]["ranked"][0]
    assert (first["id"], first["fact"], first["status"]) == ("experts-differ", True, "confirmed")
    assert MODULE in evidence_of(run)

    (run.directory / "locate.json").unlink()
    again = [sys.executable, "-m", "mismatch", "check", "--resume", str(run.directory)]
    assert subprocess.run([*again, "--no-locate"], capture_output=True, timeout=300).returncode == 1
    assert not (run.directory / "locate.json").exists()


def test_what_takes_too_long_is_ended(tiny_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    with pytest.raises(MismatchError, match="time limit"):
        locate_in(run, load_spec(run), session.narrator(silent=True), limit_s=1.0, both=True)
    assert not (run / "locate").exists()
    assert not (run / "locate.json").exists()
