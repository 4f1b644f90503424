"""Every fix there is, by id: texts, flags and settings come from guide-*.toml and probes.toml."""

from __future__ import annotations

from functools import partial
from typing import Any

from mismatch.errors import MismatchError, did_you_mean
from mismatch.experiments.fixes.base import VALUE, Fix, Flags, Side
from mismatch.experiments.fixes.guides import GUIDES, read
from mismatch.experiments.fixes.spec_edits import (
    CHANGES,
    on_engine,
    on_trainer,
    with_argument,
    without_arguments,
)
from mismatch.experiments.results import FixOutcome
from mismatch.metrics.importance_weights import OVERRIDE
from mismatch.specs import CheckSpec, TrainSpec

UNMOVED = "delta stays as it is; gradients are reweighted"
HIDES = "hides the mismatch: the ratio is 1 by construction"


def _changed(entry: dict[str, Any], spec: CheckSpec, value: str) -> CheckSpec:
    """Return a spec as an entry changes it.

    Keys of the entry: ``change`` names one of :data:`CHANGES`; else ``train`` and ``engine`` set
    fields, ``train_default`` resets fields, ``argument`` gives the engine arguments, ``drop`` takes
    them away, and ``env`` sets variables for the engine.
    """
    if name := entry.get("change"):
        return CHANGES[name](spec, value)
    given = entry.get("train", {})
    fields = {name: value if each == VALUE else each for name, each in given.items()}
    fields |= {name: getattr(TrainSpec(), name) for name in entry.get("train_default", ())}
    spec = on_trainer(spec, **fields)
    for name, argument in entry.get("argument", {}).items():
        spec = with_argument(spec, name, argument)
    spec = without_arguments(spec, *entry.get("drop", ()))
    env = tuple((name, setting) for name, setting in entry.get("env", ()))
    kept = [pair for pair in spec.rollout.engine.env if pair[0] not in dict(env)]
    return on_engine(spec, env=(*kept, *env), **entry.get("engine", {}))


def _fix(side: Side, id: str, entry: dict[str, Any]) -> Fix:
    hides = entry.get("hides", False)
    return Fix(
        id=id,
        side=side,
        summary=entry["summary"],
        effect=entry.get("effect", HIDES if hides else UNMOVED),
        cost=entry["cost"],
        flags=Flags(
            tuple((flag, value) for flag, value in entry.get("set", ())),
            tuple(entry.get("unset", ())),
            tuple((name, value) for name, value in entry.get("env", ())),
        ),
        values=tuple(entry.get("values", ())),
        change=partial(_changed, entry),
        needs=tuple(entry.get("needs", ())),
        corrects=entry.get("correction", OVERRIDE) if side == "estimator" else "",
        hides=hides,
    )


FIXES = tuple(
    _fix(side, id, entry) for side, name in GUIDES.items() for id, entry in read(name).items()
)
PROBES = tuple(_fix(entry["side"], id, entry) for id, entry in read("probes.toml").items())


def fix_named(name: str) -> Fix:
    """Return the fix with this id.

    Raises:
        MismatchError: there is none.
    """
    for entry in (*FIXES, *PROBES):
        if entry.id == name:
            return entry
    ids = [fix.id for fix in FIXES]
    near = did_you_mean(name, ids)
    known = "mismatch fixes lists them" if near else f"one of: {', '.join(ids)}"
    raise MismatchError(f"no fix {name!r}", near + known)


def labels(name: str) -> list[str]:
    """Return the fixes of a combination, each with its value, which may hold a plus sign.

    >>> labels("router-replay=ids+weights+fp32-router")
    ['router-replay=ids+weights', 'fp32-router']
    >>> labels("micro-batch=1024+plain-attention")
    ['micro-batch=1024', 'plain-attention']
    """
    parts: list[str] = []
    ids = {fix.id for fix in (*FIXES, *PROBES)}
    for part in name.split("+"):
        if parts and "=" in parts[-1] and part.partition("=")[0] not in ids:
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    return parts


def is_combination(row: FixOutcome) -> bool:
    """Return whether a row is of several fixes at once."""
    return len(labels(row.id)) > 1


def chosen_of(request: str) -> tuple[Fix, ...]:
    """Return the fixes of one request, each with its value.

    Raises:
        MismatchError: no such fix, or a value for one that takes none.
    """
    chosen = []
    for part in labels(request):
        name, equals, value = part.strip().partition("=")
        fix = fix_named(name)
        if equals and not fix.values:
            raise MismatchError(f"--fix {part}: {name} takes no value", f"--fix {name}")
        chosen.append(fix.taking(value))
    return tuple(chosen)


def trials(fix: Fix) -> list[str]:
    """Return the commands that try it."""
    asked = [fix.taking(value).label for value in fix.values] or [fix.id]
    lines = [f"mismatch check --model MODEL --fix {name}" for name in asked]
    return [*lines, "mismatch corrections RUN"] if fix.side == "estimator" else lines
