"""The engine of the loop: ``python -m mismatch.features.loop.engine_side JOB``.

JOB: ``{"run_dir": …, "loop": LoopSpec as JSON, "start": step, "pool": file}``. It lives for one arm
and one seed. Before every step it waits for ``go/STEP.json`` and takes the weights that lie in
``weights``, reads all of them back as its kernels hold them, and samples into ``steps/STEP``;
``steps/STEP/engine.json`` comes last. Before the first step the path of the weight sync is probed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.codec import from_json
from mismatch.engines.registry import engine_class, engine_info, model_directory
from mismatch.engines.sync_drivers import driver_class
from mismatch.engines.turns import Trajectory
from mismatch.errors import MismatchError, named_line
from mismatch.experiments.sync.judge import judge, sync_to_json, transposed_names
from mismatch.experiments.sync.types import SyncReport, SyncSpec
from mismatch.features.loop.history import ASLEEP, DONE, GO, STEPS, WEIGHTS
from mismatch.features.loop.spec import AUTO, LoopSpec
from mismatch.models.derived import in_form
from mismatch.models.digests import digest_tensor
from mismatch.models.weight_states import Checkpoint
from mismatch.processes.workers.engine import reported, rescore, stop_at
from mismatch.processes.workers.probe_side import Probe, tokens
from mismatch.processes.workers.sampling import (
    Ready,
    Reporter,
    ready_for,
    sampled,
    save_texts,
    with_routes,
)
from mismatch.processes.workers.train import wait_for
from mismatch.prompts.prompt import Prompt
from mismatch.run import store
from mismatch.run.messages import exit_worker, report_ready, say
from mismatch.types import Floats, Rollout, Scoring

LABEL = "loop-engine"
PUSHED = "pushed and verified by the loop"  # why its weights are no checkpoint's
# The engine's own first.
PATHS = {"vllm": ("reload", "rpc"), "sglang": ("disk", "tensor"), "transformers": ("load",)}
POOL_SAMPLES = 6
POOL_STREAM = 7919  # apart from the seeds of steps
BATCH = 64  # prompts that the pool is asked at a time


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample every step; 0, or 1 with the error left for the parent."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    job = store.read_json(Path(path))
    run_dir, loop = Path(job["run_dir"]), from_json(LoopSpec, job["loop"])
    start, pool, shares = int(job["start"]), Path(job["pool"]), bool(job["shares"])
    return reported(run_dir, LABEL, lambda: run(run_dir, loop, start, pool, shares))


def run(run_dir: Path, loop: LoopSpec, start: int, pool: Path, shares: bool) -> None:
    """From the engine's start to the last sample.

    Args:
        shares: GPUs with the trainer, which loads its weights when the engine sleeps.
    """
    spec = loop.check.rollout
    ready = ready_for(spec)
    base = model_directory(spec.engine)
    if base is None or not list(base.glob("*.safetensors")):
        raise MismatchError(
            f"{spec.engine.model} has no safetensors files", "save it again with save_pretrained"
        )
    sync = SyncSpec(engine=spec.engine, trainer=False, seed=loop.seed)
    context = ready.info.context or sync.length
    longest = max(ready.longest, min(sync.length, context - 8) + 8)
    started = in_form(spec.engine)
    if shares:
        started = driver_class(spec.engine.engine).prepared(started, "sleep-1")
    with engine_class(spec.engine.engine)(started, spec.sampling, longest) as engine:
        report_ready()
        stop_at(engine, ready)
        side = EngineSide(run_dir, loop, engine, ready, base, shares)
        side.choose_path(sync)
        side.choose_pool(pool)
        if shares:
            side.driver(base).sleep()
            store.write_json(run_dir / ASLEEP, {})
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
    base: Path
    shares: bool = False  # GPUs with the trainer: it sleeps between its turns
    path: str = ""
    pool: list[int] = field(default_factory=list)
    transposed: list[str] = field(default_factory=list)

    def choose_path(self, sync: SyncSpec) -> None:
        """Probe ways to new weights, the engine's own first, until one is whole.

        Raises:
            MismatchError: none is; with the parameters of the last.
        """
        name = self.loop.check.rollout.engine.engine
        paths = PATHS.get(name, ())
        candidates = paths if self.loop.path == AUTO else (self.loop.path,)
        if not candidates or not set(candidates) <= set(engine_info(name).weight_paths):
            raise MismatchError(
                f"--path {self.loop.path}: {name} has no such path",
                f"one of {', '.join((AUTO, *paths))}",
            )
        report: SyncReport | None = None
        for path in candidates:
            probed = replace(sync, path=path)
            rows = tokens(probed, self.ready.info.vocab_size, self.ready.info.context)
            checkpoint = Checkpoint(self.base, sync.seed)
            report = Probe.of(self.engine, probed, checkpoint, rows, self.run_dir).report()
            store.write_json(self.run_dir / f"sync-{path}.json", sync_to_json(report))
            if not report.faults and not report.push_failed:
                self.path = path
                return
            say(f"the path {path} is not whole: {judge(report).line}")
        assert report is not None
        names = [parameter.name for parameter in report.faults]
        raise MismatchError(
            f"no path brings all weights into {name}: {report.path} loses {in_list(names)}",
            "mismatch sync-probe --details shows what became of each",
        )

    def choose_pool(self, file: Path) -> None:
        """The prompts to train on: all, or those that the first weights solve sometimes.

        Raises:
            MismatchError: it solves none of them sometimes.
        """
        if not self.loop.perfectible:
            self.pool = list(range(len(self.ready.prompts)))
            return
        if not file.exists():
            rates = self.rates()
            kept = [index for index, rate in enumerate(rates) if 0.0 < rate < 1.0]
            store.write_json(file, {"kept": kept, "rates": rates, "samples": POOL_SAMPLES})
        self.pool = store.read_json(file)["kept"]
        if not self.pool:
            raise MismatchError(
                f"the model solves none of {len(self.ready.prompts)} prompts sometimes",
                "other prompts, more of them (--num-prompts), or --no-perfectible",
            )

    def rates(self) -> list[float]:
        """The mean reward of every prompt under the first weights."""
        rates: list[float] = []
        progress = Reporter("pool")
        for first in range(0, len(self.ready.prompts), BATCH):
            part = list(range(first, min(first + BATCH, len(self.ready.prompts))))
            rollout, *_ = self.sample(part, POOL_SAMPLES, POOL_STREAM + first, lambda *_: None)
            rewards = self.rewards(rollout, part, "of the pool")
            rates += rewards.reshape(len(part), POOL_SAMPLES).mean(axis=1).tolist()
            progress(part[-1] + 1, len(self.ready.prompts), 0)
        return rates

    # ------------------------------------------------------------ a step

    def step(self, step: int) -> None:
        """Take the weights, verify them, sample."""
        order = store.read_json(self.run_dir / GO / f"{step:06d}.json")
        began = time.monotonic()
        driver = self.driver(self.run_dir / WEIGHTS)
        if self.shares:
            driver.wake("weights")
        driver.push(self.path, 0)
        pushed = time.monotonic()
        verified, skipped = self.verify(step, driver, driver.checkpoint, order["digests"])
        if self.shares:
            driver.wake("kv_cache")
        driver.drop_caches()
        read_back = time.monotonic()
        chosen = self.chosen(step)
        count = self.loop.check.rollout.sampling.samples_per_prompt
        seed = seed_of(self.loop.seed, step)
        whole, progress = bool(order["whole"]), Reporter(f"step {step}")
        rollout, trajectories, decode = self.sample(chosen, count, seed, progress, whole)
        generated = time.monotonic()
        pushed_by = {"path": self.path, "verified": verified, "not_compared": skipped}
        facts = decode.fingerprint | {"synchronised": pushed_by}
        decode = replace(decode, fingerprint=facts)
        rollout = replace(rollout, rewards=self.rewards(rollout, chosen, f"of step {step}"))
        folder = self.run_dir / STEPS / f"{step:06d}"
        self.save(folder, rollout, trajectories, decode, whole)
        if self.shares:
            driver.sleep()
        store.write_json(
            folder / DONE,
            {
                "path": self.path,
                "parameters_verified": verified,
                "not_compared": skipped,
                "push_s": pushed - began,
                "verify_s": read_back - pushed,
                "generate_s": generated - read_back,
            },
        )

    def driver(self, weights: Path) -> Any:
        """What brings these weights into the engine."""
        kind: Any = driver_class(self.loop.check.rollout.engine.engine)
        return kind(self.engine, Checkpoint(weights, 0), self.run_dir / "scratch")

    def verify(
        self, step: int, driver: Any, weights: Checkpoint, digests: dict[str, list[int]]
    ) -> tuple[int, int]:
        """Hold what the kernels compute with against the trainer's shards.

        Args:
            digests: of the trainer's parameters, taken before they were gathered.

        Returns:
            How many parameters are the same, and how many could not be compared.

        Raises:
            MismatchError: one is another, named with the place where it was lost.
        """
        expected = weights.prints(0)
        lost = [
            name
            for name, tensor in weights.tensors(0)
            if name in digests and list(digest_tensor(tensor)) != list(digests[name])
        ]
        self.require(step, lost, "the trainer's export")
        if not self.transposed:
            self.transposed = transposed_names(expected, driver.held(list(expected), [])[0])
        held, _ = driver.held(list(expected), self.transposed)
        compared = [name for name in expected if name in held]
        wrong = [name for name in compared if held[name].cells != expected[name].cells]
        self.require(step, wrong, f"the path {self.path}")
        if not compared:
            raise MismatchError(
                f"step {step}: no parameter of the engine can be read back, so that nothing holds "
                "its weights against the trainer's",
                "another engine, or another --path",
            )
        return len(compared), len(expected) - len(compared)

    def require(self, step: int, lost: Sequence[str], where: str) -> None:
        if lost:
            raise MismatchError(
                f"step {step}: the engine would sample with other weights than the trainer's: "
                f"{where} lost {in_list(lost)}",
                "mismatch sync-probe shows what becomes of each parameter",
            )

    def chosen(self, step: int) -> list[int]:
        """Prompts of a step, the same in every arm."""
        drawn = np.random.default_rng([self.loop.seed, step])
        few = len(self.pool) < self.loop.prompts
        picked = drawn.choice(len(self.pool), self.loop.prompts, replace=few)
        return [self.pool[int(index)] for index in picked]

    def sample(
        self,
        chosen: Sequence[int],
        count: int,
        seed: int,
        progress: Callable[..., None],
        whole: bool = False,
    ) -> tuple[Rollout, list[Trajectory], Scoring]:
        """Responses of some prompts under the weights that the engine holds.

        Args:
            whole: with whole distributions, as a check has them.
        """
        spec = self.loop.check.rollout
        law = replace(spec.sampling, samples_per_prompt=count, seed=seed)
        self.engine.sampling = law
        spec = replace(spec, sampling=law, exact_kl=spec.exact_kl if whole else 0)
        part = replace(
            self.ready,
            prompts=[self.ready.prompts[index] for index in chosen],
            ids=[self.ready.ids[index] for index in chosen],
        )
        return sampled(spec, self.engine, part, progress, PUSHED)

    def rewards(self, rollout: Rollout, chosen: Sequence[int], where: str) -> Floats:
        """One per sequence.

        Raises:
            MismatchError: no answers are known, or the reward function failed.
        """
        if self.loop.reward is not None:
            prompts = [self.ready.prompts[index] for index in chosen]
            return own_rewards(self.loop.reward, prompts, rollout, self.ready.tokenizer, where)
        if rollout.rewards is None:
            raise MismatchError(
                "these prompts have no answers, so that there is no reward",
                "--answer-column, or your own: --reward package.module:function",
            )
        return rollout.rewards

    def save(
        self,
        folder: Path,
        rollout: Rollout,
        trajectories: Sequence[Trajectory],
        decode: Scoring,
        whole: bool,
    ) -> None:
        """Rollout and decode scoring; with ``whole`` what a check reads beside them."""
        spec = self.loop.check.rollout
        if self.ready.capabilities.routed_experts:
            decode = with_routes(self.engine, trajectories, decode, rollout)
        store.save_rollout(folder, rollout, made_by=spec)
        store.save_scoring(folder, decode, rollout, made_by=spec)
        if whole:
            save_texts(folder, rollout, decode, self.ready)
            if rollout.fingerprint["prefill"]:
                rescore(folder, spec, self.engine)


def seed_of(seed: int, step: int) -> int:
    """Of the engine's sampling at a step."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0] >> 1)


