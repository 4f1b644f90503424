"""`mismatch check`: rollout, training world, comparison, report; one stage after the other.

Engines and trainers run in processes of their own; this module only starts them and never imports
torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mismatch import store
from mismatch.engines.registry import require_engine
from mismatch.errors import MismatchError
from mismatch.specs import CheckSpec, Pass, TrainSpec, to_dict
from mismatch.types import Report
from mismatch.workers.launch import run_worker

if TYPE_CHECKING:
    from mismatch.levels import Thresholds

TRAIN = "fsdp"
REFERENCE = "reference:fp32"


class Narrator(Protocol):
    """Tells the user what happens while it happens."""

    def stage(self, title: str) -> Any:
        """A context manager around one stage; gives a callable for progress lines."""


@dataclass
class Stages:
    """Runs the stages of one check and keeps their times."""

    spec: CheckSpec
    run_dir: Path
    narrator: Narrator
    seconds: dict[str, float] = field(default_factory=dict)

    def rollout(self) -> None:
        """Sample in the engine; also its own prefill rescoring of the same tokens."""
        job = {"run_dir": str(self.run_dir), "spec": to_dict(self.spec.rollout)}
        path = store.write_json(self.run_dir / "jobs" / "engine.json", job)
        engine = self.spec.rollout.engine.engine
        with self._timed("rollout", f"rollout: {engine} samples") as progress:
            command = [sys.executable, "-m", "mismatch.workers.engine", str(path)]
            run_worker("engine", command, self.run_dir, progress)

    def score(self) -> None:
        """Score the same tokens in one training world, once per pass."""
        passes = training_passes(self.spec)
        job = {
            "run_dir": str(self.run_dir),
            "passes": [{"name": item.name, "spec": to_dict(item.spec)} for item in passes],
        }
        path = store.write_json(self.run_dir / "jobs" / "train.json", job)
        world = self.spec.nproc_per_node
        title = f"score: FSDP2, {world} rank{'s' if world > 1 else ''}, {len(passes)} passes"
        with self._timed("score", title) as progress:
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(world), "-m", "mismatch.workers.train", str(path)),
            ]
            threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
            run_worker("train", command, self.run_dir, progress, {"OMP_NUM_THREADS": threads})

    @contextmanager
    def _timed(self, key: str, title: str) -> Iterator[Callable[[str], None]]:
        start = time.monotonic()
        with self.narrator.stage(title) as progress:
            yield progress
        self.seconds[key] = round(time.monotonic() - start, 2)


def training_passes(spec: CheckSpec) -> list[Pass]:
    """What one training world has to score: the trainer, and what its noise floor needs."""
    train = spec.train
    passes = [Pass(TRAIN, train)]
    if not spec.noise_floor:
        return passes
    passes.append(Pass(f"{TRAIN}:regrouped", regrouped(train)))
    if not train.grad:
        passes.append(Pass(f"{TRAIN}:grad", replace(train, grad=True, routing=False)))
    reference = reference_of(train)
    if replace(reference, micro_batch_tokens=train.micro_batch_tokens) != replace(
        train, routing=True
    ):
        passes.append(Pass(REFERENCE, reference))
    return passes


def regrouped(train: TrainSpec) -> TrainSpec:
    """The same trainer with other micro-batches."""
    return replace(train, micro_batch_tokens=max(256, train.micro_batch_tokens // 4))


def reference_of(train: TrainSpec) -> TrainSpec:
    """The float32 forward of the same weights, with a kernel that honours the model."""
    return replace(
        train,
        dtype="fp32",
        master_dtype="fp32",
        autocast=None,
        head_dtype=None,
        attention="auto",
        experts="auto",
        layout="padding",
        grad=False,
        routing=True,
    )


def preflight(spec: CheckSpec) -> None:
    """Everything that can be refused before a process starts.

    Raises:
        MismatchError: engine not installed, prompts file malformed, nothing to sample …
    """
    from mismatch.tasks.prompts import read_prompts

    require_engine(spec.rollout.engine.engine)
    _require_torch()
    sampling = spec.rollout.sampling
    positive = {
        "--samples-per-prompt": sampling.samples_per_prompt,
        "--max-tokens": sampling.max_tokens,
        "--nproc-per-node": spec.nproc_per_node,
        "--num-prompts": spec.rollout.prompts.num_prompts,
        "--micro-batch-tokens": spec.train.micro_batch_tokens,
    }
    for flag, value in positive.items():
        if value < 1:
            raise MismatchError(f"{flag} is {value}", f"use a positive number: {flag} 1")
    if not 0 <= sampling.temperature <= 100:
        raise MismatchError(f"--temperature is {sampling.temperature}", "use 0 (greedy) to 100")
    if not 0 < sampling.top_p <= 1:
        raise MismatchError(f"--top-p is {sampling.top_p}", "use a share above 0, up to 1 (off)")
    if sampling.top_k < 0:
        raise MismatchError(f"--top-k is {sampling.top_k}", "use 0 (off) or a positive number")
    read_prompts(spec.rollout.prompts)


def _require_torch() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise MismatchError(
            f"{' and '.join(missing)} not installed: the training side needs them",
            "pip install 'train-infer-mismatch[score]', or `make env` in a clone",
        )


def run_check(
    spec: CheckSpec,
    run_dir: Path,
    narrator: Narrator,
    thresholds: Thresholds | None = None,
    command: str = "",
) -> Report:
    """After :func:`preflight`: run every stage, write every artefact into ``run_dir``.

    Raises:
        MismatchError: a stage failed; what was written before stays.
    """
    store.write_json(run_dir / "spec.json", to_dict(spec))
    stages = Stages(spec, run_dir, narrator)
    stages.rollout()
    stages.score()

    from mismatch.reports.build import build_report, write_report

    with stages._timed("compare", "compare: metrics with intervals") as _:
        report, tokens = build_report(run_dir, spec, thresholds, command)
    report.run["seconds"] = stages.seconds
    write_report(run_dir, report, tokens)
    return report


def local_gpus() -> int:
    """GPUs that a process here would see, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() not in ("", "-1")])
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU") for line in answer.stdout.splitlines())
