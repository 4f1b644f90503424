"""What stands around a GPU, played by an nvidia-smi of ours: TF32, drivers, memory given back."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch.cli import session
from mismatch.doctor.fit import Fit
from mismatch.doctor.memory import Prediction
from mismatch.doctor.plan import Memory
from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import training_passes
from mismatch.models import EMBEDDED
from mismatch.pipeline.build import without_room
from mismatch.processes import stages
from mismatch.run import machine
from mismatch.run.messages import pass_label, write_error
from mismatch.specs import CheckSpec, TrainSpec
from mismatch.training.distributed import require_usable_gpus

MIB = 1 << 20
H100 = "GPU-1, NVIDIA H100 80GB HBM3, 81559, 580.1, Disabled"  # behind its index
Smi = Callable[[str], None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Smi]:
    """Put a shell script in the place of nvidia-smi."""

    def write(script: str) -> None:
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        machine.cards.cache_clear()

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield write
    machine.cards.cache_clear()


@pytest.mark.slow
def test_float32_is_float32_whatever_the_container_sets() -> None:
    script = """
import torch
assert torch.get_float32_matmul_precision() == "high"  # or there is nothing to pin
from mismatch.training.distributed import World
World.start()
assert torch.get_float32_matmul_precision() == "highest"
assert not torch.backends.cuda.matmul.allow_tf32
assert not torch.backends.cudnn.allow_tf32
"""
    env = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_gpus_that_torch_cannot_use_are_no_reason_to_take_the_cpu(
    smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for another driver, and a build for CPUs, which a newer driver would not help."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("not applicable: torch can use the GPUs here")
    smi(f"echo '0, {H100}'; echo '1, {H100}'")
    for built, driver in (("13.0", True), (None, False)):
        monkeypatch.setattr(torch.version, "cuda", built)
        with pytest.raises(MismatchError, match="lists 2 GPUs") as caught:
            require_usable_gpus()
        assert ("580" in caught.value.fix) == driver
        assert ("CPU build" in caught.value.message) != driver
    smi("exit 9")
    require_usable_gpus()


def test_a_cpu_that_is_asked_for_is_taken(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(f"echo '0, {H100}'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    require_usable_gpus()


def test_the_trainer_waits_until_the_engines_memory_is_free(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "FREE_POLL_S", 0.01)
    asked = tmp_path / "asked"
    listed = f"case $1 in *index*) echo '0, {H100}'; exit;; esac"
    free = "echo 'GPU-1,80000' || echo 'GPU-1,9000'"
    smi(f"{listed}; echo x >> {asked}; [ $(wc -l < {asked}) -ge 4 ] && {free}")
    assert stages.still_held([80000 * MIB], timeout_s=20) == 0
    assert len(asked.read_text().split()) >= 4
    smi(f"{listed}; echo 'GPU-1,9000'")
    assert stages.still_held([80000 * MIB], timeout_s=0.1) == 71000 * MIB
    assert stages.still_held([]) == 0  # no GPU


def test_a_pass_without_room_is_not_tested_and_says_why(tmp_path: Path) -> None:
    spec = CheckSpec(train=TrainSpec(model="m"))
    names = {pass_.name for pass_ in training_passes(spec)}
    write_error(tmp_path, pass_label("reference:fp32"), MismatchError("50 GiB needed", "--offload"))
    given = names - {"reference:fp32", "fsdp:grad"}
    found = {entry.what: entry for entry in without_room(tmp_path, spec, given)}
    assert found.keys() == {"reference:fp32", "fsdp:grad"}  # nobody says why of the second
    routed = replace(spec, train=TrainSpec(model=str(EMBEDDED["tiny-gpt-oss"])), two_passes=True)
    made = {pass_.name for pass_ in training_passes(routed)}
    replayed = {"fsdp:new-replayed", "fsdp:replayed"}
    assert replayed & made  # where no routes came, the report says so of the routes
    assert replayed.isdisjoint(
        each.what for each in without_room(tmp_path, routed, made - replayed)
    )
    missing = found["reference:fp32"]
    assert (missing.what, missing.reason, missing.how) == (
        "reference:fp32", "50 GiB needed", "--offload",
    )  # fmt: skip
    assert list(without_room(tmp_path, spec, names)) == []  # an earlier attempt's reason


def test_what_cannot_fit_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(side: str) -> Fit:
        return Fit(side, Prediction({"then": {}}), 2, 1, "does not fit", "too large", certain=True)

    own, reference = lost("fsdp"), lost("reference:fp32")
    monkeypatch.setattr(session, "memory_of", lambda spec: Memory((own, reference)))
    monkeypatch.setattr(session, "cheaper", lambda spec, memory: "--offload")
    with pytest.raises(MismatchError, match="fsdp: too large") as caught:
        session.room_for(CheckSpec(), force=False)
    assert {"--offload;", "--force"} <= set(caught.value.fix.split())
    assert session.room_for(CheckSpec(), force=True).left_out == {}
    (line,) = capsys.readouterr().out.splitlines()  # the same of two passes is said once
    assert line.count("too large") == 1
    assert {fit.side for fit in (own, reference) if fit.side in line} == {own.side, reference.side}
    monkeypatch.setattr(session, "memory_of", lambda spec: Memory((reference,)))
    left_out = session.room_for(CheckSpec(), force=False).left_out
    assert left_out == {"reference:fp32": "reference:fp32: too large"}


def test_experiments_of_a_quick_check_have_the_memory_of_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Memory(float32_split=2, float32_offload=18)
    monkeypatch.setattr(session, "memory_of", lambda spec: Memory() if spec.quick else whole)
    quick = CheckSpec(quick=True)
    assert session.room_for(quick, force=False).float32_offload == 0
    room = session.room_for(replace(quick, explain=True), force=False)
    assert (room.float32_split, room.float32_offload) == (2, 18)


def test_the_environment_for_gpus_has_what_that_for_cpus_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    make_env = runpy.run_path("tools/make_env.py")
    install = make_env["install_cuda"]
    monkeypatch.setitem(install.__globals__, "pip", lambda python, *args: asked.extend(args))
    proven = tmp_path / "cuda.txt"
    monkeypatch.setitem(install.__globals__, "CUDA", proven)
    install(Path("python"))
    assert "-c" not in asked
    proven.touch()
    install(Path("python"))
    assert asked[asked.index("-c") + 1] == str(proven)
    extras = asked[-1].partition("[")[2].rstrip("]").split(",")
    assert {"vllm", "datasets", "dev"} <= set(extras)


def test_the_transformers_engine_dequantises_mxfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package kernels it would run a kernel of the hub, whose routes are not seen."""
    import transformers

    from mismatch.engines.transformers.engine import TransformersEngine
    from mismatch.specs import EngineSpec
    from mismatch.types import Sampling
    from tests.checkpoints import make_mxfp4

    model = make_mxfp4(tmp_path / "released", tmp_path / "plain")
    given: dict[str, object] = {}

    def stop(*_: object, **options: object) -> None:
        given.update(options)
        raise ValueError("enough")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", stop)
    spec = EngineSpec("transformers", str(model))
    with pytest.raises(MismatchError, match="enough"):
        TransformersEngine(spec, Sampling(), 64).__enter__()
    assert given["quantization_config"].dequantize is True  # type: ignore[attr-defined]
