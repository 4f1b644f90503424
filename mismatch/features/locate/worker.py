"""Records what modules give, and compares it with the float32 reference.

Started by :mod:`mismatch.features.locate.recording`, once for the engine and once for the rest::

    python -m mismatch.features.locate.worker JOB.json

JOB.json: ``{"run_dir": RUN, "place": SCRATCH, "label": …, "sequences": […]}`` and for the engine
``"spec"``, a RolloutSpec; else ``"passes"``, the reference last, ``"sides"``, what is judged, and
``"alike"``, whether modules that round otherwise are sources.
Every side leaves ``SCRATCH/SIDE/N.safetensors`` and ``N.npy`` (log-probabilities) of
sequence N, and the plain forward in its dtype ``SCRATCH/SIDE-plain``, on the side's inputs; the
second process leaves ``SCRATCH/sides.json``.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.codec import from_json, to_json
from mismatch.engines.registry import engine_class, with_adapter_way
from mismatch.features.locate.plan import part_of, side_folder
from mismatch.features.locate.results import Sequence
from mismatch.keys import PLAIN, Key
from mismatch.models.derived import in_form
from mismatch.processes.workers.engine import reported
from mismatch.run import store
from mismatch.run.messages import PROGRESS, exit_worker, report_ready, say
from mismatch.specs import Pass, RolloutSpec, TrainSpec
from mismatch.types import Rollout


def main(arguments: list[str]) -> int:
    """Run one job; 0, or 1 with the error left for the parent."""
    job = store.read_json(Path(arguments[0]))

    def recorded() -> None:
        sequences = [from_json(Sequence, entry) for entry in job["sequences"]]
        rollout = part_of(store.load_rollout(job["run_dir"]), sequences)
        record_engine(job, rollout) if "spec" in job else run_passes(job, rollout)

    return reported(Path(job["run_dir"]), job["label"], recorded, side="recording of modules")


def record_engine(job: dict[str, Any], rollout: Rollout) -> None:
    """Start the engine, score every sequence by itself, and keep what its modules give.

    Raises:
        MismatchError: an engine whose modules cannot be recorded, or that cannot start.
    """
    from mismatch.features.locate.engine_side import RECORD

    spec = from_json(RolloutSpec, job["spec"])
    name, sampling = spec.engine.engine, spec.sampling
    longest = int(np.diff(rollout.offsets).max())
    folder = side_folder(job["place"], Key.of(name, "prefill"))
    sequences = [ids.tolist() for ids in rollout.sequences()]
    masks = np.split(rollout.action_mask, rollout.offsets[1:-1])
    starts = [int(np.flatnonzero(mask)[0]) for mask in masks]
    with engine_class(name)(in_form(with_adapter_way(spec.engine)), sampling, longest) as engine:
        report_ready()
        scores = RECORD[name](engine, sequences, starts, sampling.temperature, folder)
        facts = engine.fingerprint("prefill")
    for number, (values, mask, start) in enumerate(zip(scores, masks, starts, strict=True)):
        np.save(folder / f"{number}.npy", np.asarray(values)[mask[start:]])
    store.write_json(folder / "facts.json", facts)


def run_passes(job: dict[str, Any], rollout: Rollout) -> None:
    """Record the trainer and the plain forwards, then replay every side in the reference."""
    from mismatch.features.locate.reference import Forward, Reference
    from mismatch.training.distributed import World
    from mismatch.training.source import quieten

    quieten()
    directory = Path(job["place"])
    *passes, exact = [Pass(e["name"], from_json(TrainSpec, e["spec"])) for e in job["passes"]]
    world = World.start()
    for pass_ in passes:
        say(f"{PROGRESS}{pass_.name}")
        forward = Forward(world, pass_, rollout)
        for number in range(rollout.n_sequences):
            forward.record(side_folder(directory, pass_.name), number)
        for entry in job["sides"]:
            if Key(pass_.name).side == PLAIN and entry["dtype"] == pass_.spec.dtype:
                forward.answer(directory, entry["name"])
        del forward  # its weights are gone before the next weights come
        gc.collect()
    say(f"{PROGRESS}{exact.name}")
    reference = Reference(Forward(world, exact, rollout), directory)
    report_ready()
    plain = {
        pass_.spec.dtype: reference.replayed(pass_.name)
        for pass_ in passes
        if Key(pass_.name).side == PLAIN
    }
    sides = []
    for entry in job["sides"]:
        say(f"{PROGRESS}{entry['name']} in the reference")
        given = plain.get(entry["dtype"]), job["alike"]
        sides.append(reference.located(**entry, plain=given[0], alike=given[1]))
    result = {"sides": to_json(sides), "not_tested": to_json(reference.not_tested)}
    store.write_json(directory / "sides.json", result)
    world.close()


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
