"""One side of a probe of the weight sync: ``python -m mismatch.features.sync.worker JOB``.

JOB: ``{"run_dir": …, "spec": SyncSpec as a dict, "side": "engine" or "trainer"}``. The engine's
side pushes, reads back and judges every parameter: ``sync/engine.json`` is a SyncReport without
scores. Both sides score the same tokens in every state: ``sync/SIDE.npy``.
"""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.codec import from_json, to_json
from mismatch.engines.model_info import read_model_info
from mismatch.engines.registry import engine_class, engine_info, model_directory, versions
from mismatch.engines.sync_drivers import Driver, driver_class
from mismatch.errors import MismatchError, first_line
from mismatch.features.sync.judge import cache_row, of_adapters, parameters, unread
from mismatch.features.sync.report import CacheRow, SyncReport, SyncSpec
from mismatch.models.config import serves_mxfp4
from mismatch.models.derived import in_form
from mismatch.models.weight_states import (
    PUSHES,
    SIZE,
    Adapters,
    Checkpoint,
    Prints,
    state_of,
    transposed_names,
)
from mismatch.processes.workers.engine import reported
from mismatch.run.messages import exit_worker, report_ready, report_timing, say
from mismatch.run.store import read_json, write_json
from mismatch.specs import AS_STORED, EngineSpec
from mismatch.types import Floats, NotTested, Sampling

FOLDER = "sync"
STATES = 4  # before any push, after two, and back
FACTS = (  # of the engine, that the report holds
    *("engine", "dtype", "device", "attention", "moe_backend", "quantization", "model_class"),
)
SPARE = 8  # tokens beyond those that are scored


def main(arguments: Sequence[str]) -> int:
    """Run one side; 0, or 1 with the error left for the parent."""
    job = read_json(Path(arguments[0]))
    run_dir, side = Path(job["run_dir"]), job["side"]
    spec = from_json(SyncSpec, job["spec"])
    (run_dir / FOLDER).mkdir(exist_ok=True)
    work = {"engine": engine_side, "trainer": trainer_side}[side]
    who = f"{side}'s side of the probe"
    return reported(run_dir, f"sync-{side}", lambda: work(run_dir, spec), side=who)


@contextmanager
def loaded(engine: EngineSpec, spec: SyncSpec) -> Any:
    """(engine, sequences, checkpoint) while the engine lives; both sides draw the same tokens."""
    engine = in_form(engine, copied=True)  # both sides and the checker read the same files
    info, draw = read_model_info(engine), np.random.default_rng(spec.seed)
    length = min(spec.length, (info.context or spec.length) - SPARE)
    sequences = draw.integers(0, info.vocab_size, (spec.sequences, length)).tolist()
    law = Sampling(temperature=0.0, max_tokens=1)
    with engine_class(engine.engine)(engine, law, length + SPARE) as running:
        report_ready()
        directory = model_directory(engine)
        if directory is None or not list(directory.glob("*.safetensors")):
            fault = f"{engine.model} has no safetensors files"
            raise MismatchError(fault, "save it again with save_pretrained")
        source = Adapters if spec.adapters else Checkpoint
        yield running, sequences, source(directory, spec.seed)


# ---------------------------------------------------------------- the engine


