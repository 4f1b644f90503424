"""Run a trainer adapter in the user's interpreter, and keep its log-probabilities as scorings.

Nothing here imports torch or a framework: the adapter's process leaves arrays and facts in files
(mismatch/trainers/worker.py), and this process makes artefacts of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.models.config import is_moe
from mismatch.models.derived import form_name
from mismatch.processes.launch import EXACT, rendezvous_args, worker_path
from mismatch.run import store
from mismatch.run.machine import visible_as
from mismatch.run.store import ALONE, REGROUPED, REPEATED, TRAIN, TRAINER_FLOAT32
from mismatch.specs import CheckSpec, Pass, TrainSpec
from mismatch.types import ROUTES, NotTested, Rollout, Scoring, SideFacts

LABEL = "trainer"
VARIANTS = {
    TRAIN: "own",
    REGROUPED: "regrouped",
    REPEATED: "repeated",
    ALONE: "alone",
    TRAINER_FLOAT32: "fp32",
}


@dataclass(frozen=True)
class AdapterRun:
    """How an adapter's ranks are started, and where they leave what they scored."""

    command: list[str]
    env: dict[str, str]
    outputs: dict[str, Path]
    """Name of a pass -> file."""


def prepared(
    spec: CheckSpec, passes: Sequence[Pass], run_dir: Path, rollout: Rollout, gpus: tuple[int, ...]
) -> AdapterRun:
    """Write the tokens and the job of an adapter that scores these passes."""
    train = passes[0].spec
    jobs = run_dir.resolve() / "jobs"
    jobs.mkdir(exist_ok=True)
    tokens = jobs / f"{LABEL}-tokens.npz"
    np.savez(tokens, ids=rollout.token_ids, offsets=rollout.offsets, mask=rollout.action_mask)
    outputs = {pass_.name: jobs / f"{LABEL}-{VARIANTS[pass_.name]}.npz" for pass_ in passes}
    for path in outputs.values():
        path.unlink(missing_ok=True)
    job = {
        "run_dir": str(run_dir),
        "label": LABEL,
        "trainer": train.scorer,
        "job": {
            "model": train.model,
            "revision": train.revision,
            "trust_remote_code": train.trust_remote_code,
            "config": train.scorer_config,
            "overrides": list(train.scorer_overrides),
            "attention": train.attention,
            "temperature": rollout.sampling.scored_temperature,
            "micro_batch_tokens": train.micro_batch_tokens,
            "seed": spec.seed,
        },
        "tokens": str(tokens),
        "passes": [{"variant": VARIANTS[name], "out": str(path)} for name, path in outputs.items()],
    }
    path = store.write_json(jobs / f"{LABEL}.json", job)
    command = [
        *launcher(train, spec.nproc_per_node),
        *("-m", "mismatch.trainers.worker", str(path)),
    ]
    return AdapterRun(command, {**worker_path(jobs), **EXACT, **visible_as(gpus)}, outputs)


def missing_corner(passes: Sequence[Pass], run: AdapterRun) -> str:
    """Return the name of the float32 pass where all others are there and it alone is not."""
    absent = [pass_.name for pass_ in passes if not run.outputs[pass_.name].exists()]
    return TRAINER_FLOAT32 if absent == [TRAINER_FLOAT32] and len(passes) > 1 else ""


def launcher(spec: TrainSpec, ranks: int) -> list[str]:
    """Return how the adapter's ranks are started: by torchrun, or as accelerate starts a run."""
    python = spec.python or sys.executable
    if spec.accelerate_config is not None:
        config = str(Path(spec.accelerate_config).resolve())
        launch = ["-m", "accelerate.commands.launch", "--config_file", config]
        return [python, *launch, "--num_processes", str(ranks)]
    torchrun = ["-m", "torch.distributed.run", *rendezvous_args()]
    return [python, *torchrun, "--nproc-per-node", str(ranks)]


def scoring_of(path: Path, pass_: Pass, rollout: Rollout) -> Scoring:
    """Return what an adapter's process left in a file; errors as of :func:`scoring_from`."""
    with np.load(path) as file:
        facts = json.loads(str(file["facts"]))
        arrays = {name: file[name] for name in ("logprobs", "entropy") if name in file}
    return scoring_from(arrays, facts.pop("more") | facts, pass_, rollout)


def scoring_from(
    arrays: dict[str, Any], facts: SideFacts, pass_: Pass, rollout: Rollout
) -> Scoring:
    """Return a scoring of another trainer's numbers.

    Args:
        arrays: ``logprobs`` [A], and ``entropy`` [A] where there is one.

    Raises:
        MismatchError: not one number per action token, or one above 0.
    """
    logprobs = arrays["logprobs"].astype(np.float64)
    entropy = arrays["entropy"].astype(np.float64) if "entropy" in arrays else None
    scorer = pass_.spec.scorer
    if len(logprobs) != rollout.n_actions:
        raise MismatchError(
            f"{scorer} returned {len(logprobs)} log-probabilities for {rollout.n_actions} tokens",
            "return one per action token",
        )
    if np.nanmax(logprobs, initial=0.0) > 1e-3:
        fault = f"{scorer} returned {np.nanmax(logprobs):.3g} as a log-probability"
        fix = "return natural logarithms of probabilities, which are at most 0"
        raise MismatchError(fault, fix)
    missing = []
    if is_moe(pass_.spec.model, pass_.spec.revision) is not False:
        missing.append(NotTested(ROUTES, f"{facts['code']} returns no routed experts"))
    fingerprint: SideFacts = {
        **facts,
        "mode": "train",
        "backend": scorer,
        "model": pass_.spec.model,
        "revision": pass_.spec.revision,
        "weights_form": form_name(pass_.spec.weights, Path(pass_.spec.model)),
        "attention_requested": pass_.spec.attention,
        "temperature": rollout.sampling.temperature,
        "logprobs_temperature": rollout.sampling.scored_temperature,
        "logprobs_truncated": False,
        "notes": list(facts["notes"]),
        "replaced": list(facts.get("replaced", ())),
        "not_tested": to_json(missing),
    }
    return Scoring(
        name=pass_.name,
        token_ids=rollout.token_ids[rollout.actions],
        logprobs=logprobs,
        entropy=entropy,
        fingerprint=fingerprint,
    )
