"""Score a run's tokens with a trainer adapter: ``python -m mismatch.trainers.worker JOB.json``.

Runs under torchrun in the interpreter of the user's environment. JOB.json::

    {"run_dir": "runs/x", "label": "trainer", "log": "trainer-rank{rank}.log",
     "trainer": "verl", "job": {…TrainerJob…}, "tokens": "runs/x/jobs/trainer-tokens.npz",
     "passes": [{"variant": "own", "out": "runs/x/jobs/trainer-own.npz"}, …]}

Every rank leaves the share that it scored in a file; rank 0 joins them to the file of the pass:
``logprobs`` [A], ``entropy`` [A] where the framework gives it, and ``facts``, a JSON text. So no
trainer has to make a process group for it, and no rank begins a pass before the last one is saved.
What a file needs to become a scoring is the parent's work, so this process needs numpy and the
framework alone.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.errors import MismatchError, WrongAnswer, did_you_mean, first_line
from mismatch.facts import SideFacts
from mismatch.run.messages import exit_worker, report_ready, report_timing, say, write_error
from mismatch.run.provenance import redact
from mismatch.trainers.protocol import Scored, Tokens, Trainer, TrainerJob, require_logprobs

BUILT_IN = {"verl": "mismatch.trainers.verl:Verl", "trl": "mismatch.trainers.trl:Trl"}
POLL_S = 0.05


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
        what = f"{job['trainer']}: {type(cause).__name__}: {first_line(cause)}{line_of(cause)}"
        fix = f"the traceback is in {job['run_dir']}/logs/{job['log'].format(rank=rank)}"
        write_error(job["run_dir"], f"{job['label']}-rank{rank}", MismatchError(what, fix))
        return 2
    return 0


def run(job: dict[str, Any], rank: int) -> None:
    """Load the trainer in each precision that is asked for, and score every pass."""
    with np.load(job["tokens"]) as arrays:
        tokens = Tokens(arrays["ids"], arrays["offsets"], arrays["mask"])
    world = int(os.environ.get("WORLD_SIZE", "1"))
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
            out = Path(entry["out"])
            write_share(share_path(out, rank), trainer.score(tokens, entry["variant"]))
            if rank == 0:
                shares = [read_share(share_path(out, number)) for number in range(world)]
                seconds = time.monotonic() - start
                save(out, tokens, shares, trainer, seconds)
                report_timing(entry["variant"], seconds)
            wait_for(out)
        del trainer


def place_of(name: str) -> tuple[str, str]:
    """Return module and attribute that a name means; nothing is imported.

    Raises:
        MismatchError: no trainer has this name.
    """
    given = BUILT_IN.get(name, name)
    if ":" not in given:
        from mismatch.plugins import scorers

        of_features = scorers()
        if name not in of_features:
            known = (*BUILT_IN, *of_features)
            raise MismatchError(
                f"--scorer {name}: no such trainer",
                f"{did_you_mean(name, known)}one of {', '.join(known)}, or your own as "
                "package.module:Class",
            )
        given = of_features[name].adapter
    module_name, _, attribute = given.partition(":")
    if not (module_name and attribute):
        raise MismatchError(f"--scorer {name}: no such trainer", "write package.module:Class")
    return module_name, attribute


def load(name: str) -> Any:
    """Return the class or function that a name means.

    Raises:
        MismatchError: it cannot be imported, is not there, or can score nothing.
    """
    module_name, attribute = place_of(name)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        other = "name the interpreter that has it: --python train=PATH"
        if not f"{module_name}.".startswith(f"{error.name}."):  # something that the module needs
            fault = f"--scorer {name}: {first_line(error)} (in {sys.executable})"
            raise MismatchError(fault, other) from error
        raise MismatchError(
            f"--scorer {name}: no module {module_name} in {Path.cwd()}, in PYTHONPATH or among the "
            f"packages of {sys.executable}",
            f"start mismatch where {module_name} is, set PYTHONPATH to its folder, or {other}",
        ) from error
    if not hasattr(module, attribute):
        fault = f"--scorer {name}: {module.__file__} has no {attribute}"
        raise MismatchError(fault, f"{did_you_mean(attribute, vars(module))}check the name")
    kind = getattr(module, attribute)
    if isinstance(kind, type):
        return kind
    if not callable(kind):
        fault = f"--scorer {name}: that is a {type(kind).__name__}"
        raise MismatchError(fault, "name a function or a class")
    from mismatch.trainers.function import FunctionTrainer

    return lambda job: FunctionTrainer(kind, name, job)


def line_of(error: BaseException) -> str:
    """Return where an error came from in the user's own code, in brackets; "" outside of it."""
    frames = traceback.extract_tb(error.__traceback__)
    others = (os.path.dirname(__file__), "<", sys.prefix)
    own = [f for f in frames if not f.filename.startswith(others) and "-packages" not in f.filename]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def share_path(out: Path, rank: int) -> Path:
    """Return where a rank leaves what it scored in the pass that is written to ``out``."""
    return out.with_suffix(f".rank{rank}.npz")


