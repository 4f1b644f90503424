"""Every fix there is, by id."""

from __future__ import annotations

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import Chosen, Fix
from mismatch.experiments.fixes.engine_fixes import ENGINE_FIXES
from mismatch.experiments.fixes.loss_fixes import ESTIMATOR_FIXES
from mismatch.experiments.fixes.trainer_fixes import TRAIN_FIXES

FIXES: tuple[Fix, ...] = (*TRAIN_FIXES, *ENGINE_FIXES, *ESTIMATOR_FIXES)


def fix_named(name: str) -> Fix:
    """The fix with this id.

    Raises:
        MismatchError: there is none.
    """
    for fix in FIXES:
        if fix.id == name:
            return fix
    raise MismatchError(f"no fix {name!r}", f"one of: {', '.join(fix.id for fix in FIXES)}")


__all__ = ["FIXES", "Chosen", "fix_named"]
