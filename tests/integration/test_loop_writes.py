"""Each write of a loop failed once: what is resumed has the curve of a run left alone.

Both sides run in this process, in turns, with a real engine (transformers) and a real FSDP2 world
of a model of some thousand parameters, so that a run takes a second. Writes are counted by the
hooks of tests/write_hooks.py: opening, rename, new directory, write and fsync.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch.engines.registry import engine_class
from mismatch.errors import MismatchError, named_line
from mismatch.features.loop import arms as pipeline
from mismatch.features.loop import engine_side as loop_engine
from mismatch.features.loop import history
from mismatch.features.loop import trainer_side as loop_trainer
from mismatch.features.loop.arms import resume_from
from mismatch.features.loop.optimiser import PolicyOptimiser
from mismatch.features.loop.spec import Asked, LoopSpec
from mismatch.processes.workers.sampling import ready_for
from mismatch.run.store import read_json
from mismatch.specs import CheckSpec, EngineSpec, PromptSpec, RolloutSpec, Sampling, TrainSpec
from mismatch.training.distributed import World
from mismatch.training.load import load
from tests.checkpoints import make
from tests.integration.test_loop import Silent, numbers
from tests.write_hooks import HOOKS

pytestmark = [pytest.mark.slow, pytest.mark.grid]
STEPS = 3
EVERY = 23  # all of them take a quarter of an hour


def reward(text: str, answer: object) -> float:
    return float(len(text) % 7)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> LoopSpec:
    folder = tmp_path_factory.mktemp("models")
    model, prompts = str(make("gpt_oss", folder / "gpt_oss")), folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt_token_ids": [1, {n}, 9]}}\n' for n in (5, 6, 7)))
    rollout = RolloutSpec(
        engine=EngineSpec("transformers", model, routing=False, prefill=False),
        prompts=PromptSpec(path=str(prompts), num_prompts=3),
        sampling=Sampling(max_tokens=4, samples_per_prompt=3),
        exact_kl=0,
    )
    train = TrainSpec(model, dtype="fp32", master_dtype="fp32", routing=False)
    check = CheckSpec(rollout, train, nproc_per_node=1, noise_floor=False)
    given = {"prompts": 2, "perfectible": False, "checkpoint_every": 1, "learning_rate": 1e-2}
    own = f"{__name__}:reward"
    return LoopSpec(check, steps=STEPS, reward=own, **given)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def in_turns(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Have ``run_arm`` play both sides here."""
    ready: list[Any] = []

    def run_arm(arm: Path, loop: LoopSpec, pool: Path, *_: object) -> list[history.Row]:
        start = resume_from(arm)
        spec = loop.check.rollout
        ready[:] = ready or [ready_for(spec)]
        kind = engine_class("transformers")
        torch.manual_seed(loop.seed)
        try:
            with kind(spec.engine, spec.sampling, 256) as engine:
                left = loop_engine.EngineSide(arm, loop, engine, ready[0], ["load"])
                left.choose_pool(pool)
                loaded = load(loop.check.train, world.mesh, world.device)
                right = loop_trainer.TrainerSide(world, loaded, loop, arm, start)
                for step in range(start, loop.steps):
                    left.step(step)
                    right.step(step)
        except OSError as error:  # as workers leave it for the parent
            raise MismatchError(named_line(error)) from error
        return history.rows_of(arm)

    monkeypatch.setattr(pipeline, "run_arm", run_arm)
    HOOKS.install()


def run(asked: LoopSpec, folder: Path) -> None:
    wanted = Asked(asked, ("as-is",), (0,))
    pipeline.run_loop(wanted, folder, Silent(), "test")


def curves(root: Path) -> list[list[float | None]]:
    """Of the rows, and of the report that was written from them."""
    folder = root / "as-is" / "seed-0"
    rows = history.rows_of(folder)
    (arm,) = read_json(root / "loop.json")["arms"]
    assert arm["runs"][0]["curves"]["loss"] == [row["loss"] for row in rows]
    assert arm["runs"][0]["stopped"] == ""
    assert not [*root.rglob("*.partial")]
    return numbers(rows)


def test_each_write_failed_once(asked: LoopSpec, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    straight = tmp_path / "straight"
    straight.mkdir()
    HOOKS.root, HOOKS.count = str(tmp_path), 0
    HOOKS.at = lambda what, name: seen.append((what, name))  # type: ignore[assignment]
    try:
        run(asked, straight)
    finally:
        HOOKS.at = None
    expected = curves(straight)
    assert len(expected) == STEPS
    assert any(row[3] for row in expected)  # a loss
    assert len(seen) > 100
    ended = 0
    for number in range(1, len(seen) + 1, EVERY):
        folder = tmp_path / str(number)
        folder.mkdir()
        HOOKS.count = 0

        def full(what: str, name: str, at: int = number) -> None:
            if HOOKS.count == at:
                raise OSError(errno.ENOSPC, "No space left on device", name)

        HOOKS.at = full  # type: ignore[assignment]
        try:
            with contextlib.suppress(MismatchError, OSError):
                run(asked, folder)
                ended -= 1  # a write that nothing needs
            ended += 1
        finally:
            HOOKS.at = None
        run(asked, folder)
        assert curves(folder) == expected, seen[number - 1]
    assert ended > 0.7 * len(range(1, len(seen) + 1, EVERY))


def test_a_loss_that_is_not_finite_stops_its_arm_and_the_others_go_on(
    asked: LoopSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = PolicyOptimiser.step
    taken: list[int] = []

    def diverges(self: PolicyOptimiser, *given: Any) -> Any:
        taken.append(1)
        return None if len(taken) == asked.mini_batches + 1 else step(self, *given)

    monkeypatch.setattr(PolicyOptimiser, "step", diverges)
    wanted = Asked(asked, ("as-is", "on-policy-ratio"), (0,))
    with pytest.raises(MismatchError, match=r"1, mini-batch 0.*finite"):
        pipeline.run_loop(wanted, tmp_path, Silent(), "test")
    first, other = (arm["runs"][0] for arm in read_json(tmp_path / "loop.json")["arms"])
    assert "step 1" in first["stopped"]
    assert first["curves"]["step"] == [0.0]
    assert len(other["curves"]["step"]) == STEPS
    assert other["stopped"] == ""
