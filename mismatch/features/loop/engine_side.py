"""The engine of the loop: ``python -m mismatch.features.loop.engine_side JOB``.

JOB: ``{"run_dir": …, "loop": LoopSpec as JSON, "start": step, "pool": file}``. It lives for one arm
and one seed. Before every step it waits for ``go/STEP.json``, takes the weights that lie in
``weights`` by the first path that brings all of them, and samples into ``steps/STEP``;
``steps/STEP/engine.json`` comes last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mismatch.codec import from_json
from mismatch.engines.registry import engine_class, model_directory
from mismatch.engines.sync_drivers import driver_class
from mismatch.errors import MismatchError, in_list, named_line
from mismatch.features.loop.history import DONE, GO, PATH, STEPS, WEIGHTS
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
from mismatch.types import Floats, Rollout, Scoring

LABEL = "loop-engine"
PUSHED = "pushed and verified by the loop"  # why its weights are no checkpoint's
POOL_SAMPLES = 6
POOL_STREAM = 7919  # apart from the seeds of steps
BATCH = 64  # prompts that the pool is asked at a time
NOWHERE = "mismatch sync-probe shows what becomes of each parameter"


class Sampled(NamedTuple):
    """Responses, and the log-probabilities that the engine sampled them with."""

    rollout: Rollout
    decode: Scoring


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample every step; 0, or 1 with the error left for the parent."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    job = store.read_json(Path(path))
    run_dir, loop = Path(job["run_dir"]), from_json(LoopSpec, job["loop"])
    start, pool = int(job["start"]), Path(job["pool"])
    return reported(run_dir, LABEL, lambda: run(run_dir, loop, start, pool))


def run(run_dir: Path, loop: LoopSpec, start: int, pool: Path) -> None:
    """From the engine's start to the last sample."""
    spec = loop.check.rollout
    ready = ready_for(spec)
    base = model_directory(spec.engine)
    if base is None or not list(base.glob("*.safetensors")):
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
            wait_for(run_dir / GO / f"{step:06d}.json")
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
        if not self.loop.perfectible:
            self.pool = list(range(len(self.ready.prompts)))
            return
        if not file.exists():
            rates: list[float] = []
            count, progress = len(self.ready.prompts), Reporter("pool")
            for first in range(0, count, BATCH):
                part = list(range(first, min(first + BATCH, count)))
                rollout = self.sample(
                    part, POOL_SAMPLES, POOL_STREAM + first, lambda *_: None
                ).rollout
                rewards = self.rewards(rollout, part, "of the pool")
                rates += rewards.reshape(len(part), POOL_SAMPLES).mean(axis=1).tolist()
                progress(part[-1] + 1, count, 0)
            kept = [index for index, rate in enumerate(rates) if 0.0 < rate < 1.0]
            store.write_json(file, {"kept": kept, "rates": rates, "samples": POOL_SAMPLES})
        self.pool = store.read_json(file)["kept"]
        if not self.pool:
            fault = f"the model solves none of {len(self.ready.prompts)} prompts sometimes"
            fix = "other prompts, more of them (--num-prompts), or --no-perfectible"
            raise MismatchError(fault, fix)

    def step(self, step: int) -> None:
        """Take the weights, verify them, sample."""
        order = store.read_json(self.run_dir / GO / f"{step:06d}.json")
        done = self.take(step, order["digests"])
        began = time.monotonic()
        chosen = self.chosen(step)
        count = self.loop.check.rollout.sampling.samples_per_prompt
        progress = Reporter(f"step {step}")
        drawn = np.random.SeedSequence([self.loop.seed, step]).generate_state(1)[0]
        rollout, decode = self.sample(chosen, count, int(drawn >> 1), progress)
        done["generate_s"] = time.monotonic() - began
        rollout = replace(rollout, rewards=self.rewards(rollout, chosen, f"of step {step}"))
        folder, spec = self.run_dir / STEPS / f"{step:06d}", self.loop.check.rollout
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
        expected = weights.prints(0)
        wrong = [
            name
            for name, tensor in weights.tensors(0)
            if name in digests and list(digest_tensor(tensor)) != list(digests[name])
        ]
        if wrong:
            raise lost(step, wrong, "the trainer's export")
        while True:
            path, began = self.paths[0], time.monotonic()
            driver.push(path, 0)
            pushed = time.monotonic()
            transposed = transposed_names(expected, driver.held(list(expected), [])[0])
            held, _ = driver.held(list(expected), transposed)
            compared = [name for name in expected if name in held]
            wrong = [name for name in compared if held[name].cells != expected[name].cells]
            if not compared:
                raise MismatchError(
                    f"step {step}: no parameter of the engine can be read back, so that nothing "
                    "compares its weights with the trainer's",
                    "another engine",
                )
            if not wrong:
                break
            if len(self.paths) == 1:
                raise lost(step, wrong, f"the path {path}")
            say(f"step {step}: the path {path} loses {in_list(wrong)}")
            del self.paths[0]
        driver.drop_caches()
        store.write_json(self.run_dir / PATH, {"path": path})
        return {
            "parameters_verified": len(compared),
            "push_s": pushed - began,
            "verify_s": time.monotonic() - pushed,
        }

    def chosen(self, step: int) -> list[int]:
        """Return prompts of a step, the same in every arm."""
        drawn = np.random.default_rng([self.loop.seed, step])
        few = len(self.pool) < self.loop.prompts
        picked = drawn.choice(len(self.pool), self.loop.prompts, replace=few)
        return [self.pool[int(index)] for index in picked]

    def sample(
        self, chosen: Sequence[int], count: int, seed: int, progress: Callable[..., None]
    ) -> Sampled:
        """Sample responses of some prompts under the weights that the engine holds."""
        spec = self.loop.check.rollout
        sampling = replace(spec.sampling, samples_per_prompt=count, seed=seed)
        self.engine.sampling = sampling
        prompts = [self.ready.prompts[index] for index in chosen]
        part = replace(self.ready, prompts=prompts, ids=[self.ready.ids[index] for index in chosen])
        asked = replace(spec, sampling=sampling)
        rollout, trajectories, decode = sampled(asked, self.engine, part, progress, PUSHED)
        if self.ready.capabilities.routed_experts:
            decode = with_routes(self.engine, trajectories, decode, rollout)
        return Sampled(rollout, decode)

    def rewards(self, rollout: Rollout, chosen: Sequence[int], where: str) -> Floats:
        """[sequences] by the user's function, the environment or the task."""
        if self.loop.reward is not None:
            prompts = [self.ready.prompts[index] for index in chosen]
            return own_rewards(self.loop.reward, prompts, rollout, self.ready.tokenizer, where)
        if rollout.rewards is None:
            fault = "these prompts have no answers, so that there is no reward"
            fix = "prompts with answers, or your own: --reward package.module:function"
            raise MismatchError(fault, fix)
        return rollout.rewards


