"""Unequal bits before and after every fix that was measured, and what it costs in the same run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.results import STATE, state_of, variant_of
from mismatch.features.exact.measure import logprobs
from mismatch.features.exact.results import FixBits, FixesByBits, Pair
from mismatch.keys import TRAIN
from mismatch.run.directory import invocations
from mismatch.specs import CheckSpec


def of_run(run_dir: Path | str, spec: CheckSpec) -> FixesByBits | None:
    """Return what the fixes of a run did to its bits; None where none was measured.

    Raises:
        MismatchError: an artefact of the run is missing or damaged.
    """
    run, engine = Path(run_dir), spec.rollout.engine.engine
    if not spec.fixes or not (run / STATE).exists():
        return None
    base = ScoredRollout.load(run, engine, TRAIN)
    before = _pair(base)
    found = []
    for entry in state_of(run)["variants"]:
        with suppress(MismatchError):  # it was not measured: the table of fixes says why
            variant = variant_of(spec, entry["id"], entry["place"])
            sides = ScoredRollout.load(run / variant.folder, engine, variant.key)
            sampled = [_sampled_s(run, base), _sampled_s(run / variant.folder, sides)]
            scored = [_scored_s(each) for each in (base, sides)]
            found.append(
                FixBits(
                    variant.id,
                    before,
                    _pair(sides),
                    _both(sampled) if variant.folder else None,
                    _both(scored),
                )
            )
    found.sort(key=lambda fix: fix.after.unequal / max(1, fix.after.n))
    return FixesByBits(tuple(found)) if found else None


def _pair(sides: ScoredRollout) -> Pair:
    return logprobs(sides.rollout, "engine / trainer", sides.decode, sides.train, "sides")


def _both(seconds: list[float | None]) -> tuple[float, float] | None:
    before, after = seconds
    return None if before is None or after is None else (round(before, 4), round(after, 4))


def _sampled_s(directory: Path, sides: ScoredRollout) -> float | None:
    """Return seconds of 1,000 sampled tokens, without the engine's start."""
    took = [
        entry["timings"]["engine"]["generate"]
        for entry in invocations(directory)
        if "generate" in entry.get("timings", {}).get("engine", {})
    ]
    return 1e3 * took[-1] / sides.rollout.n_actions if took else None


def _scored_s(sides: ScoredRollout) -> float | None:
    seconds = sides.train.fingerprint.get("seconds")
    return None if seconds is None else 1e3 * seconds / len(sides.rollout.token_ids)
