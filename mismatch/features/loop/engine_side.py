"""The engine of the loop: ``python -m mismatch.features.loop.engine_side JOB``.

JOB: ``{"run_dir": …, "loop": LoopSpec as JSON, "start": step, "pool": file}``. It lives for one arm
and one seed. Before every step it waits for ``go/STEP.json``, takes the weights that lie in
``weights`` by the first path that brings all of them, and samples into ``steps/STEP``;
``steps/STEP/engine.json`` comes last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.codec import from_json
from mismatch.engines.registry import checkpoint_names, engine_class
from mismatch.engines.sync_drivers import driver_class
from mismatch.errors import MismatchError, in_list, named_line
from mismatch.features.loop.history import DONE, GO, STEPS, WEIGHTS
from mismatch.features.loop.spec import PATHS, LoopSpec
from mismatch.models.derived import in_form
from mismatch.models.digests import digest_tensor
from mismatch.models.weight_states import Checkpoint, transposed_names
from mismatch.processes.tasks import wait_for
from mismatch.processes.workers.engine import reported, stop_at
from mismatch.processes.workers.sampling import Ready, ready_for, sampled, with_routes
from mismatch.prompts.prompt import Prompt
from mismatch.run import store
from mismatch.run.messages import Reporter, exit_worker, report_ready, say
from mismatch.training.user_kernels import load_function
from mismatch.types import Floats, Rollout, Scoring

PUSHED = "pushed and verified by the loop"  # why its weights are no checkpoint's
POOL_SAMPLES = 6
POOL_STREAM = 7919  # apart from the seeds of steps


def main(arguments: Sequence[str]) -> int:
    """Sample every step; 0, or 1 with the error left for the parent."""
    job = store.read_json(Path(arguments[0]))
    run_dir, loop = Path(job["run_dir"]), from_json(LoopSpec, job["loop"])
    start, pool = int(job["start"]), Path(job["pool"])
    return reported(run_dir, "loop-engine", lambda: run(run_dir, loop, start, pool))


def run(run_dir: Path, loop: LoopSpec, start: int, pool: Path) -> None:
    """From the engine's start to the last sample."""
    spec = loop.check.rollout
    ready = ready_for(spec)
    if not checkpoint_names(spec.engine):
        fault = f"{spec.engine.model} has no safetensors files"
        raise MismatchError(fault, "save it again with save_pretrained")
    with engine_class(spec.engine.engine)(
        in_form(replace(spec.engine, adapter_as="merged")), spec.sampling, ready.longest
    ) as engine:
        report_ready()
        stop_at(engine, ready)
        side = EngineSide(run_dir, loop, engine, ready, list(PATHS[spec.engine.engine]))
        side.choose_pool(pool)
        for step in range(start, loop.steps):
            side.step(step)