def own_rewards(
    name: str, prompts: Sequence[Prompt], rollout: Rollout, tokenizer: Any, where: str
) -> Floats:
    """Ask the user's function about each response's text and its prompt's answer."""
    from mismatch.training.user_kernels import load_function

    function = load_function(name)[0]
    masks = np.split(rollout.action_mask, rollout.offsets[1:-1])
    values = []
    for row, (ids, mask) in enumerate(zip(rollout.sequences(), masks, strict=True)):
        answer = prompts[int(rollout.prompt_index[row])].answer
        try:
            value = float(function(tokenizer.decode(ids[mask], skip_special_tokens=True), answer))
        except Exception as error:
            fault = f"--reward {name} failed on response {row} {where}: {named_line(error)}"
            fix = "repair the function; --resume continues from the last checkpoint"
            raise MismatchError(fault, fix) from error
        if not np.isfinite(value):
            fault = f"--reward {name} gave {value} for response {row} {where}"
            raise MismatchError(fault, "give finite numbers")
        values.append(value)
    return np.asarray(values, np.float64)


def lost(step: int, names: Sequence[str], where: str) -> MismatchError:
    """Return the error that names parameters which did not arrive."""
    return MismatchError(
        f"step {step}: the engine would sample with other weights than the trainer's: "
        f"{where} lost {in_list(names)}",
        NOWHERE,
    )


if __name__ == "__main__":
    exit_worker(main())
