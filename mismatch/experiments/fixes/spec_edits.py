"""What fixes are made of: small pure changes of a spec, and the texts of the guides."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from mismatch.experiments.fixes.base import Context, Fix, Flags, Side, always, unchanged
from mismatch.specs import CheckSpec

GUIDES = ("guide-train.toml", "guide-engine.toml", "guide-estimator.toml")
UNMOVED = "delta stays as it is; gradients are reweighted"
NO_FLAGS = Flags()
HIDES = "hides the mismatch: the ratio is 1 by construction"

Change = Callable[[CheckSpec, str], CheckSpec]
ABSENT = object()


@cache
def guides() -> dict[str, dict[str, Any]]:
    """What is written of every fix, by its id."""
    folder = resources.files("mismatch.experiments.fixes")
    texts = (folder.joinpath(name).read_text("utf-8") for name in GUIDES)
    return {id: entry for text in texts for id, entry in tomllib.loads(text).items()}


def fix(
    side: Side,
    id: str,
    flags: Flags = NO_FLAGS,
    apply: Change = unchanged,
    applies: Callable[[Context], str] = always,
    values: tuple[str, ...] = (),
    corrects: str = "",
) -> Fix:
    """A fix with the texts of its guide."""
    entry = guides()[id]
    hides = entry.get("hides", False)
    return Fix(
        id=id,
        side=side,
        summary=entry["summary"],
        effect=entry.get("effect", HIDES if hides else UNMOVED),
        cost=entry["cost"],
        flags=flags,
        values=values,
        apply=apply,
        applies=applies,
        corrects=corrects,
        hides=hides,
    )


def train(**fields: Any) -> Change:
    """Set fields of the trainer."""

    def apply(spec: CheckSpec, value: str) -> CheckSpec:
        return replace(spec, train=replace(spec.train, **fields))

    return apply


def engine(**fields: Any) -> Change:
    """Set fields of the engine."""

    def apply(spec: CheckSpec, value: str) -> CheckSpec:
        return on_engine(spec, **fields)

    return apply


def on_engine(spec: CheckSpec, **fields: Any) -> CheckSpec:
    changed = replace(spec.rollout.engine, **fields)
    return replace(spec, rollout=replace(spec.rollout, engine=changed))


def engine_argument(spec: CheckSpec, name: str) -> Any:
    """A further engine argument that the user gave; ABSENT without one."""
    given = {key.lstrip("-").replace("-", "_"): value for key, value in spec.rollout.engine.args}
    return given.get(name, ABSENT)


def with_argument(name: str, value: Any) -> Change:
    """Give the engine a further argument, in place of the user's own."""

    def apply(spec: CheckSpec, _: str) -> CheckSpec:
        if engine_argument(spec, name) == value:
            return spec
        kept = without_arguments(name)(spec, "")
        return on_engine(kept, args=(*kept.rollout.engine.args, (name, value)))

    return apply


def without_arguments(*names: str) -> Change:
    """Take further engine arguments away: the engine's default, or ours, comes back."""

    def apply(spec: CheckSpec, value: str) -> CheckSpec:
        given = spec.rollout.engine.args
        kept = tuple(pair for pair in given if pair[0].lstrip("-").replace("-", "_") not in names)
        return spec if kept == given else on_engine(spec, args=kept)

    return apply
