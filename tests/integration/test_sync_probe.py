"""Faults of a weight sync in real engines, each named; right paths pass; the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mismatch.codec import from_json
from mismatch.features.sync.judge import judge, kept_caches, parted
from mismatch.features.sync.report import SyncReport
from mismatch.processes.launch import interpreter_environment, own_python
from mismatch.specs import EngineSpec
from tests.contract.conftest import MAKE, installed
from tests.shared import once
from tests.texts import numbers

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def probed(tmp_path_factory: pytest.TempPathFactory, module: str, *more: str) -> Path:
    def make(folder: Path) -> None:
        python = own_python(EngineSpec(engine=more[0])) if more else None
        command = [python or sys.executable, "-m", f"tests.{module}", str(folder), *more]
        env = os.environ | interpreter_environment(python)
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env=env
        )
        assert done.returncode == 0, done.stderr[-3000:]

    return once(tmp_path_factory, "-".join((module.replace("_", "-"), *more)), make)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One engine for all of them."""
    return probed(tmp_path_factory, "sync_scenarios", "vllm")


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.grid)])
def of_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of every engine that is installed."""
    if not installed(request.param):
        pytest.skip(f"engine: {MAKE.get(request.param, 'make env')}")
    return probed(tmp_path_factory, "sync_scenarios", request.param)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another, with room for a LoRA adapter."""
    return probed(tmp_path_factory, "adapter_scenarios")


def report_of(path: Path) -> SyncReport:
    document: dict[str, Any] = json.loads(path.read_text())
    del document["schema"], document["verdict"]
    return from_json(SyncReport, document)


def statuses(report: SyncReport) -> dict[str, str]:
    return {p.name: p.status for p in report.faults}


@pytest.mark.grid
def test_every_parameter_arrives_where_it_is_written_into_the_kernels(of_engine: Path) -> None:
    report = report_of(of_engine / "clean.json")
    assert judge(report).status == "healthy"
    assert len(report.of_status("arrived")) == 71
    assert all(row.differ == 0 for row in report.caches)


def test_the_library_call_reads_a_real_engine(of_engine: Path) -> None:
    report = report_of(of_engine / "library.json")
    assert judge(report).status == "healthy"
    assert len(report.of_status("arrived")) == 71


def test_vllms_own_reload_leaves_experts_and_sinks_stale(scenarios: Path) -> None:
    """On a CPU, without an error; the way back to the first weights hides it."""
    report = report_of(scenarios / "reload.json")
    kinds = {p.name.partition("layers.")[2].partition(".")[2] for p in report.faults}
    assert kinds == {
        "self_attn.sinks",
        *(f"mlp.experts.{part}{kind}" for part in ("gate_up_proj", "down_proj")
          for kind in ("", "_bias")),
    }  # fmt: skip
    assert set(statuses(report).values()) == {"stale"}
    assert all(p.outcomes[2].status == "arrived" for p in report.faults)
    assert len(report.faults) == 20


