"""Worlds of other launchers: one GPU a task under Slurm, a place per pod under Kubeflow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch.errors import MismatchError
from mismatch.pipeline import preflight
from mismatch.processes import launch
from mismatch.processes.launch import rendezvous_args
from mismatch.processes.launched import launched
from mismatch.run import machine
from mismatch.specs import TrainSpec
from mismatch.training import distributed

PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in PLACES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def on_gpus(patch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Play GPUs; return those that were taken."""
    taken: list[int] = []
    patch.setattr(distributed, "require_usable_gpus", lambda: None)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "set_device", taken.append)
    return taken


def test_a_task_that_sees_one_gpu_takes_it(places: pytest.MonkeyPatch) -> None:
    """srun --gpus-per-task=1: local rank 3, and one GPU, which is its own."""
    places.setenv("LOCAL_RANK", "3")
    taken = on_gpus(places, 1)
    assert distributed._device() == torch.device("cuda", 0)
    assert taken == [0]


def test_ranks_that_share_one_gpu_are_refused(places: pytest.MonkeyPatch) -> None:
    places.setenv("LOCAL_RANK", "3")
    on_gpus(places, 2)
    with pytest.raises(MismatchError):
        distributed._device()
    on_gpus(places, 1)
    places.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's ranks see all GPUs
    with pytest.raises(MismatchError):
        distributed._device()


def test_ranks_of_a_launcher_may_see_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "local_gpus", lambda: 1)
    spec = TrainSpec("tiny-gpt-oss")
    preflight.preflight_training(spec, 4, reach=False, meets=False)
    with pytest.raises(MismatchError):
        preflight.preflight_training(spec, 4, reach=False)


def test_places_of_pods_are_no_ranks(places: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "pod-0")):
        places.setenv(name, value)
    assert launched() is not None
    places.setenv("PET_NNODES", "2")
    with pytest.raises(MismatchError) as refused:
        launched()
    assert "PET_NNODES" in refused.value.message
    assert "torchrun" in refused.value.fix
    places.setenv("LOCAL_RANK", "0")  # torchrun was started in the pod
    assert launched() is not None


@pytest.mark.parametrize("port", [None, "29511"])
def test_a_world_of_ours_stays_in_its_pod(places: pytest.MonkeyPatch, port: str | None) -> None:
    """torchrun's parser takes its defaults from the environment."""
    from torch.distributed.run import parse_args

    for name, value in (("PET_NNODES", "2"), ("PET_NODE_RANK", "1")):
        places.setenv(name, value)
    if port:
        places.setenv("MASTER_PORT", port)
    read = parse_args([*rendezvous_args(), "--nproc-per-node", "2", "script.py"])
    assert (read.nnodes, read.node_rank, read.standalone) == ("1", 0, port is None)


def test_the_doctor_names_what_triton_compiles_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mismatch.doctor.machine import Gpu, Machine
    from mismatch.features.doctor import examine

    gpu = Gpu("H100", 80 << 30, 79 << 30, "580")
    one, none = (Machine(8, 1 << 36, 1 << 36, gpus) for gpus in ((gpu,), ()))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert [p.what.split()[-1] for p in examine._missing_compiler(one)] == ["compiler", "Python.h"]
    assert list(examine._missing_compiler(none)) == []
    (tmp_path / "Python.h").touch()
    (tmp_path / "cc").touch(0o755)
    assert list(examine._missing_compiler(one)) == []


@pytest.mark.parametrize(("gpus", "apart"), [(0, None), (1, False), (2, True)])
def test_a_probe_of_the_sync_has_the_placement_of_a_check(
    gpus: int, apart: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides at once where there is none or one each, else the trainer after the engine."""
    from mismatch.features.sync import processes
    from mismatch.features.sync.report import SyncSpec
    from mismatch.specs import EngineSpec

    cards = tuple(machine.Card(str(n), f"GPU-{n}", "H100", "81559") for n in range(gpus))
    monkeypatch.setattr(machine, "visible_cards", lambda: cards)
    monkeypatch.setattr(processes.np, "load", lambda path: [])
    monkeypatch.setattr(processes, "score_rows", lambda own, other: ())
    monkeypatch.setattr(processes, "read_json", lambda path: {})
    monkeypatch.setattr(
        processes, "from_json", lambda kind, data: type("R", (), {"not_tested": ()})()
    )
    monkeypatch.setattr(processes, "replace", lambda report, **changes: report)

    def start(label: str, command: list[str], *where: Any, **more: Any) -> Any:
        name = label.removeprefix("sync-")
        code = f"""
import os, pathlib, time
place = pathlib.Path({str(tmp_path)!r})
(place / "began-{name}").touch()
if {apart is not False} and {name!r} == "engine":
    while not (place / "began-trainer").exists():  # it would wait for ever
        time.sleep(0.02)
time.sleep(0.3)
ended = (place / "engine").exists()
(place / {name!r}).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + f" {{ended}}")
"""
        return launch.started(label, [sys.executable, "-c", code], *where, **more)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(processes, "started", start)
    processes.run_probe(tmp_path, SyncSpec(EngineSpec()), lambda line: None)
    engine, _ = (tmp_path / "engine").read_text().split()
    trainer, after = (tmp_path / "trainer").read_text().split()
    assert (engine, trainer) == (("1", "0") if apart else ("all", "all"))
    if apart is False:
        assert after == "True"


@pytest.mark.slow
def test_a_plan_of_a_sync_counts_what_a_push_can_change() -> None:
    command = [sys.executable, "-m", "mismatch", "sync-probe", "--model", "gpt-oss-20b"]
    done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("numbers"))
    pushed, packed = (int(word.replace(",", "")) for word in line.split() if word[0].isdigit())
    assert (pushed, packed) == (1_804_459_584, 19_110_297_600)
    assert "--weights engine=bf16" in line
