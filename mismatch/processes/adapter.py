"""Run a trainer adapter in the user's interpreter, and keep its log-probabilities as scorings.

Nothing here imports torch or a framework: the adapter's process leaves arrays and facts in files
(mismatch/trainers/worker.py), and this process makes artefacts of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.facts import known
from mismatch.keys import ALONE, REGROUPED, REPEATED, TRAIN, TRAINER_FLOAT32
from mismatch.models.config import is_moe
from mismatch.models.derived import form_name
from mismatch.processes.launch import EXACT, rendezvous_args, worker_path
from mismatch.run import store
from mismatch.run.machine import visible_as
from mismatch.run.messages import pass_label, write_error
from mismatch.specs import CheckSpec, Pass, TrainSpec
from mismatch.trainers.protocol import require_logprobs
from mismatch.types import ROUTES, NotTested, Rollout, Scoring, SideFacts

LABEL = "trainer"
VARIANTS: dict[str, str] = {
    TRAIN: "own",
    REGROUPED: "regrouped",
    REPEATED: "repeated",
    ALONE: "alone",
    TRAINER_FLOAT32: "fp32",
}


def variant_of(name: str) -> str:
    """Return how a pass is scored; one that ``score --name`` adds is scored as the run does."""
    return VARIANTS.get(name, "own")


@lru_cache
def no_float32(scorer: str, python: str | None) -> str:
    """Return why a user's own code cannot be asked for float32; "": it can.

    The code is imported in the user's interpreter. So a mistake there ends a check before anything
    is sampled, and no rank begins a pass that cannot work.

    Raises:
        MismatchError: it cannot be imported.
    """
    if ":" not in scorer:
        return ""
    command = [python or sys.executable, "-m", "mismatch.trainers.look", scorer]
    with tempfile.TemporaryDirectory(prefix="mismatch-") as folder:
        env = {**os.environ, **worker_path(Path(folder)), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        log = "\n".join(f"    {line[:200]}" for line in done.stderr.splitlines()[-12:])
        fault = f"--scorer {scorer}: importing it ended its process (exit code {done.returncode})"
        raise MismatchError(fault, f"import it: {command[0]} -c 'import …'", log) from error
    if "message" in found:
        raise MismatchError(found["message"], found["fix"])
    if found["float32"]:
        return ""
    if found["function"]:
        return f"{scorer} is a function, which cannot be asked for float32"
    return f"{scorer} says that it cannot score in float32"


def askable(passes: list[Pass], run_dir: Path) -> list[Pass]:
    """Return the passes that this trainer can score; a reason is left for float32 where it cannot.

    Raises:
        MismatchError: the user's own code cannot be imported.
    """
    reason = no_float32(passes[0].spec.scorer, passes[0].spec.python) if passes else ""
    if not reason:
        return passes
    if any(pass_.name == TRAINER_FLOAT32 for pass_ in passes):
        lacking = MismatchError(reason, "a class can score in float32: docs/how-to/your-trainer.md")
        write_error(run_dir, pass_label(TRAINER_FLOAT32), lacking)
    return [pass_ for pass_ in passes if pass_.name != TRAINER_FLOAT32]


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
    job = write_job(passes, run_dir, rollout, spec.seed, f"{LABEL}.log")
    command = [
        *launcher(passes[0].spec, spec.nproc_per_node),
        *("-m", "mismatch.trainers.worker", str(job)),
    ]
    env = {**worker_path(job.parent), **EXACT, **visible_as(gpus)}
    return AdapterRun(command, env, outputs_of(passes, run_dir))


def outputs_of(passes: Sequence[Pass], run_dir: Path) -> dict[str, Path]:
    """Return the file that rank 0 leaves of each pass, by the pass's name."""
    jobs = run_dir.resolve() / "jobs"
    return {pass_.name: jobs / f"{LABEL}-{variant_of(pass_.name)}.npz" for pass_ in passes}


def write_job(passes: Sequence[Pass], run_dir: Path, rollout: Rollout, seed: int, log: str) -> Path:
    """Write what an adapter's ranks read: their job, and the tokens.

    Args:
        log: name of a rank's log; "{rank}" stands for its number.
    """
    train = passes[0].spec
    jobs = run_dir.resolve() / "jobs"
    jobs.mkdir(exist_ok=True)
    for path in jobs.glob(f"{LABEL}-*.npz"):  # of ranks and passes of an earlier start
        path.unlink()
    tokens = jobs / f"{LABEL}-tokens.npz"
    np.savez(tokens, ids=rollout.token_ids, offsets=rollout.offsets, mask=rollout.action_mask)
    outputs = outputs_of(passes, run_dir).items()
    job = {
        "run_dir": str(run_dir),
        "label": LABEL,
        "log": log,
        "trainer": train.scorer,
        "job": {
            "model": train.model,
            "revision": train.revision,
            "trust_remote_code": train.trust_remote_code,
            "config": train.scorer_config,
            "overrides": list(train.scorer_overrides),
            "attention": train.attention,
            "temperature": rollout.sampling.scored_temperature,
            "dtype": train.dtype,
            "micro_batch_tokens": train.micro_batch_tokens,
            "seed": seed,
        },
        "tokens": str(tokens),
        "passes": [{"variant": variant_of(name), "out": str(path)} for name, path in outputs],
    }
    return store.write_json(jobs / f"{LABEL}.json", job)


def missing_corner(outputs: dict[str, Path]) -> str:
    """Return the name of the float32 pass where all others are there and it alone is not."""
    absent = [name for name, path in outputs.items() if not path.exists()]
    return TRAINER_FLOAT32 if absent == [TRAINER_FLOAT32] and len(outputs) > 1 else ""


def keep_scores(passes: Sequence[Pass], run_dir: Path, rollout: Rollout) -> None:
    """Make scorings of what an adapter's ranks left."""
    for name, path in outputs_of(passes, run_dir).items():
        if path.exists():
            pass_ = next(pass_ for pass_ in passes if pass_.name == name)
            scoring = scoring_of(path, pass_, rollout)
            store.save_scoring(run_dir, scoring, rollout, pass_.spec, python=pass_.spec.python)


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
    require_logprobs(logprobs, scorer)
    missing = []
    if is_moe(pass_.spec.model, pass_.spec.revision) is not False:
        missing.append(NotTested(ROUTES, f"{facts['code']} returns no routed experts"))
    fingerprint: SideFacts = {
        **known(facts),
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
