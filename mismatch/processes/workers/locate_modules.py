"""Records what modules give, and holds it against the float32 reference.

Started by :mod:`mismatch.pipeline.locate_run`, once for the engine and once for the rest::

    python -m mismatch.processes.workers.locate_modules JOB.json

JOB.json: ``{"run_dir": RUN, "place": SCRATCH, "label": …, "sequences": […]}`` and for the engine
``"spec"``, a RolloutSpec; else ``"passes"``, the reference last, and ``"sides"``, what is judged.
Every side leaves ``SCRATCH/SIDE/N.safetensors`` and ``N.npy`` (log-probabilities) of sequence N;
the second process leaves ``SCRATCH/sides.json``.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Sequence as Several
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError, named_line
from mismatch.experiments.locate.plan import part_of
from mismatch.experiments.locate.types import Sequence, SideLocation
from mismatch.run import store
from mismatch.run.messages import PROGRESS, exit_worker, report_ready, say, write_error
from mismatch.specs import Pass, RolloutSpec, TrainSpec
from mismatch.types import NotTested, Rollout


def main(arguments: Several[str]) -> int:
    """Run one job; 0, or 1 with the error left for the parent."""
    (path,) = arguments
    job = store.read_json(Path(path))
    try:
        record_engine(job) if "spec" in job else run_passes(job)
    except MismatchError as error:
        traceback.print_exc()
        write_error(job["run_dir"], job["label"], error)
        return 1
    except Exception as error:
        traceback.print_exc()
        log = f"the whole story is in {job['run_dir']}/logs/{job['label']}.log"
        write_error(job["run_dir"], job["label"], MismatchError(named_line(error), log))
        return 1
    return 0


def part_in(job: dict[str, Any]) -> Rollout:
    """The tokens that are recorded."""
    sequences = [from_json(Sequence, entry) for entry in job["sequences"]]
    return part_of(store.load_rollout(job["run_dir"]), sequences)


def side_folder(directory: Path | str, name: str) -> Path:
    """Where a side leaves what it recorded."""
    folder = Path(directory) / name.replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---------------------------------------------------------------- engine


def record_engine(job: dict[str, Any]) -> None:
    """Start the engine, score every sequence by itself, and keep what its modules give.

    Raises:
        MismatchError: an engine whose modules cannot be recorded, or that cannot start.
    """
    from pkgutil import resolve_name

    from mismatch.engines.registry import engine_class, engine_info
    from mismatch.models.derived import in_form

    spec = from_json(RolloutSpec, job["spec"])
    name, rollout = spec.engine.engine, part_in(job)
    longest = int(np.diff(rollout.offsets).max())
    folder = side_folder(job["place"], f"{name}:prefill")
    record = resolve_name(str(engine_info(name).record))
    sequences = [ids.tolist() for ids in rollout.sequences()]
    starts = [int(np.flatnonzero(mask)[0]) for mask in masks_of(rollout)]
    law = spec.sampling
    with engine_class(name)(in_form(spec.engine), law, longest) as engine:
        report_ready()
        scores = record(engine, sequences, starts, law.temperature, folder)
        facts = engine.fingerprint("prefill")
    for number, (values, mask, start) in enumerate(
        zip(scores, masks_of(rollout), starts, strict=True)
    ):
        np.save(folder / f"{number}.npy", np.asarray(values)[mask[start:]])
    kept = ("dtype", "kv_cache_dtype", "quantization", "enforce_eager", "attention", "moe_backend")
    store.write_json(folder / "facts.json", {key: facts.get(key) for key in kept})


def with_revert(
    side: SideLocation, reference: Any, world: Any, passes: list[Pass], rollout: Rollout
) -> SideLocation:
    """The trainer runs again with the reference's output at its first source."""
    from mismatch.processes.workers.locate_reference import Forward

    if side.role != "trainer" or side.source is None:
        return side
    say(f"{PROGRESS}{side.name} with the reference's {side.source.site}")
    reference.drop()
    gc.collect()
    share = reference.reverted(side, Forward(world, passes[0], rollout))
    return replace(side, reverted=share)


def masks_of(rollout: Rollout) -> list[np.ndarray]:
    """Action mask of each sequence."""
    return np.split(rollout.action_mask, rollout.offsets[1:-1])


# ---------------------------------------------------------------- trainer and reference


def run_passes(job: dict[str, Any]) -> None:
    """Record the trainer and the plain forwards, then replay every side in the reference."""
    import transformers

    from mismatch.processes.workers.locate_reference import Forward, Reference
    from mismatch.training.distributed import World

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rollout, directory = part_in(job), Path(job["place"])
    passes = [Pass(e["name"], from_json(TrainSpec, e["spec"])) for e in job["passes"]]
    world = World.start()
    end = time.monotonic() + job["seconds"]
    not_tested: list[NotTested] = []
    for pass_ in passes[:-1]:
        say(f"{PROGRESS}{pass_.name}")
        with_model = Forward(world, pass_, rollout)
        with_model.record(side_folder(directory, pass_.name))
        del with_model
        gc.collect()
    say(f"{PROGRESS}{passes[-1].name}")
    forward = Forward(world, passes[-1], rollout)
    reference = Reference(forward, directory, end)
    report_ready()
    plain = {e["dtype"]: reference.replayed(f"plain:{e['dtype']}") for e in job["plain"]}
    sides: list[SideLocation] = []
    for entry in job["sides"]:
        say(f"{PROGRESS}{entry['name']} in the reference")
        sides.append(reference.located(entry, plain.get(entry["dtype"])))
    sides = [with_revert(side, reference, world, passes, rollout) for side in sides]
    not_tested += reference.not_tested
    store.write_json(
        directory / "sides.json",
        {"sides": to_json(sides), "not_tested": to_json(not_tested), "layers": reference.layers},
    )
    world.close()


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