@pytest.mark.grid
def test_sglangs_update_from_files_brings_every_parameter_and_drops_its_cache(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if not installed("sglang"):
        pytest.skip(f"engine: {MAKE['sglang']}")
    report = report_of(probed(tmp_path_factory, "sync_scenarios", "sglang") / "disk.json")
    assert judge(report).status == "healthy"
    assert len(report.of_status("arrived")) == 71
    assert all(row.differ == 0 for row in report.caches)


def test_a_cache_that_nobody_resets_answers_from_old_weights(of_engine: Path) -> None:
    report = report_of(of_engine / "kept-cache.json")
    assert not report.faults
    assert [row.push for row in kept_caches(report)] == [1, 2, 3]
    assert judge(report).status == "broken"


@pytest.mark.parametrize(
    ("fault", "name", "status"),
    [
        ("skip", "model.layers.1.self_attn.o_proj.weight", "stale"),
        ("exchange", "model.layers.2.mlp.experts.gate_up_proj", "partly"),
        ("transpose", "model.layers.0.mlp.experts.down_proj", "rearranged"),
        ("double", "model.layers.1.self_attn.o_proj.weight", "twice"),
    ],
)
def test_a_planted_fault_is_the_only_one_that_is_named(
    of_engine: Path, fault: str, name: str, status: str
) -> None:
    report = report_of(of_engine / f"{fault}.json")
    assert statuses(report) == {name: status}
    if fault == "exchange":
        (parameter,) = report.faults
        assert numbers(parameter.outcomes[0].parts["exchanged"][0]) == [1, 2]


def test_the_command_judges_a_plain_transformers_model(tmp_path: Path) -> None:
    flags = ["--engine", "transformers", "--out", str(tmp_path / "probe")]
    command = [sys.executable, "-m", "mismatch", "sync-probe", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) <= 24
    report = report_of(tmp_path / "probe" / "sync-probe.json")
    assert judge(report).line in done.stdout
    assert [row.apart for row in report.scores] == [0.0] * 4
    assert report.scores[1].engine_moved > 0.1
    assert not parted(report)
    assert (tmp_path / "probe" / "sync-probe.html").exists()


@pytest.mark.grid
def test_a_tied_head_is_left_behind_by_vllms_reload(tmp_path: Path) -> None:
    """Its packed copy is: nothing but the probe and the scores say so.

    In float32: without AVX-512 oneDNN has no bfloat16, and vLLM keeps no packed copy then.
    """
    from tests.checkpoints import make

    model = make("llama", tmp_path / "llama", head_dim=32, tie_word_embeddings=True)
    flags = ["--model", str(model), "--dtype", "fp32", "--out", str(tmp_path / "probe")]
    command = [sys.executable, "-m", "mismatch", "sync-probe", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    report = report_of(tmp_path / "probe" / "sync-probe.json")
    assert statuses(report) == {"lm_head.weight": "alias_lost"}
    assert parted(report)


@pytest.mark.grid
def test_adapters_arrive_and_move_both_sides_alike(adapters: Path) -> None:
    report = report_of(adapters / "clean.json")
    assert judge(report).status == "healthy"
    assert len(report.of_status("arrived")) == 28
    assert report.scores[1].engine_moved > 0.1
    assert report.scores[3].engine_moved == 0


@pytest.mark.grid
def test_a_cache_outlives_an_adapter_that_is_replaced_in_place(adapters: Path) -> None:
    """vLLM keys its cache by the adapter's name, which stays."""
    report = report_of(adapters / "kept-cache.json")
    assert not report.faults
    assert [row.push for row in kept_caches(report)] == [2]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("fault", "status", "names"),
    [
        ("not-loaded", "missing", ""),
        ("same-number", "stale", ""),
        ("halved", "scaled", "lora_B"),
        ("left-out", "missing", "layers.1.self_attn.o_proj."),
    ],
)
def test_a_fault_of_an_adapter_is_named(
    adapters: Path, fault: str, status: str, names: str
) -> None:
    report = report_of(adapters / f"{fault}.json")
    everything = {p.name for p in report.parameters}
    assert statuses(report) == {n: status for n in everything if names in n}
    if fault == "halved":
        assert report.faults[0].outcomes[0].factor == pytest.approx(0.5, rel=0.02)


@pytest.mark.grid
def test_experts_with_a_name_each_are_packed_for_their_kernel(tmp_path: Path) -> None:
    """vLLM's reload leaves them as loaded."""
    from tests.checkpoints import make

    model = make("qwen3_moe", tmp_path / "qwen3_moe", head_dim=32)
    flags = ["--model", str(model), "--path", "rpc", "--out", str(tmp_path / "probe")]
    command = [sys.executable, "-m", "mismatch", "sync-probe", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path / "probe" / "sync-probe.json")
    assert judge(report).status == "healthy"
    assert not report.of_status("not_compared")
