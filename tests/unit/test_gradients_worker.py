"""Gradients in a training world: what is there is kept, what fails says why, the others go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mismatch.errors import MismatchError
from mismatch.experiments.gradients.files import (
    BATCH,
    failure_label,
    gradients_file,
    is_finished,
    load_batch,
    load_gradients,
    save_batch,
)
from mismatch.experiments.gradients.planning import GradientPlan, Planned
from mismatch.experiments.gradients.types import Trainer
from mismatch.processes.stages import Stages
from mismatch.processes.workers.gradient_check import take_gradients
from mismatch.processes.workers.train import _Passes
from mismatch.run import store
from mismatch.run.directory import Journal
from mismatch.run.messages import SCORED, error_path, read_error, write_error
from mismatch.specs import CheckSpec, TrainSpec
from mismatch.training import gradients
from mismatch.training.distributed import World
from tests.checkpoints import make, rollout

ROLLOUT = rollout(((3, 6), (3, 9), (4, 5), (4, 8)))
TRAINER = Trainer("fsdp", "baseline", "baseline", "as it is")
REFERENCE = Trainer("reference:fp32", "reference", "reference", "float32")
FIX = Trainer("fix:head", "head", "fix", "another head")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World.start()
    yield world
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make("llama", tmp_path_factory.mktemp("llama")))


def fill(run_dir: Path) -> Path:
    store.save_rollout(run_dir, ROLLOUT)
    return run_dir


def plan_of(model: str, **fields: Any) -> GradientPlan:
    base = TrainSpec(model, grad=True, routing=False)
    high = replace(base, dtype="fp32")
    passes = (
        Planned(REFERENCE, high),
        Planned(TRAINER, base),
        Planned(FIX, replace(base, **{"head_dtype": "fp32", **fields})),
    )
    return GradientPlan(passes, 16, 0)


def run(world: World, run_dir: Path, plan: GradientPlan, **job: Any) -> None:
    take_gradients(_Passes(world, {"run_dir": str(run_dir), **job}), plan)


def times(run_dir: Path) -> dict[str, int]:
    files = (run_dir / "gradients").glob("*.safetensors")
    return {file.name: file.stat().st_mtime_ns for file in files}


@pytest.fixture(scope="module")
def done(world: World, model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = fill(tmp_path_factory.mktemp("done"))
    run(world, run_dir, plan_of(model))
    return run_dir


@pytest.mark.slow
def test_every_pass_has_its_gradient(done: Path, model: str) -> None:
    gradients = {g.name: g for g in load_gradients(done)}
    assert set(gradients) == {"reference:fp32", "fsdp", "fix:head"}
    assert gradients["fsdp"].squared_norm_reference == pytest.approx(
        gradients["reference:fp32"].squared_norm, rel=1e-6
    )
    assert is_finished(done, plan_of(model).made_by)


@pytest.mark.slow
def test_what_is_there_is_not_taken_again(done: Path, world: World, model: str) -> None:
    before = times(done)
    run(world, done, plan_of(model))
    assert times(done) == before
    (done / gradients_file("fsdp")).unlink()
    run(world, done, plan_of(model))
    # The reference is taken again too: the others' dot with it needs all of it.
    changed = {name for name, when in times(done).items() if before[name] != when}
    again = ("reference:fp32", "fsdp")
    assert changed == {Path(gradients_file(name)).name for name in again}


def test_a_gradient_of_another_batch_is_not_read(done: Path, model: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(done, copy)
    work = json.loads((copy / BATCH).read_text())["work"]
    entry = next(item for item in work if item["name"] == "fix:head")
    batch = load_batch(copy)
    assert batch is not None
    changed = [item if item is not entry else entry | {"made_by": "another"} for item in work]
    made_by = plan_of(model).made_by
    save_batch(copy, batch, changed, made_by, (store.ROLLOUT,), finished=True)
    assert {g.name for g in load_gradients(copy)} == {"reference:fp32", "fsdp"}
    assert not is_finished(copy, made_by)


def test_a_damaged_gradient_is_refused(done: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(done, copy)
    file = copy / gradients_file("fsdp")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(MismatchError, match="truncated"):
        load_gradients(copy)


@pytest.mark.slow
def test_a_pass_that_fails_says_why_and_the_others_go_on(
    world: World, model: str, tmp_path: Path
) -> None:
    plan = plan_of(model, attention="no-sinks")
    fill(tmp_path)
    run(world, tmp_path, plan)
    batch = load_batch(tmp_path)
    assert batch is not None
    assert set(batch.failed) == {"fix:head"}
    assert "attention sinks" in batch.failed["fix:head"]
    assert {g.name for g in load_gradients(tmp_path)} == {"reference:fp32", "fsdp"}
    assert not is_finished(tmp_path, plan.made_by)


def test_without_room_for_the_reference_nothing_is_taken(
    world: World, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = MismatchError("gradients need 9.0 GiB more", "use more GPUs")

    def refuse(*given: Any) -> None:
        raise refusal

    monkeypatch.setattr(gradients, "require_memory", refuse)
    fill(tmp_path)
    passes = _Passes(world, {"run_dir": str(tmp_path)})
    take_gradients(passes, plan_of(model))
    assert passes.loaded is None  # nothing goes on with the model of a pass that failed half way
    batch = load_batch(tmp_path)
    assert batch is not None
    assert batch.failed["gradients"].endswith(f": {refusal.message} ({refusal.fix})")
    assert load_gradients(tmp_path) == []


@pytest.mark.slow
def test_fixes_stop_where_the_budget_is_used_up(world: World, model: str, tmp_path: Path) -> None:
    fill(tmp_path)
    passes = _Passes(world, {"run_dir": str(tmp_path), "optional_s": 1.0})
    passes.seconds.append(2.0)
    take_gradients(passes, plan_of(model))
    batch = load_batch(tmp_path)
    assert batch is not None
    assert list(batch.failed) == ["fix:head"]
    assert "budget" in batch.failed["fix:head"]


# ---------------------------------------------------------------- the parent


class Quiet:
    """A narrator that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Lost:
    """A training world that ended in its gradients, or before."""

    label = "train"

    def __init__(self, timings: dict[str, float]) -> None:
        self.timings = timings


