"""Unequal bits before and after every fix that was measured, and what it costs in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.results import STATE, state_of, variant_of
from mismatch.features.exact.measure import logprobs
from mismatch.features.exact.results import Pair
from mismatch.keys import TRAIN
from mismatch.reports.formatting import line, percent, text, times
from mismatch.reports.section import Cell, Column, Section, Table
from mismatch.run.directory import invocations
from mismatch.specs import CheckSpec
from mismatch.types import Report


@dataclass(frozen=True, slots=True)
class FixBits:
    """Engine against trainer with one fix.

    Attributes:
        engine_s, trainer_s: seconds of 1,000 tokens that are sampled, and that are scored, before
            and after; None where they were not noted, or where the side ran as it was.
    """

    id: str
    before: Pair
    after: Pair
    engine_s: tuple[float, float] | None
    trainer_s: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class FixesByBits:
    """All fixes of a run, those with the fewest unequal bits first."""

    fixes: tuple[FixBits, ...]


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


def _count(pair: Pair) -> str:
    return f"{pair.unequal:,} of {pair.n:,}"


def _slower(seconds: tuple[float, float] | None) -> str:
    if seconds is None or not seconds[0]:
        return "as it was" if seconds is None else ""
    return times(seconds[1] / seconds[0])


COLUMNS = (
    Column("fix", text, of=lambda fix: Cell(fix.id, "code")),
    Column("unequal before", text, of=lambda fix: _count(fix.before)),
    Column("unequal after", text, of=lambda fix: Cell(
        _count(fix.after), "healthy" if fix.after.word == "exact" else "")),
    Column("engine's time", text, of=lambda fix: _slower(fix.engine_s), detail="of a token"),
    Column("trainer's time", text, of=lambda fix: _slower(fix.trainer_s), detail="of a token"),
)  # fmt: skip


def section(result: FixesByBits, report: Report) -> Section:
    """Return unequal tokens before and after each fix, with what it costs."""
    return Section(
        "exact-fixes",
        "Unequal bits with each fix",
        "Engine against trainer. Times are of this run, without starts: after over before.",
        sentences=[f"{each}." for each in _sentences(result)],
        tables=[Table.of(COLUMNS, result.fixes)],
        short=next(_sentences(result)),
    )


def _sentences(result: FixesByBits) -> Iterator[str]:
    best = result.fixes[0]
    share = percent(best.after.unequal / max(1, best.after.n))
    yield (
        f"Fewest with {line(best.id)}: {_count(best.after)} tokens ({share}), before "
        f"{_count(best.before)}"
    )
