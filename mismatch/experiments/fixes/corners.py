"""The square of a run with a fix, from the float32 passes of the run without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mismatch.analysis.diagnosis.passes import by_finiteness, enough_data
from mismatch.analysis.registry import Measured
from mismatch.analysis.sides import Sides
from mismatch.analysis.square import Square, measure
from mismatch.analysis.square_checks import square_checks
from mismatch.errors import MismatchError
from mismatch.run import store
from mismatch.run.scorings import TRAIN
from mismatch.specs import CheckSpec
from mismatch.types import Check, Comparison, Scoring

ANEW = "with this fix the engine sampled anew, and no float32 pass was made of its tokens"


class Corners:
    """What a run holds of the square, beside the two sides that a fix changes.

    A fix of the trainer scores the run's own tokens, so the engine's corners and the float32
    reference are those of the run; the trainer's side is measured from its new scoring.
    """

    def __init__(self, run_dir: Path, spec: CheckSpec) -> None:
        self.run_dir, self.spec = run_dir, spec
        self._beside: dict[str, Scoring] | None = None

    def correctness(
        self, sides: Sides, made: Comparison, *, same_tokens: bool
    ) -> tuple[list[Check], str]:
        """Its checks and those of the amount of data; why correctness stays open, "" where not."""
        enough = enough_data(sides.rollout)
        if not same_tokens:
            return [enough], ANEW
        train = replace(sides.train, name=TRAIN)
        usable = {**self.beside, sides.decode.name: sides.decode, TRAIN: train}
        run = Measured(sides.rollout, sides.decode, train, made, usable, {})
        square = measure(run, self.spec)
        if not isinstance(square, Square):
            return [enough], square.reason
        return [enough, *square_checks(square)], ""

    @property
    def beside(self) -> dict[str, Scoring]:
        """The run's scorings that no fix of the trainer changes."""
        if self._beside is None:
            names = store.scoring_names(self.run_dir)
            made = {}
            for name in names:
                if name == TRAIN or name.startswith((f"{TRAIN}:", store.FIX_PREFIX)):
                    continue
                try:
                    made[name] = store.load_scoring(self.run_dir, name)
                except MismatchError:  # damaged: its corner is not measured
                    continue
            self._beside, _ = by_finiteness(made)
        return self._beside