@pytest.mark.parametrize("scored", [True, False])
def test_a_world_that_dies_in_its_gradients_leaves_the_scorings(
    tmp_path: Path, model: str, scored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrator: Any = Quiet()
    journal = Journal(tmp_path, "check", CheckSpec(), "mismatch check")
    stages = Stages(CheckSpec(), tmp_path, narrator, journal, plan_of(model))

    headline = "the train process was ended by signal 9"

    def killed(*given: Any) -> None:
        raise MismatchError(f"{headline}\n  log", "less")

    monkeypatch.setattr(stages, "wait", killed)
    worker: Any = Lost({SCORED: 3.0} if scored else {})
    if not scored:
        with pytest.raises(MismatchError):
            stages._score(worker, 1, stages.gradients)
        return
    stages._score(worker, 1, stages.gradients)
    error = read_error(tmp_path, failure_label("gradients"))
    assert error is not None
    assert error.message == headline
    assert narrator.notes == [f"gradients failed: {headline}"]
    # The next attempt forgets it.
    assert stages._gradients_to_take([]) is stages.gradients
    assert not error_path(tmp_path, failure_label("gradients")).exists()


def test_finished_gradients_need_no_world(done: Path, model: str) -> None:
    journal = Journal(done, "check", CheckSpec(), "mismatch check")
    narrator: Any = Quiet()
    plan = plan_of(model)
    # The disk was full when they were there already: what is resumed has lost nothing.
    write_error(done, failure_label("gradients"), MismatchError("cannot write run.json", "space"))
    assert Stages(CheckSpec(), done, narrator, journal, plan)._gradients_to_take([]) is None
    assert read_error(done, failure_label("gradients")) is None
    more = replace(plan, prompts=1)
    assert Stages(CheckSpec(), done, narrator, journal, more)._gradients_to_take([]) is more
    assert Stages(CheckSpec(), done, narrator, journal)._gradients_to_take([]) is None