def own_rewards(
    name: str, prompts: Sequence[Prompt], rollout: Rollout, tokenizer: Any, where: str
) -> Floats:
    """By the user's function, of each response's text and its prompt's answer.

    Raises:
        MismatchError: it raised, or gave no finite number.
    """
    from mismatch.training.user_kernels import load_function

    function = load_function(name)[0]
    masks = np.split(rollout.action_mask, rollout.offsets[1:-1])
    values = []
    for row, (ids, mask) in enumerate(zip(rollout.sequences(), masks, strict=True)):
        answer = prompts[int(rollout.prompt_index[row])].answer
        try:
            value = float(function(tokenizer.decode(ids[mask], skip_special_tokens=True), answer))
        except Exception as error:
            raise MismatchError(
                f"--reward {name} failed on response {row} {where}: {named_line(error)}",
                "mend the function; --resume goes on from the last checkpoint",
            ) from error
        if not np.isfinite(value):
            raise MismatchError(
                f"--reward {name} gave {value} for response {row} {where}", "give finite numbers"
            )
        values.append(value)
    return np.asarray(values, np.float64)


def in_list(names: Sequence[str], most: int = 3) -> str:
    """Some names, and how many more.

    >>> in_list(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


if __name__ == "__main__":
    exit_worker(main())
