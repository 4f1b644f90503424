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
from mismatch.features.locate.judge import from_document
from mismatch.features.locate.results import Location
from mismatch.pipeline.document import schema
from tests.integration.conftest import Run

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


def test_a_sinkless_trainer_is_named_at_its_attention(no_sinks_run: Run, tmp_path: Path) -> None:
    code, output, run = located(no_sinks_run.directory, tmp_path)
    assert code == 1, output
    engine, trainer = sorted(location_of(run).sides, key=lambda side: side.role)
    assert engine.source is None
    assert trainer.source is not None
    assert (trainer.source.site, trainer.source.layers) == ("attention", (0, 1, 2, 3))
    assert trainer.source.explains > 0.9
    report = json.loads((run / "report.json").read_text())
    Draft202012Validator(schema()).validate(report)
    assert report["locate"] == document(run)
    assert 'id="locate' in (run / "report.html").read_text()


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
def test_the_transformers_engine_is_recorded_too(tiny_run: Path, tmp_path: Path) -> None:
    code, output, run = located(tiny_run, tmp_path, "--json")
    assert code == 0, output
    assert json.loads(output[output.index("{") :])["verdict"]["status"] == "none"
    names = {side.name for side in location_of(run).sides}
    assert names == {"transformers:prefill", "fsdp"}


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
