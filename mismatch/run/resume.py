"""What of a run is there already: made by the same spec, from the same inputs, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.keys import Key
from mismatch.run import manifest
from mismatch.run.store import ROLLOUT, VOCABULARY, made_with, scoring_file, scoring_header
from mismatch.specs import RolloutSpec, TrainSpec, spec_hash

ABSENT = "(not set)"


def rollout_done(run_dir: Path, spec: RolloutSpec, python: str | None = None) -> bool:
    """Return whether the tokens, their texts and the engine's own scoring of them are complete.

    Args:
        python: interpreter that runs the engine; None: this interpreter.

    Raises:
        MismatchError: they were made with other versions or weights.
    """
    return (
        _done(run_dir, ROLLOUT, spec, python)
        and manifest.is_current(run_dir, VOCABULARY, "")
        and _done(run_dir, scoring_file(Key.of(spec.engine.engine, "decode")), spec, python)
    )


def rescored(run_dir: Path, spec: RolloutSpec, python: str | None = None) -> bool:
    """Return whether the engine has rescored the run's tokens, or never will.

    An engine that cannot rescore has said so when it sampled: nothing is gained by starting it.
    """
    decode = Key.of(spec.engine.engine, "decode")
    if _done(run_dir, scoring_file(Key.of(spec.engine.engine, "prefill")), spec, python):
        return True
    if not _done(run_dir, scoring_file(decode), spec, python):
        return False
    return scoring_header(run_dir, decode)["fingerprint"].get("prefill") is False


def scoring_done(run_dir: Path, name: str, spec: TrainSpec, python: str | None = None) -> bool:
    """Return whether one pass of the trainer over these tokens is complete; as above."""
    return _done(run_dir, scoring_file(name), spec, python)


def _done(run_dir: Path, name: str, spec: RolloutSpec | TrainSpec, python: str | None) -> bool:
    """Whether an artefact is there, made by this spec with what its interpreter has now.

    Raises:
        MismatchError: it was made with other versions or weights; a run holds those of one.
    """
    if not manifest.is_current(run_dir, name, spec_hash(spec)):
        return False
    noted = manifest.entries(run_dir)[name].get("made_with", {})
    changed = differences(noted, made_with(spec, python)) if noted else []
    if changed:
        where = f" (in {python})" if python else ""
        raise MismatchError(
            f"{run_dir / name} was made with other versions or weights{where}:\n    "
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
