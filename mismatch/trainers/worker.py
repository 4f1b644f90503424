"""Score a run's tokens with a trainer adapter: ``python -m mismatch.trainers.worker JOB.json``.

Runs under torchrun in the interpreter of the user's environment. JOB.json::

    {"run_dir": "runs/x", "label": "trainer", "trainer": "verl", "job": {…TrainerJob…},
     "tokens": "runs/x/jobs/trainer-tokens.npz",
     "passes": [{"variant": "own", "out": "runs/x/jobs/trainer-own.npz"}, …]}

Rank 0 writes each pass's file: ``logprobs`` [A], ``entropy`` [A] where the framework gives it, and
``facts``, a JSON text. What a file needs to become a scoring is the parent's work, so this process
needs numpy and the framework alone.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.errors import MismatchError, did_you_mean, first_line
from mismatch.facts import SideFacts
from mismatch.run.messages import exit_worker, report_ready, report_timing, say, write_error
from mismatch.trainers.protocol import Scored, Tokens, Trainer, TrainerJob

BUILT_IN = {"verl": "mismatch.trainers.verl:Verl", "trl": "mismatch.trainers.trl:Trl"}


def main(arguments: list[str]) -> int:
    (path,) = arguments
    job = json.loads(Path(path).read_text("utf-8"))
    rank = int(os.environ.get("RANK", "0"))
    try:
        run(job, rank)
    except MismatchError as error:
        say(f"rank {rank}: {error}")
        write_error(job["run_dir"], f"{job['label']}-rank{rank}", error)
        return 2
    except Exception as error:
        traceback.print_exc()
        cause: BaseException = error
        while cause.__cause__ is not None:  # frameworks wrap what went wrong
            cause = cause.__cause__
        what = f"{job['trainer']}: {type(cause).__name__}: {first_line(cause)}"
        fix = f"the traceback is in {job['run_dir']}/logs/{job['label']}.log"
        write_error(job["run_dir"], f"{job['label']}-rank{rank}", MismatchError(what, fix))
        return 2
    return 0


def run(job: dict[str, Any], rank: int) -> None:
    """Load the trainer in each precision that is asked for, and score every pass."""
    with np.load(job["tokens"]) as arrays:
        tokens = Tokens(arrays["ids"], arrays["offsets"], arrays["mask"])
    wanted = TrainerJob(**job["job"])
    kind = load(job["trainer"])
    ready = False
    for precision in ("own", "fp32"):
        passes = [p for p in job["passes"] if (p["variant"] == "fp32") == (precision == "fp32")]
        if not passes:
            continue
        trainer: Trainer = kind(replace(wanted, precision=precision))
        if rank == 0 and not ready:
            report_ready()
        ready = True
        for number, entry in enumerate(passes):
            start = time.monotonic()
            say(f"progress score {entry['variant']} {number + 1}/{len(passes)}")
            scored = gathered(trainer.score(tokens, entry["variant"]))
            seconds = time.monotonic() - start
            if rank == 0:
                save(Path(entry["out"]), tokens, scored, trainer, seconds)
                report_timing(entry["variant"], seconds)
        del trainer


def place_of(name: str) -> tuple[str, str]:
    """Return module and attribute that a name means; nothing is imported.

    Raises:
        MismatchError: no trainer has this name.
    """
    module_name, colon, attribute = BUILT_IN.get(name, name).partition(":")
    if not (colon and module_name and attribute):
        raise MismatchError(
            f"--scorer {name}: no such trainer",
            f"{did_you_mean(name, BUILT_IN)}one of {', '.join(BUILT_IN)}, or your own as "
            "package.module:Class",
        )
    return module_name, attribute


def load(name: str) -> Any:
    """Return the class or function that a name means.

    Raises:
        MismatchError: it cannot be imported, or is not there.
    """
    module_name, attribute = place_of(name)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        kind = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise MismatchError(
            f"--scorer {name}: {first_line(error)} (in {sys.executable})",
            "name the interpreter that has it: --train-python PATH",
        ) from error
    if isinstance(kind, type):
        return kind
    from mismatch.trainers.function import FunctionTrainer

    return lambda job: FunctionTrainer(kind, name, job)


def gathered(scored: Scored) -> list[Scored]:
    """Return every rank's scores, on all ranks."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [scored]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, scored)
    return parts


def save(path: Path, tokens: Tokens, parts: list[Scored], trainer: Trainer, seconds: float) -> None:
    """Write one pass, its sequences in order.

    Raises:
        MismatchError: a sequence without scores, or with a wrong number of them.
    """
    logprobs: dict[int, Any] = {}
    entropy: dict[int, Any] = {}
    for part in parts:
        logprobs |= dict(zip(part.sequences, part.logprobs, strict=True))
        if part.entropy is not None:
            entropy |= dict(zip(part.sequences, part.entropy, strict=True))
    for number, mask in enumerate(tokens.masks()):
        count, given = int(mask.sum()), len(logprobs.get(number, ()))
        if count != given:
            raise MismatchError(
                f"the trainer returned {given} log-probabilities for sequence {number}, "
                f"which has {count} action tokens",
                "score every action token of every sequence once",
            )
    order = range(len(tokens.lengths))
    arrays = {"logprobs": np.concatenate([logprobs[n] for n in order]).astype(np.float32)}
    if len(entropy) == len(order):
        arrays["entropy"] = np.concatenate([entropy[n] for n in order]).astype(np.float32)
    measured: SideFacts = {
        "logprobs_dtype": parts[0].dtype,
        "seconds": round(seconds, 3),
        "versions": versions(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "device": device_name(),
    }
    facts = {**asdict(trainer.facts()), **measured}
    with open(path, "wb") as file:
        np.savez(file, facts=np.array(json.dumps(facts)), **arrays)


def versions() -> dict[str, str]:
    """Return the versions of what can change a number and is loaded here."""
    names = ("torch", "transformers", "verl", "trl", "accelerate", "flash_attn", "numpy")
    loaded = {name: sys.modules[name] for name in names if name in sys.modules}
    found = {name: str(getattr(module, "__version__", "")) for name, module in loaded.items()}
    return {"python": platform.python_version(), **{k: v for k, v in found.items() if v}}


def device_name() -> str:
    """Return the name of the GPU that computes, or "cpu"."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "cpu"
    name: str = torch.cuda.get_device_name()
    return name


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
