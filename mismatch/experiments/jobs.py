"""One pass of a training world, as its worker reads it: without the plans that chose it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mismatch.keys import TRAINER_FLOAT32
from mismatch.specs import Pass


@dataclass(frozen=True)
class Job:
    """One pass of a training world.

    Attributes:
        run_dir: that whose rollout it scores.
        optional: the others go on where it fails.
        side: a check can do without it: the others go on where memory does not suffice.
    """

    run_dir: Path
    pass_: Pass
    optional: bool = False
    side: bool = False

    @classmethod
    def of_check(cls, run_dir: Path, pass_: Pass, main: Pass) -> Job:
        """Return the job of a check's pass; ``main``: the one that no check can do without.

        Kernels may refuse float32, so the trainer's float32 pass is optional.
        """
        optional = pass_.name == TRAINER_FLOAT32
        return cls(run_dir, pass_, optional=optional, side=pass_.name != main.name)
