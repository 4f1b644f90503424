"""Records what modules give, and compares it with the float32 reference.

Started by :mod:`mismatch.features.locate.recording`, once for the engine and once for the rest::

    python -m mismatch.features.locate.worker JOB.json

JOB.json: ``{"run_dir": RUN, "place": SCRATCH, "label": …, "sequences": […]}`` and for the engine
``"spec"``, a RolloutSpec; else ``"passes"``, the reference last, ``"sides"``, what is judged, and
``"alike"``, whether modules that round otherwise are sources.
Every side leaves ``SCRATCH/SIDE/N.safetensors`` and ``N.npy`` (log-probabilities) of
sequence N, and the plain forward in its dtype ``SCRATCH/SIDE-plain``, on the side's inputs; the
second process leaves ``SCRATCH/sides.json``. With ``"exact": true`` the logits are recorded too,
and the engine's decoding if it can be given the tokens; ``"passes"`` is the trainer alone, and
``"sides"`` are names of what is compared with it.
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
from mismatch.types import Bools, Rollout


def main(arguments: list[str]) -> int:
    """Run one job; 0, or 1 with the error left for the parent."""
    job = store.read_json(Path(arguments[0]))

    def recorded() -> None:
        sequences = [from_json(Sequence, entry) for entry in job["sequences"]]
        rollout = part_of(store.load_rollout(job["run_dir"]), sequences)
        passes = compare_bits if job.get("exact") else run_passes
        record_engine(job, rollout) if "spec" in job else passes(job, rollout)

    return reported(Path(job["run_dir"]), job["label"], recorded, side="recording of modules")


def record_engine(job: dict[str, Any], rollout: Rollout) -> None:
    """Start the engine, score every sequence by itself, and keep what its modules give.

    Raises:
        MismatchError: an engine whose modules cannot be recorded, or that cannot start.
    """
    from mismatch.features.locate.engine_side import DECODE, RECORD

    exact = bool(job.get("exact"))
    spec = from_json(RolloutSpec, job["spec"])
    name, sampling = spec.engine.engine, spec.sampling
    longest = int(np.diff(rollout.offsets).max())
    sequences = [ids.tolist() for ids in rollout.sequences()]
    masks = np.split(rollout.action_mask, rollout.offsets[1:-1])
    starts = [int(np.flatnonzero(mask)[0]) for mask in masks]
    asked = sequences, starts, sampling.temperature
    folders = {
        kind: side_folder(job["place"], Key.of(name, kind)) for kind in ("prefill", "decode")
    }
    scores: dict[str, list[Any]] = {}
    with engine_class(name)(in_form(with_adapter_way(spec.engine)), sampling, longest) as engine:
        report_ready()
        scores["prefill"] = RECORD[name](engine, *asked, folders["prefill"], exact)
        if exact and name in DECODE:
            scores["decode"] = DECODE[name](engine, *asked, folders["decode"])
        facts = engine.fingerprint("prefill")
    for kind, values in scores.items():
        for number, (mask, start) in enumerate(zip(masks, starts, strict=True)):
            np.save(folders[kind] / f"{number}.npy", np.asarray(values[number])[mask[start:]])
            if exact:
                keep_actions(folders[kind] / f"{number}.safetensors", mask[start:])
    store.write_json(folders["prefill"] / "facts.json", facts)


def keep_actions(path: Path, mask: Bools) -> None:
    """Leave of recorded logits the rows that predict action tokens, as the trainer has them.

    Args:
        mask: of the last tokens of the sequence, those with a row of logits.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from mismatch.features.locate.bits import fitting
    from mismatch.features.locate.exact import HEAD

    shown = load_file(path)
    if HEAD in shown:
        shown[HEAD] = fitting(shown[HEAD][-len(mask) :][torch.from_numpy(mask)])
        save_file(shown, path)


def compare_bits(job: dict[str, Any], rollout: Rollout) -> None:
    """Record the trainer, and compare every recording of the engine with it by bits."""
    from mismatch.features.locate.bits import compare
    from mismatch.features.locate.reference import Forward
    from mismatch.training.distributed import World
    from mismatch.training.source import quieten

    quieten()
    directory = Path(job["place"])
    (entry,) = job["passes"]
    pass_ = Pass(entry["name"], from_json(TrainSpec, entry["spec"]))
    world = World.start()
    report_ready()
    forward = Forward(world, pass_, rollout)
    for number in range(rollout.n_sequences):
        forward.record(side_folder(directory, pass_.name), number, head=True)
    masks = np.split(rollout.action_mask, rollout.offsets[1:-1])
    starts = [int(np.flatnonzero(mask)[0]) for mask in masks]
    phases = [
        compare(directory, Key(name).kind, name, pass_.name, starts)  # type: ignore[arg-type]
        for name in job["sides"]
        if (side_folder(directory, name) / "0.npy").exists()
    ]
    store.write_json(directory / "sides.json", {"phases": to_json(phases)})
    world.close()


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
