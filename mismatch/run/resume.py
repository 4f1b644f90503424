"""What of a run is there already: made by the same spec, from the same inputs, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch.run.manifest import is_current
from mismatch.run.store import ROLLOUT, VOCABULARY, scoring_file, scoring_header
from mismatch.specs import RolloutSpec, TrainSpec, spec_hash

ABSENT = "(not set)"


def rollout_done(run_dir: Path, spec: RolloutSpec) -> bool:
    """Whether the tokens, their texts and the engine's own scoring of them are complete."""
    made_by = spec_hash(spec)
    return (
        is_current(run_dir, ROLLOUT, made_by)
        and is_current(run_dir, VOCABULARY, "")
        and is_current(run_dir, scoring_file(f"{spec.engine.engine}:decode"), made_by)
    )


def prefill_done(run_dir: Path, spec: RolloutSpec) -> bool:
    """Whether the engine's rescoring of these tokens is complete, or known never to come.

    An engine that cannot rescore has said so when it sampled: nothing is gained by starting it.
    """
    made_by, decode = spec_hash(spec), f"{spec.engine.engine}:decode"
    if is_current(run_dir, scoring_file(f"{spec.engine.engine}:prefill"), made_by):
        return True
    if not is_current(run_dir, scoring_file(decode), made_by):
        return False
    return scoring_header(run_dir, decode)["fingerprint"].get("prefill") is False


def rescored(place: Path, home: Path, spec: RolloutSpec) -> bool:
    """Whether the engine of the run ``home`` has rescored ``place``'s tokens, or never will."""
    decode = f"{spec.engine.engine}:decode"
    if is_current(place, scoring_file(f"{spec.engine.engine}:prefill"), spec_hash(spec)):
        return True
    if not is_current(home, scoring_file(decode), spec_hash(spec)):
        return False
    return scoring_header(home, decode)["fingerprint"].get("prefill") is False


def scoring_done(run_dir: Path, name: str, spec: TrainSpec) -> bool:
    """Whether one pass of the trainer over these tokens is complete."""
    return is_current(run_dir, scoring_file(name), spec_hash(spec))


def differences(found: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> list[str]:
    """What two specs (as dicts) differ in, one line per setting.

    >>> differences({"train": {"dtype": "bf16"}}, {"train": {"dtype": "fp32"}})
    ["train.dtype: 'bf16' there, 'fp32' asked"]
    """
    lines = []
    for key in sorted({*found, *asked}):
        old, new = found.get(key, ABSENT), asked.get(key, ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {old!r} there, {new!r} asked")
    return lines
