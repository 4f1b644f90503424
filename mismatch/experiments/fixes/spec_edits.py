"""Small pure changes of a spec, which fixes are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mismatch.specs import CheckSpec

Change = Callable[[CheckSpec, str], CheckSpec]
ABSENT = object()


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
