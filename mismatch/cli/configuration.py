"""Flags of features that fill in a check's spec, e.g. from a framework's own configuration file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from mismatch.cli.flags import Flags, Option
from mismatch.plugins import features, load
from mismatch.specs import CheckSpec

Configured = tuple[CheckSpec, tuple[str, ...]]  # and what the user should know of it, a line each


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a feature adds; ``Feature.configuration`` names an object of this class."""

    trainer_flags: tuple[Option, ...]
    """Flags that describe the trainer alone, so that ``score`` has them too."""
    flags: tuple[Option, ...]
    """All other flags, for commands that describe both sides."""
    model: Callable[[Flags], str | None]
    """Return the model that the flags name, if they name one."""
    apply: Callable[[CheckSpec, Flags], Configured]
    """Fill in what the user's own flags leave open."""


@cache
def configurations() -> tuple[Configuration, ...]:
    """Return what all features add."""
    return tuple(load(each.configuration) for each in features() if each.configuration)


def configured_model(flags: Flags) -> str | None:
    """Return the model that a feature's flags name; None where there is none."""
    named = (each.model(flags) for each in configurations())
    return next((model for model in named if model is not None), None)


def configured(spec: CheckSpec, flags: Flags) -> Configured:
    """Apply the flags of all features; explicit flags of the core win.

    Raises:
        MismatchError: flags that contradict each other, or a file that cannot be read.
    """
    notes: list[str] = []
    for each in configurations():
        spec, more = each.apply(spec, flags)
        notes += more
    return spec, tuple(notes)
