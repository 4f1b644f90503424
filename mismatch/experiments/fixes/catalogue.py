"""Every fix there is, by id."""

from __future__ import annotations

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import Chosen, Fix, FixOutcome
from mismatch.experiments.fixes.engine_fixes import ENGINE_FIXES
from mismatch.experiments.fixes.trainer_fixes import PROBES, TRAIN_FIXES
from mismatch.metrics.corrections import OVERRIDE

UNMOVED = "delta stays as it is; gradients are reweighted"


def _fix(id: str, summary: str, cost: str, corrects: str, hides: bool = False) -> Fix:
    effect = "hides the mismatch: the ratio is 1 by construction" if hides else UNMOVED
    return Fix(id, "estimator", summary, effect, cost, corrects=corrects, hides=hides)


ESTIMATOR_FIXES = (
    _fix(
        "on-policy-ratio",
        "the trainer's own logprobs stand in for the engine's in the ratio",
        "whatever bias the mismatch brings stays, unseen",
        OVERRIDE,
        hides=True,
    ),
    _fix("tis", "token ratios as weights, truncated above", "bias of the cut", "tis-token"),
    _fix(
        "seq-tis", "sequence ratios as weights, truncated above", "variance grows with length",
        "tis-sequence",
    ),
    _fix("icepop", "tokens whose ratio leaves a band are dropped", "dropped tokens", "icepop"),
    _fix("mis", "tokens whose ratio is too large are dropped", "dropped tokens", "mis-token"),
    _fix(
        "geo-rs", "sequences whose geometric mean ratio leaves a band are dropped",
        "dropped sequences", "geometric",
    ),
    _fix("veto", "sequences with one tiny token ratio are dropped", "dropped sequences", "veto"),
)  # fmt: skip


FIXES: tuple[Fix, ...] = (*TRAIN_FIXES, *ENGINE_FIXES, *ESTIMATOR_FIXES)


def fix_named(name: str) -> Fix:
    """The fix with this id.

    Raises:
        MismatchError: there is none.
    """
    for fix in (*FIXES, *PROBES):
        if fix.id == name:
            return fix
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