def write_share(path: Path, scored: Scored) -> None:
    """Leave one rank's scores for rank 0."""
    arrays = {
        "sequences": np.array(scored.sequences, np.int64),
        "counts": np.array([len(row) for row in scored.logprobs], np.int64),
        "logprobs": joined(scored.logprobs),
        "dtype": np.array(scored.dtype),
    }
    if scored.entropy is not None:
        arrays["entropy"] = joined(scored.entropy)
    write_arrays(path, arrays)


def read_share(path: Path) -> Scored:
    """Return what a rank left, once it is there."""
    wait_for(path)
    with np.load(path) as arrays:
        ends = np.cumsum(arrays["counts"])[:-1]
        rows = {
            name: tuple(np.split(arrays[name], ends))
            for name in ("logprobs", "entropy")
            if name in arrays
        }
        sequences = tuple(arrays["sequences"].tolist())
        dtype = str(arrays["dtype"])
    if not sequences:  # a rank without a share; an empty array is split into one empty row
        rows = dict.fromkeys(rows, ())
    path.unlink()
    return Scored(sequences, rows["logprobs"], rows.get("entropy"), dtype)


def joined(rows: Sequence[Any]) -> Any:
    """Return rows one after another, in float32."""
    return np.concatenate([np.zeros(0, np.float32), *(np.asarray(r, np.float32) for r in rows)])


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write a file that is there as a whole or not at all."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(file, **arrays)
    partial.replace(path)


def wait_for(path: Path) -> None:
    """Sleep until a file appears; whoever started the ranks ends them all where one fails."""
    # A network file system answers for a path from its cache, and asks again for a folder's names.
    while path.name not in os.listdir(path.parent):
        time.sleep(POLL_S)


def save(path: Path, tokens: Tokens, parts: list[Scored], trainer: Trainer, seconds: float) -> None:
    """Write one pass, its sequences in order.

    Raises:
        MismatchError: a sequence without scores, or with a wrong number of them, or numbers that
            are no log-probabilities.
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
            raise WrongAnswer(
                f"the trainer returned {given} log-probabilities for sequence {number}, "
                f"which has {count} action tokens",
                "score every action token of every sequence once",
            )
    order = range(len(tokens.lengths))
    arrays: dict[str, Any] = {"logprobs": joined([logprobs[n] for n in order])}
    if len(entropy) == len(order):
        arrays["entropy"] = joined([entropy[n] for n in order])
    measured: SideFacts = {
        "logprobs_dtype": parts[0].dtype,
        "seconds": round(seconds, 3),
        "versions": versions(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "device": device_name(),
    }
    said = trainer.facts()
    require_logprobs(arrays["logprobs"], said.code)
    facts = {**asdict(said), **measured}
    write_arrays(path, {"facts": np.array(redact(json.dumps(facts))), **arrays})


def versions() -> dict[str, str]:
    """Return the versions of what can change a number and is loaded here."""
    names = ["torch", "transformers", "verl", "trl", "accelerate", "flash_attn", "numpy"]
    names += ["megatron.core", "transformer_engine"]
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
