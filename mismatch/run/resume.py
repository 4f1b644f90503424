"""What of a run is there already: made by the same spec, from the same inputs, byte for byte."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.run import manifest
from mismatch.run.store import ROLLOUT, VOCABULARY, made_with, scoring_file, scoring_header
from mismatch.specs import RolloutSpec, TrainSpec, spec_hash

ABSENT = "(not set)"
SEPARABLE = ("vllm", "sglang")  # engines that may live in a separate environment


def rollout_done(run_dir: Path, spec: RolloutSpec) -> bool:
    """Return whether the tokens, their texts and the engine's own scoring of them are complete.

    Raises:
        MismatchError: they were made with other versions or weights.
    """
    return (
        _done(run_dir, ROLLOUT, spec)
        and manifest.is_current(run_dir, VOCABULARY, "")
        and _done(run_dir, scoring_file(f"{spec.engine.engine}:decode"), spec)
    )


def rescored(run_dir: Path, spec: RolloutSpec) -> bool:
    """Return whether the engine has rescored the run's tokens, or never will.

    An engine that cannot rescore has said so when it sampled: nothing is gained by starting it.
    """
    decode = f"{spec.engine.engine}:decode"
    if _done(run_dir, scoring_file(f"{spec.engine.engine}:prefill"), spec):
        return True
    if not _done(run_dir, scoring_file(decode), spec):
        return False
    return scoring_header(run_dir, decode)["fingerprint"].get("prefill") is False


def scoring_done(run_dir: Path, name: str, spec: TrainSpec) -> bool:
    """Return whether one pass of the trainer over these tokens is complete; raises as above."""
    return _done(run_dir, scoring_file(name), spec)


def _done(run_dir: Path, name: str, spec: RolloutSpec | TrainSpec) -> bool:
    """Whether an artefact is there, made by this spec with what is here now.

    Raises:
        MismatchError: it was made with other versions or weights; a run holds those of one.
    """
    if not manifest.is_current(run_dir, name, spec_hash(spec)):
        return False
    noted = manifest.made_with(run_dir, name)
    if isinstance(spec, RolloutSpec):
        engine, python = spec.engine.engine, spec.engine.python
        if python is not None:
            here = os.path.abspath(python) == sys.executable
        else:
            here = engine not in SEPARABLE or find_spec(engine) is not None
        if not here:
            return True  # the worker knows what its environment holds, and asks again
    changed = differences(noted, made_with(spec)) if noted else []
    if changed:
        raise MismatchError(
            f"{run_dir / name} was made with other versions or weights:\n    "
            + "\n    ".join(line.replace(" asked", " here") for line in changed),
            "put the old files back, or start a new run without --resume",
        )
    return True


def differences(recorded: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> list[str]:
    """Return what two specs (as dicts) differ in, one line per setting.

    >>> differences({"train": {"dtype": "bf16"}}, {"train": {"dtype": "fp32"}})
    ["train.dtype: 'bf16' there, 'fp32' asked"]
    """
    lines = []
    for key in sorted({*recorded, *asked}):
        old, new = recorded.get(key, ABSENT), asked.get(key, ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {old!r} there, {new!r} asked")
    return lines
