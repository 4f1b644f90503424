"""A training world that somebody else started: torchrun over machines, srun, Ray.

Every rank runs the same command; a rank reads its place in its environment. Rank 0 holds the
run directory, which all ranks must see under the same path. Our own passes run in this process
where it has torch. A trainer's own code runs in a further process per rank, which takes over the
rank's place: the same RANK, WORLD_SIZE and MASTER_ADDR, and another port.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mismatch.codec import to_json
from mismatch.errors import MismatchError, first_line
from mismatch.experiments.scoring_passes import by_load
from mismatch.processes.adapter import (
    LABEL,
    askable,
    keep_scores,
    missing_corner,
    outputs_of,
    write_job,
)
from mismatch.processes.launch import EXACT, started, worker_path
from mismatch.processes.tasks import TrainerSession, write_session
from mismatch.run import resume, store
from mismatch.run.machine import local_gpus
from mismatch.run.messages import (
    clear_errors,
    error_files,
    error_path,
    pass_label,
    read_error,
    write_error,
)
from mismatch.specs import FILE_SCORER, OWN_SCORER, Pass
from mismatch.types import Rollout

PORT = "29500"  # torch's own default
POD = {"PET_NNODES"}  # of torchrun's variables that which Kubeflow's operator sets for every pod
MEET_S = 600.0  # until all ranks have started Python and read the run, over a network file system
GRACE_S = 10.0  # for a rank to see by itself that another has failed
POLL_S = 0.05
SHARED = (
    "the run directory must be on a file system that all machines share, and the command the same "
    "everywhere"
)
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


def score(
    run_dir: Path, passes: list[Pass], seed: int, world: Launched, note: Callable[[str], None]
) -> None:
    """Run this rank's part in the passes that the run does not hold yet; all ranks must call it.

    Args:
        passes: the trainer's own first.
        seed: of the run.

    Raises:
        MismatchError: see mismatch/processes/workers/train.py; another rank was lost, or a trainer
            that starts its ranks itself.
    """
    own_torch = find_spec("torch") is not None

    def there(pass_: Pass) -> bool:
        here = own_torch and pass_.spec.scorer == OWN_SCORER
        python = None if here else passes[0].spec.python
        return resume.scoring_done(run_dir, pass_.name, pass_.spec, python)

    missing = [pass_ for pass_ in passes if not there(pass_)]
    if not missing:
        note("score: there already")
        return
    trainer = passes[0].spec
    if trainer.scorer == FILE_SCORER or trainer.accelerate_config is not None:
        fault = "--scorer file" if trainer.scorer == FILE_SCORER else "--accelerate-config"
        fault += " needs no launcher: it reads a file, or starts the ranks itself"
        fix = "start mismatch without torchrun or srun; a trainer over several machines can score "
        fix += "a file: mismatch tokens RUN FILE, docs/how-to/your-trainer.md"
        raise MismatchError(fault, fix)
    theirs = [pass_ for pass_ in missing if pass_.spec.scorer != OWN_SCORER]
    ours = [pass_ for pass_ in missing if pass_.spec.scorer == OWN_SCORER]
    jobs = by_load(ours)
    session = TrainerSession(run_dir, tuple(jobs), same_on_all_ranks=True)
    rollout = store.load_rollout(run_dir)

    def begin() -> dict[str, Any]:
        """Leave what all ranks read, and nothing of an earlier start."""
        for label in ("train", LABEL):
            clear_errors(run_dir, label)
        for pass_ in missing:
            error_path(run_dir, pass_label(pass_.name)).unlink(missing_ok=True)
        if jobs:
            write_session(session)
        asked = askable(theirs, run_dir)
        if asked:
            write_job(asked, run_dir, rollout, seed, f"{LABEL}-rank{{rank}}.log")
        return {"asked": [pass_.name for pass_ in asked], "port": free_port()}

    if not theirs and own_torch:  # the ranks meet in torch's own way
        if world.rank == 0:
            begin()
    else:
        said = agreed(run_dir, world, json.dumps(to_json([run_dir, missing])), begin)
        theirs = [pass_ for pass_ in theirs if pass_.name in said["asked"]]
        if theirs:
            note(f"score: {trainer.scorer}, {world.size} ranks, {len(theirs)} passes")
            score_with_adapter(run_dir, theirs, rollout, world, said["port"], note)
    if not jobs:
        return
    note(f"score: {world.size} ranks, {len(jobs)} passes")
    if not own_torch:
        session_file = run_dir / "jobs" / f"{session.label}.json"
        module = "mismatch.processes.workers.session"
        run_rank(session.label, module, session_file, trainer.python, run_dir, world, {})
        return
    from mismatch.processes.workers.train import run

    try:
        run(session)
    except RuntimeError as error:
        fault = f"rank {world.rank} lost the others: {first_line(error)}"
        fix = "the rank that failed first says why; the same command runs the missing passes"
        raise MismatchError(fault, fix) from error


def score_with_adapter(
    run_dir: Path,
    passes: list[Pass],
    rollout: Rollout,
    world: Launched,
    port: int,
    note: Callable[[str], None],
) -> None:
    """Run this rank of a trainer's own code; rank 0 keeps what all ranks scored.

    Args:
        port: where these ranks meet. The launcher's own port is left to our passes, which follow.
    """
    trainer = passes[0].spec
    env = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if local_gpus() == 1:  # given to each rank by the launcher (srun --gpus-per-task=1)
        env["LOCAL_RANK"] = "0"
    job = run_dir / "jobs" / f"{LABEL}.json"
    try:
        run_rank(LABEL, "mismatch.trainers.worker", job, trainer.python, run_dir, world, env)
    except MismatchError as error:
        corner = missing_corner(outputs_of(passes, run_dir))
        if not corner:
            raise
        if world.rank == 0:
            write_error(run_dir, pass_label(corner), error)
            note(f"the trainer in float32: {error.message}")
    if world.rank == 0:
        keep_scores(passes, run_dir, rollout)


def run_rank(
    label: str,
    module: str,
    job: Path,
    python: str | None,
    run_dir: Path,
    world: Launched,
    env: dict[str, str],
) -> None:
    """Run one rank in a new process, and end it where another rank has failed.

    Raises:
        MismatchError: a rank failed; with the error of the one that failed first.
    """
    own = f"{label}-rank{world.rank}"
    command = [python or sys.executable, "-m", module, str(job)]
    with tempfile.TemporaryDirectory(prefix="mismatch-") as folder:  # machines differ in paths
        env = {**worker_path(Path(folder)), **EXACT, **env}
        with started(own, command, run_dir, env=env) as worker:
            watch, end = worker.watch(), math.inf
            try:
                while not worker.ended():
                    worker.require_activity(watch)
                    failed = bool(error_files(run_dir, label))
                    end = min(end, time.monotonic() + GRACE_S) if failed else math.inf
                    if time.monotonic() > end:
                        raise MismatchError(f"{own} was ended: another rank has failed")
                    time.sleep(POLL_S)
            except MismatchError as error:
                if not error_path(run_dir, own).exists():
                    write_error(run_dir, own, error)
                files = error_files(run_dir, label)
                first = min(files, key=lambda file: file.stat().st_mtime_ns, default=None)
                raise (read_error(run_dir, first.stem) if first else None) or error from error


def agreed(
    run_dir: Path, world: Launched, command: str, begin: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return on all ranks what rank 0 says once all ranks of this start are there.

    It takes a file system and no port. Each rank leaves a number that it drew; an answer that does
    not repeat it is of an earlier start. Rank 0 clears the folder first; a rank whose number is
    gone leaves it again.

    Args:
        command: what this rank is about to do, which must be the same on all.
        begin: run by rank 0 before it answers.

    Raises:
        MismatchError: a rank did not come in time, or is about to do something else.
    """
    room, own = run_dir / "jobs" / "ranks", uuid.uuid4().hex
    answer, end = room / "answer.json", time.monotonic() + MEET_S
    if world.rank == 0:
        shutil.rmtree(room, ignore_errors=True)
    while time.monotonic() < end:
        with suppress(OSError, ValueError):  # rank 0 clears the folder meanwhile
            room.mkdir(parents=True, exist_ok=True)
            there = {*os.listdir(room)}  # asks a network file system's server, as no path does
            if world.rank == 0:
                names = {str(rank): f"{rank}.json" for rank in range(1, world.size)}
                if there >= set(names.values()):
                    said = {n: json.loads((room / name).read_text()) for n, name in names.items()}
                    break
            elif f"{world.rank}.json" not in there:
                partial = room / f"{world.rank}.partial"
                partial.write_text(json.dumps({"number": own, "command": command}))
                partial.replace(room / f"{world.rank}.json")
            elif answer.name in there:
                found: dict[str, Any] = json.loads(answer.read_text())
                if found["numbers"].get(str(world.rank)) == own:
                    if fault := found["fault"]:
                        raise MismatchError(fault, found["fix"])
                    return found
        time.sleep(POLL_S)
    else:
        fault = f"rank {world.rank} waited {MEET_S:.0f} s in {room} for the other ranks"
        raise MismatchError(fault, SHARED)
    numbers = {rank: entry["number"] for rank, entry in said.items()}
    decided: dict[str, Any] = {"numbers": numbers, "fault": "", "fix": ""}
    try:
        if any(entry["command"] != command for entry in said.values()):
            raise MismatchError(f"the ranks see different things in {run_dir}", SHARED)
        decided |= begin()
    except MismatchError as error:
        store.write_json(answer, decided | {"fault": error.message, "fix": error.fix})
        raise
    store.write_json(answer, decided)
    return decided


def free_port() -> int:
    """Return a port of this machine that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
