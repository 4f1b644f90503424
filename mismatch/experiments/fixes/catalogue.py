"""Every fix there is, by id."""

from __future__ import annotations

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import Chosen, Fix, FixOutcome
from mismatch.experiments.fixes.engine_fixes import ENGINE_FIXES
from mismatch.experiments.fixes.spec_edits import fix, guides
from mismatch.experiments.fixes.trainer_fixes import PROBES, TRAIN_FIXES
from mismatch.metrics.importance_weights import OVERRIDE

ESTIMATOR_FIXES = tuple(
    fix("estimator", id, corrects=guides()[id].get("correction", OVERRIDE))
    for id in ("on-policy-ratio", "tis", "seq-tis", "icepop", "mis", "geo-rs", "veto")
)
FIXES: tuple[Fix, ...] = (*TRAIN_FIXES, *ENGINE_FIXES, *ESTIMATOR_FIXES)


def fix_named(name: str) -> Fix:
    """The fix with this id.

    Raises:
        MismatchError: there is none.
    """
    for entry in (*FIXES, *PROBES):
        if entry.id == name:
            return entry
    raise MismatchError(f"no fix {name!r}", f"one of: {', '.join(fix.id for fix in FIXES)}")


def labels(name: str) -> list[str]:
    """The fixes of a combination, each with its value; a plus sign may be part of a value.

    >>> labels("router-replay=ids+weights+fp32-router")
    ['router-replay=ids+weights', 'fp32-router']
    """
    parts: list[str] = []
    ids = {fix.id for fix in FIXES}
    for part in name.split("+"):
        if parts and "=" in parts[-1] and part.partition("=")[0] not in ids:
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    return parts


def is_combination(row: FixOutcome) -> bool:
    """Whether a row is of several fixes at once."""
    return len(labels(row.id)) > 1


__all__ = ["FIXES", "Chosen", "fix_named", "is_combination", "labels"]
