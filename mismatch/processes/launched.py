"""A training world that somebody else started: torchrun over machines, srun, Ray.

Every rank runs the same command; a rank reads its place in its environment. Rank 0 holds the
run directory, which all ranks must see under the same path. Nothing is started here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mismatch.errors import MismatchError, first_line
from mismatch.experiments.jobs import Job
from mismatch.experiments.scoring_passes import by_load
from mismatch.processes.tasks import TrainerSession, write_session
from mismatch.run import resume
from mismatch.run.messages import clear_errors, error_path, pass_label
from mismatch.specs import OWN_SCORER, Pass

PORT = "29500"  # torch's own default
POD = {"PET_NNODES"}  # of torchrun's variables that which Kubeflow's operator sets for every pod
SLURM = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
}


@dataclass(frozen=True, slots=True)
class Launched:
    """This process's place in a world that was launched for it.

    Attributes:
        local_size: ranks of this machine.
    """

    rank: int
    size: int
    local_size: int


def launched() -> Launched | None:
    """Return the place that a launcher gave this process; None where it was started alone.

    torchrun and Ray set RANK, WORLD_SIZE and MASTER_ADDR. Of srun's variables those of a step are
    taken, and put under torch's names; MASTER_ADDR is the user's to set.

    Raises:
        MismatchError: a step of several tasks without MASTER_ADDR, places of pods and not of
            ranks, or numbers that are none.
    """
    environment = os.environ
    if "RANK" not in environment and int(environment.get(SLURM["WORLD_SIZE"], "1")) > 1:
        if "MASTER_ADDR" not in environment:
            fault = "srun started several ranks, and there is no MASTER_ADDR for them to meet at"
            fix = "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
            raise MismatchError(fault, fix)
        environment.update({name: environment[given] for name, given in SLURM.items()})
        environment.setdefault("MASTER_PORT", PORT)
        tasks = environment.get("SLURM_NTASKS_PER_NODE", environment["WORLD_SIZE"])
        environment.setdefault("LOCAL_WORLD_SIZE", tasks)
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return None
    if "LOCAL_RANK" not in environment and environment.keys() >= POD:
        fault = "RANK and WORLD_SIZE count pods here (Kubeflow's PET_NNODES is set), not ranks"
        fix = "in every pod: torchrun --no-python mismatch score …; torchrun reads PET_*"
        raise MismatchError(fault, fix)
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return Launched(rank, size, int(environment.get("LOCAL_WORLD_SIZE", size)))
    except ValueError as error:
        fault = f"RANK or WORLD_SIZE is no number: {error}"
        raise MismatchError(fault, "start it with torchrun, srun or Ray") from error


def score(run_dir: Path, passes: list[Pass], world: Launched, note: Callable[[str], None]) -> None:
    """Run this rank's part in the passes that the run does not hold yet; all ranks must call it.

    Args:
        passes: the trainer's own first.

    Raises:
        MismatchError: see mismatch/processes/workers/train.py; another rank was lost.
    """
    from mismatch.processes.workers.train import run

    missing = [p for p in passes if not resume.scoring_done(run_dir, p.name, p.spec)]
    if not missing:
        note("score: there already")
        return
    if passes[0].spec.scorer != OWN_SCORER:
        fault = f"--scorer {passes[0].spec.scorer} starts its processes itself"
        raise MismatchError(fault, "start mismatch itself, without torchrun or srun")
    jobs = by_load([Job.of_check(run_dir, pass_, passes[0]) for pass_ in missing])
    session = TrainerSession(run_dir, tuple(jobs), same_on_all_ranks=True)
    if world.rank == 0:
        clear_errors(run_dir, "train")
        for pass_ in missing:
            error_path(run_dir, pass_label(pass_.name)).unlink(missing_ok=True)
        write_session(session)
        note(f"score: {world.size} ranks, {len(jobs)} passes")
    try:
        run(session)
    except RuntimeError as error:
        fault = f"rank {world.rank} lost the others: {first_line(error)}"
        fix = "the rank that failed first says why; the same command runs the missing passes"
        raise MismatchError(fault, fix) from error
