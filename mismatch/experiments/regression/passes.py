"""The passes of a run beside engine and trainer, for a verdict of its own: NaN, the trainer against
itself, and the square."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mismatch.analysis.diagnosis.passes import by_finiteness, pass_checks
from mismatch.analysis.registry import Measured
from mismatch.analysis.sides import Sides
from mismatch.analysis.square import Evidence, Finding, Square, measure
from mismatch.analysis.square_checks import square_checks
from mismatch.errors import MismatchError
from mismatch.experiments.regression.types import SquareRow
from mismatch.run import store
from mismatch.run.directory import load_spec
from mismatch.types import Check, Comparison, NotTested


@dataclass(frozen=True, slots=True)
class Beside:
    """What the other passes of one run say.

    Attributes:
        square: None without one, ``reason`` says why; in float32 on both sides none is needed.
    """

    checks: tuple[Check, ...]
    square: Square | None
    reason: str

    @classmethod
    def of(cls, run: Path, sides: Sides, made: Comparison) -> Beside:
        """Read and judge them.

        Raises:
            MismatchError: a scoring is damaged.
        """
        known = {sides.decode.name: sides.decode, sides.train.name: sides.train}
        names = [n for n in store.scoring_names(run) if not n.startswith(store.FIX_PREFIX)]
        scorings = known | {n: store.load_scoring(run, n) for n in names if n not in known}
        usable, refused = by_finiteness(scorings)
        checks = pass_checks(sides.rollout, sides.decode, sides.train, scorings)
        measured = Measured(sides.rollout, sides.decode, sides.train, made, usable, refused)
        try:
            square = measure(measured, load_spec(run))
        except MismatchError:
            square = NotTested("the square", "its spec.json is missing, or of another version")
        if isinstance(square, NotTested):
            return cls(tuple(checks), None, square.reason)
        return cls((*checks, *square_checks(square)), square, "")


def square_rows(old: Square | None, new: Square | None) -> tuple[SquareRow, ...]:
    """Every excess and gap of either run, the new run's first."""
    sides: list[dict[tuple[Evidence, str], Finding]] = [
        {(one.evidence, one.scoring): one for one in square.findings} if square else {}
        for square in (old, new)
    ]
    rows = []
    for key in dict.fromkeys((*sides[1], *sides[0])):
        before, after = (side.get(key) for side in sides)
        rows.append(
            SquareRow(
                evidence=key[0],
                scoring=key[1],
                old=before.value if before else None,
                new=after.value if after else None,
                before=before.standing if before else None,
                after=after.standing if after else None,
            )
        )
    return tuple(rows)


def square_notes(old: Beside, new: Beside) -> list[str]:
    """What of the two squares cannot be compared, one sentence each."""
    return [
        f"the square of the {name} run: not compared, {one.reason}"
        for name, one in (("old", old), ("new", new))
        if one.square is None
    ]