@dataclass
class EngineSide:
    """A running engine and what it is asked, step by step."""

    run_dir: Path
    loop: LoopSpec
    engine: Any
    ready: Ready
    paths: list[str]
    """Ways of the weights into the engine; those that lost a parameter are gone."""
    pool: list[int] = field(default_factory=list)

    def choose_pool(self, file: Path) -> None:
        """Choose the prompts to train on: all, or those that the first weights solve sometimes."""
        self.pool = list(range(len(self.ready.prompts)))
        if not self.loop.perfectible:
            return
        if not file.exists():
            rollout, _ = self.sample(self.pool, POOL_SAMPLES, POOL_STREAM, "the pool")
            assert rollout.rewards is not None
            rates = rollout.rewards.reshape(-1, POOL_SAMPLES).mean(axis=1)
            kept = np.flatnonzero((rates > 0) & (rates < 1)).tolist()
            store.write_json(file, {"kept": kept, "rates": rates.tolist(), "samples": POOL_SAMPLES})
        self.pool = store.read_json(file)["kept"]
        if not self.pool:
            fault = f"the model solves none of {len(self.ready.prompts)} prompts sometimes"
            fix = "other prompts, more of them (--num-prompts), or --no-perfectible"
            raise MismatchError(fault, fix)

    def step(self, step: int) -> None:
        """Take the weights, verify them, sample."""
        spec, order = self.loop.check.rollout, self.run_dir / GO / f"{step:06d}.json"
        wait_for(order)
        done = self.take(step, store.read_json(order)["digests"])
        began = time.monotonic()
        drawn = np.random.SeedSequence([self.loop.seed, step]).generate_state(1)[0]
        count, seed = spec.sampling.samples_per_prompt, int(drawn >> 1)
        rollout, decode = self.sample(self.chosen(step), count, seed, f"step {step}")
        done["generate_s"] = time.monotonic() - began
        folder = self.run_dir / STEPS / f"{step:06d}"
        store.save_rollout(folder, rollout, made_by=spec)
        store.save_scoring(folder, decode, rollout, made_by=spec)
        store.write_json(folder / DONE, done)

    def take(self, step: int, digests: dict[str, list[int]]) -> dict[str, float]:
        """Push the weights by each path until one brings all of them into the kernels.

        Args:
            digests: of the trainer's parameters, taken before they were gathered.
        """
        weights = Checkpoint(self.run_dir / WEIGHTS, 0)
        kind: Any = driver_class(self.loop.check.rollout.engine.engine)
        driver = kind(self.engine, weights, self.run_dir / "scratch")
        expected, lost_by = weights.prints(0), "the trainer's export"
        exported = {name: list(digest_tensor(tensor)) for name, tensor in weights.tensors(0)}
        wrong = [name for name in exported if exported[name] != digests.get(name, exported[name])]
        for path in () if wrong else tuple(self.paths):
            began = time.monotonic()
            driver.push(path, 0)
            pushed = time.monotonic()
            transposed = transposed_names(expected, driver.held(list(expected), [])[0])
            held, _ = driver.held(list(expected), transposed)
            compared = [name for name in expected if name in held]
            if not compared:
                fault = f"step {step}: no parameter of the engine can be read back and compared"
                raise MismatchError(fault, "another engine")
            wrong = [name for name in compared if held[name].cells != expected[name].cells]
            if not wrong:
                driver.drop_caches()
                times = {"push_s": pushed - began, "verify_s": time.monotonic() - pushed}
                return {"parameters_verified": len(compared), **times}
            lost_by = f"the path {path}"
            say(f"step {step}: {lost_by} loses {in_list(wrong)}")
            self.paths = [other for other in self.paths if other != path] or [path]
        raise MismatchError(
            f"step {step}: the engine would sample with other weights than the trainer's: "
            f"{lost_by} lost {in_list(wrong)}",
            "mismatch sync-probe shows what becomes of each parameter",
        )

    def chosen(self, step: int) -> list[int]:
        """Return prompts of a step, the same in every arm."""
        drawn = np.random.default_rng([self.loop.seed, step])
        few = len(self.pool) < self.loop.prompts
        chosen: list[int] = drawn.choice(self.pool, self.loop.prompts, replace=few).tolist()
        return chosen

    def sample(
        self, chosen: Sequence[int], count: int, seed: int, where: str
    ) -> tuple[Rollout, Scoring]:
        """Sample responses of some prompts, with their rewards by the user's function, the
        environment or the task, and the log-probabilities that they were sampled with."""
        spec = self.loop.check.rollout
        sampling = replace(spec.sampling, samples_per_prompt=count, seed=seed)
        self.engine.sampling = sampling
        prompts = [self.ready.prompts[index] for index in chosen]
        part = replace(self.ready, prompts=prompts, ids=[self.ready.ids[index] for index in chosen])
        asked, progress = replace(spec, sampling=sampling), Reporter(where)
        rollout, trajectories, decode = sampled(asked, self.engine, part, progress, PUSHED)
        if self.ready.capabilities.routed_experts:
            decode = with_routes(self.engine, trajectories, decode, rollout)
        if self.loop.reward is not None:
            tokenizer = self.ready.tokenizer
            rewards = own_rewards(self.loop.reward, prompts, rollout, tokenizer, where)
            rollout = replace(rollout, rewards=rewards)
        if rollout.rewards is None:
            fault = "these prompts have no answers, so that there is no reward"
            fix = "prompts with answers, or your own: --reward package.module:function"
            raise MismatchError(fault, fix)
        return rollout, decode


def own_rewards(
    name: str, prompts: Sequence[Prompt], rollout: Rollout, tokenizer: Any, where: str
) -> Floats:
    """Ask the user's function about each response's text and its prompt's answer."""
    function = load_function(name)[0]
    masks = np.split(rollout.action_mask, rollout.offsets[1:-1])
    values = np.zeros(rollout.n_sequences)
    for row, (ids, mask) in enumerate(zip(rollout.sequences(), masks, strict=True)):
        answer = prompts[int(rollout.prompt_index[row])].answer
        try:
            text = tokenizer.decode(ids[mask], skip_special_tokens=True)
            values[row] = function(text, answer)
            if not np.isfinite(values[row]):
                raise ValueError(f"it gave {values[row]}, no finite number")
        except Exception as error:
            fault = f"--reward {name} failed on response {row} of {where}: {named_line(error)}"
            fix = "repair the function; --resume continues from the last checkpoint"
            raise MismatchError(fault, fix) from error
    return values


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
