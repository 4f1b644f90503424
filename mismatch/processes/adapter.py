"""Run a trainer adapter in the user's interpreter, and keep its log-probabilities as scorings.

Nothing here imports torch or a framework: the adapter's process leaves arrays and facts in files
(mismatch/trainers/worker.py), and this process makes artefacts of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.errors import MismatchError
from mismatch.processes.launch import Worker, started, worker_path
from mismatch.run import store
from mismatch.run.machine import visible_as
from mismatch.run.messages import pass_label, write_error
from mismatch.run.store import ALONE, REGROUPED, REPEATED, TRAIN, TRAINER_FLOAT32
from mismatch.specs import Pass, TrainSpec
from mismatch.types import ROUTES, NotTested, Rollout, Scoring

if TYPE_CHECKING:
    from mismatch.processes.stages import Stages

LABEL = "trainer"
VARIANTS = {
    TRAIN: "own",
    REGROUPED: "regrouped",
    REPEATED: "repeated",
    ALONE: "alone",
    TRAINER_FLOAT32: "fp32",
}


def score_with_adapter(stages: Stages, passes: list[Pass], *beside: Worker) -> None:
    """Score passes with the adapter of their spec, all in one process per rank.

    Raises:
        MismatchError: the adapter failed, or its numbers do not fit the rollout.
    """
    from mismatch.processes.stages import EXACT, rendezvous_args

    spec, run_dir = passes[0].spec, stages.run_dir
    jobs = run_dir / "jobs"
    rollout = store.load_rollout(run_dir)
    jobs.mkdir(exist_ok=True)
    tokens = jobs / f"{LABEL}-tokens.npz"
    np.savez(tokens, ids=rollout.token_ids, offsets=rollout.offsets, mask=rollout.action_mask)
    outputs = {pass_.name: jobs / f"{LABEL}-{VARIANTS[pass_.name]}.npz" for pass_ in passes}
    job = {
        "run_dir": str(run_dir),
        "label": LABEL,
        "trainer": spec.scorer,
        "job": {
            "model": spec.model,
            "revision": spec.revision,
            "trust_remote_code": spec.trust_remote_code,
            "config": spec.scorer_config,
            "overrides": list(spec.scorer_overrides),
            "attention": spec.attention,
            "temperature": rollout.sampling.scored_temperature,
            "micro_batch_tokens": spec.micro_batch_tokens,
            "seed": stages.spec.seed,
        },
        "tokens": str(tokens.resolve()),
        "passes": [
            {"variant": VARIANTS[name], "out": str(path.resolve())}
            for name, path in outputs.items()
        ],
    }
    path = store.write_json(jobs / f"{LABEL}.json", job)
    ranks = stages.spec.nproc_per_node
    command = [
        *launcher(spec, ranks, rendezvous_args()),
        *("-m", "mismatch.trainers.worker", str(path.resolve())),
    ]
    env = {**worker_path(jobs), **EXACT, **visible_as(stages.placement.trainer)}
    title = f"score: {spec.scorer}'s own code, {ranks} rank{'s' if ranks > 1 else ''}"
    try:
        with started(LABEL, command, run_dir, env=env) as worker:
            stages.wait(worker, LABEL, title, *beside)
    except MismatchError as error:
        last = [pass_ for pass_ in passes if pass_.name == TRAINER_FLOAT32]
        passes = [pass_ for pass_ in passes if pass_ not in last]
        if not last or not passes or not all(outputs[p.name].exists() for p in passes):
            raise
        write_error(run_dir, pass_label(TRAINER_FLOAT32), error)  # a check can do without it
        stages.narrator.note(f"the trainer in float32: {error.message}")
    for pass_ in passes:
        scoring = scoring_of(outputs[pass_.name], pass_, rollout)
        store.save_scoring(run_dir, scoring, rollout, made_by=pass_.spec)
        outputs[pass_.name].unlink()
    tokens.unlink()


def launcher(spec: TrainSpec, ranks: int, rendezvous: Iterable[str]) -> list[str]:
    """Return how the adapter's ranks are started: by torchrun, or as accelerate starts a run."""
    python = spec.python or sys.executable
    if spec.accelerate_config is not None:
        config = str(Path(spec.accelerate_config).resolve())
        launch = ["-m", "accelerate.commands.launch", "--config_file", config]
        return [python, *launch, "--num_processes", str(ranks)]
    torchrun = ["-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(ranks)]
    return [python, *torchrun]


def scoring_of(path: Path, pass_: Pass, rollout: Rollout) -> Scoring:
    """Return what an adapter's process left in a file.

    Raises:
        MismatchError: not one finite number per action token, or one above 0.
    """
    with np.load(path) as arrays:
        logprobs = arrays["logprobs"].astype(np.float64)
        entropy = arrays["entropy"].astype(np.float64) if "entropy" in arrays else None
        said: dict[str, Any] = json.loads(str(arrays["facts"]))
    scorer = pass_.spec.scorer
    if len(logprobs) != rollout.n_actions:
        raise MismatchError(
            f"{scorer} returned {len(logprobs)} log-probabilities for {rollout.n_actions} tokens",
            "return one per action token",
        )
    if np.nanmax(logprobs, initial=0.0) > 1e-3:
        raise MismatchError(
            f"{scorer} returned {np.nanmax(logprobs):.3g} as a log-probability",
            "return natural logarithms of probabilities, which are at most 0",
        )
    facts = said.pop("more") | said
    missing = NotTested(ROUTES, f"{facts['code']} returns no routed experts")
    fingerprint = facts | {
        "mode": "train",
        "backend": scorer,
        "model": pass_.spec.model,
        "revision": pass_.spec.revision,
        "weights_form": pass_.spec.weights,
        "attention_requested": pass_.spec.attention,
        "temperature": rollout.sampling.temperature,
        "logprobs_temperature": rollout.sampling.scored_temperature,
        "logprobs_truncated": False,
        "notes": list(facts["notes"]),
        "not_tested": [{"what": missing.what, "reason": missing.reason, "how": missing.how}],
    }
    return Scoring(
        name=pass_.name,
        token_ids=rollout.token_ids[rollout.actions],
        logprobs=logprobs,
        entropy=entropy,
        fingerprint=fingerprint,
    )
