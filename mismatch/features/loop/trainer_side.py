"""The trainer of the loop: ``torchrun -m mismatch.features.loop.trainer_side JOB``.

JOB: ``{"run_dir": …, "loop": LoopSpec as JSON, "start": step}``. All ranks of one FSDP2 world. At
every step it scores what the engine sampled, takes the optimiser's steps, writes the step's numbers
to ``rows``, exports the weights and lets the engine go on (``go/STEP.json``).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError, OutOfMemory, first_line
from mismatch.features.loop.history import (
    CHECKPOINTS,
    DONE,
    GO,
    STEPS,
    WEIGHTS,
    Row,
    in_words,
    measure,
    save_row,
)
from mismatch.features.loop.optimiser import PolicyOptimiser, export
from mismatch.features.loop.policy import deal, policy_loss
from mismatch.features.loop.spec import LoopSpec
from mismatch.keys import TRAIN, Key
from mismatch.processes.tasks import wait_for
from mismatch.processes.workers.engine import reported
from mismatch.processes.workers.train import replay_source
from mismatch.run import store
from mismatch.run.messages import exit_worker, report_ready, say
from mismatch.specs import Pass
from mismatch.training.backward import Backward
from mismatch.training.distributed import World
from mismatch.training.load import load
from mismatch.training.score import score_pass, weights_changed
from mismatch.training.scorer import torch_dtype
from mismatch.training.source import quieten
from mismatch.training.validate import prepare_pass
from mismatch.types import Floats, Rollout

PARTS = ("push_s", "verify_s", "generate_s", "score_s", "update_s", "export_s")
MINI_STREAM = 104729  # the order of mini-batches, apart from the choice of prompts
MAX_NORM = 1.0  # that gradients are cut to


def main(arguments: list[str]) -> int:
    """Run all steps; 0, or 1 with the error left for the parent."""
    job = store.read_json(Path(arguments[0]))
    run_dir, loop = Path(job["run_dir"]), from_json(LoopSpec, job["loop"])
    rank, start = os.environ.get("RANK", "0"), int(job["start"])
    return reported(run_dir, "loop-trainer", lambda: run(run_dir, loop, start), rank, "trainer")


def run(run_dir: Path, loop: LoopSpec, start: int) -> None:
    """Run every step from ``start``; all ranks call it."""
    quieten()
    world = World.start()
    torch.manual_seed(loop.seed)
    try:
        loaded = load(loop.check.train, world.mesh, world.device)
        side = TrainerSide(world, loaded, loop, run_dir, start)
        for step in range(start, loop.steps):
            side.step(step)
    except torch.OutOfMemoryError as error:
        fault = f"rank {world.rank} is out of GPU memory: {first_line(error)}"
        fix = "more GPUs (--nproc-per-node), or --like a check with a lower --micro-batch-tokens"
        raise OutOfMemory(fault, fix) from error
    world.close()


class TrainerSide:
    """A sharded model at the checkpoint of a step, its optimiser, and the steps."""

    def __init__(self, world: Any, loaded: Any, loop: LoopSpec, run_dir: Path, start: int) -> None:
        self.world, self.loaded, self.loop, self.run_dir = world, loaded, loop, run_dir
        self.optimiser = PolicyOptimiser(world, loaded, loop.learning_rate, MAX_NORM)
        if start:
            self.optimiser.load(run_dir / CHECKPOINTS / f"{start:06d}")
        if world.rank == 0:
            report_ready()
        world.barrier()
        self.let_go(start)

    def let_go(self, step: int) -> None:
        """Export the weights and let the engine sample this step."""
        digests = weights_changed(self.world, self.loaded)
        dtype = torch_dtype(self.loop.check.rollout.engine.dtype)
        export(self.world, self.loaded, self.loaded.directory, self.run_dir / WEIGHTS, dtype)
        if self.world.rank == 0:
            order = self.run_dir / GO / f"{step:06d}.json"
            store.write_json(order, {"digests": to_json(digests)})

    def step(self, step: int) -> None:
        """Score, update, measure; keep the numbers, then the weights, then let the engine go on."""
        first, done = self.world.rank == 0, step + 1
        folder = self.run_dir / STEPS / f"{step:06d}"
        wait_for(folder / DONE)
        began = time.monotonic()
        rollout = store.load_rollout(folder)
        decode = store.load_scoring(folder, Key.of(rollout.fingerprint["engine"], "decode"))
        row: Row = {"step": float(step), **store.read_json(folder / DONE)}
        spec = self.loop.check.train
        source = replay_source(folder, rollout, spec)
        train = score_pass(self.world, self.loaded, rollout, Pass(TRAIN, spec), source)
        own = np.zeros(rollout.n_actions) if train is None else train.logprobs.copy()
        shared: Floats = self.world.sum(torch.from_numpy(own)).numpy()  # rank 0 alone has it
        if not np.isfinite(shared).all():
            fault = f"step {step}: the trainer's log-probabilities are not finite"
            fix = "the weights have diverged: a smaller --learning-rate, or another arm"
            raise MismatchError(fault, fix)
        if train is not None:
            row |= measure(rollout, decode, train)
        scored = time.monotonic()
        row |= self.update(step, rollout, source, shared, decode.logprobs)
        row |= {"score_s": scored - began, "update_s": time.monotonic() - scored}
        if first:
            save_row(self.run_dir, row)
        if done % self.loop.checkpoint_every == 0 or done == self.loop.steps:
            kept = self.run_dir / CHECKPOINTS / f"{done:06d}"
            self.optimiser.save(kept)
            for older in kept.parent.iterdir() if first else ():
                if older != kept:
                    shutil.rmtree(older)
        began = time.monotonic()
        if done < self.loop.steps:
            self.let_go(done)
        row["export_s"] = time.monotonic() - began
        row["seconds"] = sum(row[part] or 0.0 for part in PARTS)
        if first:
            save_row(self.run_dir, row)
            say(f"progress {in_words(row, self.loop.steps)}")
            shutil.rmtree(folder)

    def update(
        self, step: int, rollout: Rollout, source: Any, train: Floats, engine: Floats
    ) -> Row:
        """Take the optimiser's steps on one rollout; refuse what is not finite."""
        loop, spec = self.loop, replace(self.loop.check.train, grad=True)
        options, _ = prepare_pass(self.world, self.loaded, rollout, spec, source)
        taken: list[tuple[float, float]] = []  # loss and gradient norm
        largest = 0.0
        for prompts in deal(rollout, loop.mini_batches, (loop.seed, step, MINI_STREAM)):
            policy = policy_loss(rollout, train, engine, prompts, loop)
            backward = Backward(
                *(self.world, self.loaded, rollout, Pass(TRAIN, spec), options, policy, source)
            )
            rows = np.flatnonzero(np.isin(rollout.prompt_index, prompts))
            made = self.optimiser.step(backward, rows.tolist())
            if made is None:
                raise MismatchError(
                    f"step {step}, mini-batch {len(taken)}: the loss or its gradient is not "
                    f"finite; the largest ratio was {policy.largest:.3g}",
                    f"history and the last checkpoint are in {self.run_dir}; a smaller "
                    "--learning-rate, or another --train-dtype",
                )
            taken.append(made)
            largest = max(largest, policy.largest)
        losses, norms = zip(*taken, strict=True)
        ratio = max(self.world.gather(largest) or [0.0])  # rank 0 alone has all
        return {"loss": float(np.mean(losses)), "grad_norm": max(norms), "ratio_max": ratio}


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