@dataclass
class Probe:
    """What was seen so far of a running engine that holds the checkpoint, state by state."""

    driver: Driver
    engine: Any
    sequences: list[list[int]]
    spec: SyncSpec
    checkpoint: Checkpoint
    transposed: list[str] = field(default_factory=list)
    held: list[dict[str, Prints]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    scores: list[Floats] = field(default_factory=list)
    caches: list[CacheRow] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    def run(
        self,
        function: Callable[..., Any] | None = None,
        expected: Sequence[dict[str, Prints]] | None = None,
    ) -> SyncReport:
        """Run all pushes, as far as they can be done, and judge every parameter.

        Args:
            function: the user's push; None: the spec's path.
            expected: what every parameter should be, in the states 0 to 2; None: computed here.
        """
        if expected is None:
            say("expected values of every parameter")
            expected = [self.checkpoint.prints(push) for push in range(PUSHES)]
        own = self.driver.held(self.checkpoint.names(), [])[0]
        self.transposed = transposed_names(expected[0], own)
        self.read_back()
        self.driver.answers(self.sequences)  # fills the cache
        self.answer(0)
        for push in range(1, STATES):
            say(f"push {push} of {STATES - 1}")
            if not self.push(push, function):
                break
            self.answer(push)
            self.read_back()
        spec, states = self.spec, [expected[state_of(push)] for push in range(len(self.held))]
        missing = [*self.driver.not_tested(), *unread(self.reasons)]
        if not self.caches:
            reason = f"{spec.engine.engine} runs without a prefix cache"
            missing.append(NotTested("caches after a push", reason, "an engine that keeps one"))
        if serves_mxfp4(spec.engine):
            reason = "no push changes them, and they cannot be read back"
            missing.append(NotTested("experts in MXFP4", reason, "--weights engine=bf16"))
        compared = parameters(states, self.held, self.reasons, self.checkpoint.tied())
        facts = self.engine.fingerprint("prefill")
        return SyncReport(
            model=spec.engine.model,
            engine=spec.engine.engine,
            path=spec.push or spec.path,
            seed=spec.seed,
            size=SIZE,
            parameters=of_adapters(compared, self.held) if spec.adapters else compared,
            caches=tuple(self.caches),
            push_failed=self.failed,
            not_tested=tuple(missing),
            facts={name: facts.get(name) for name in FACTS} | {"versions": versions()},
        )

    def read_back(self) -> None:
        """Read back, and score."""
        prints, missing = self.driver.held(self.checkpoint.names(), self.transposed)
        self.held.append(prints)
        self.reasons |= missing
        self.scores.append(scored(self.engine, self.sequences))

    def answer(self, push: int) -> None:
        """Answer the same prompts warm, as the path left the caches, and cold."""
        warm = self.driver.answers(self.sequences)
        self.driver.drop_caches()
        cold = self.driver.answers(self.sequences)
        if warm is not None and cold is not None:
            noise = self.caches[0].largest if self.caches else 0.0
            first, then = ([answer.logprob for answer in each] for each in (warm, cold))
            self.caches.append(cache_row(push, first, then, noise))

    def push(self, push: int, function: Callable[..., Any] | None) -> bool:
        """Return whether it could be done; the first that cannot ends the probe."""
        start = time.monotonic()
        try:
            if function is None:
                self.driver.push(self.spec.path, push)
            else:
                self.driver.push_own(function, dict(self.checkpoint.tensors(push)))
        except Exception as error:
            traceback.print_exc()
            if push == 1:
                raise MismatchError(
                    f"{self.spec.engine.engine} refused the first push by "
                    f"{self.spec.push or self.spec.path}: {first_line(error)}",
                    f"another path: {', '.join(engine_info(self.spec.engine.engine).weight_paths)}",
                ) from error
            self.failed[push] = first_line(error)
            return False
        report_timing(f"push-{push}", time.monotonic() - start)
        if function is None and not self.spec.keep_caches:
            self.driver.drop_caches()
        return True


def scored(engine: Any, sequences: list[list[int]]) -> Floats:
    """Return the log-probabilities of all tokens but each sequence's first, [tokens]."""
    starts = [1] * len(sequences)
    return np.concatenate(engine.prefill(sequences, starts, 1.0, lambda *done: None))


def engine_side(run_dir: Path, spec: SyncSpec) -> None:
    """Push, read back, score; judge every parameter."""
    start, function = time.monotonic(), None
    kind, own = driver_class(spec.engine.engine), spec.engine
    if spec.push is None:
        own = kind.prepared(own, spec.path)
    else:
        from mismatch.training.user_kernels import load_function

        function = load_function(spec.push)[0]  # it cannot be imported: nothing has started yet
    with loaded(own, spec) as (engine, sequences, checkpoint):
        ready = time.monotonic()
        driver = kind(engine, checkpoint, run_dir / FOLDER / "states")
        probe = Probe(driver, engine, sequences, spec, checkpoint)
        report = probe.run(function)
        seconds = {"start": ready - start, "probe": time.monotonic() - ready}
        report.facts["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
    write_json(run_dir / FOLDER / "engine.json", to_json(report))
    np.save(run_dir / FOLDER / "engine.npy", np.stack(probe.scores))


# ---------------------------------------------------------------- the trainer


def trainer_side(run_dir: Path, spec: SyncSpec) -> None:
    """Score the same tokens under transformers, its weights updated in memory."""
    from mismatch.engines.transformers.sync_driver import TransformersDriver

    engine = EngineSpec(
        model=spec.engine.model,
        engine="transformers",
        dtype=spec.engine.dtype,
        revision=spec.engine.revision,
        trust_remote_code=spec.engine.trust_remote_code,
        routing=False,
        weights=spec.engine.weights,
    )
    scores = []
    with loaded(engine, spec) as (running, sequences, checkpoint):
        driver = TransformersDriver(running, checkpoint, run_dir)
        direct = spec.adapters or set(checkpoint.names()) <= set(running.model.state_dict())
        for push in range(PUSHES if direct else 1):
            if push:
                driver.push("lora" if spec.adapters else "load", push)
            scores.append(scored(running, sequences))
    for push in range(len(scores), PUSHES):  # its loader converts this checkpoint's names
        written = checkpoint.write(push, run_dir / FOLDER / f"trainer-{push}")
        served = replace(engine, model=str(written), weights=AS_STORED)
        with loaded(served, spec) as (running, sequences, _):
            scores.append(scored(running, sequences))
        shutil.rmtree(written)
    np.save(run_dir / FOLDER / "trainer.npy", np.stack(scores))


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
