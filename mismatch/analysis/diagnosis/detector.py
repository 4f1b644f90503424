"""Detectors of causes, and where they are found.

A new one is a function ``find(case)`` and a ``Detector`` in the list ``DETECTORS`` of a module of
``diagnosis/detectors``; the causes that it names stand in ``analysis/causes.toml``. Nothing else
lists it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Literal

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import Case, Repair, above
from mismatch.types import Bools, Estimate, Floats, NotTested

Family = Literal[
    "semantics", "pairing", "position", "function", "weights", "routing", "trainer", "engine"
]


def value_of(evidence: Iterable[Evidence], what: str) -> float | str:
    """Return the value of the evidence of this name.

    Evidence is read by name alone: a detector may add a number where it saw more.

    >>> value_of([Evidence("best lag", -8), Evidence("correlation there", 0.9)], "best lag")
    -8

    Raises:
        KeyError: there is none.
    """
    for item in evidence:
        if item.what == what:
            return item.value
    raise KeyError(what)


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause that the data speak for.

    Attributes:
        cause: its id in causes.toml.
        effect: share of mean |delta| that it explains; None: a difference that is certain, and
            whose share this run did not measure.
        confirmed: the experiment that separates it from others is part of this run.
        alike: other causes that these data cannot separate from it.
        repair: what is left without it; None: it cannot be taken out.
        certain: shown even where no share was measured.
        stated: what the sides state of weights or settings: it explains any mark.
        fact: a difference between the two sides' digests or resolved settings.
        advice: what to do on the side that was found; "": see causes.toml.
    """

    cause: str
    side: Side
    effect: Estimate | None
    evidence: tuple[Evidence, ...]
    confirmed: bool = False
    alike: tuple[str, ...] = ()
    repair: Repair | None = None
    certain: bool = True
    stated: bool = False
    fact: bool = False
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What one detector saw: its numbers, and the causes that they speak for (often none).

    Attributes:
        looked_for: the causes that it could see in these data; None: all that it can name.
    """

    evidence: tuple[Evidence, ...]
    findings: tuple[Finding, ...] = ()
    looked_for: tuple[str, ...] | None = None

    def number(self, what: str) -> float:
        """Return the number of this name."""
        return float(value_of(self.evidence, what))

    def value(self, what: str, default: float) -> float:
        """Return the number of this name, or another where it was not measured."""
        return next((float(e.value) for e in self.evidence if e.what == what), default)


@dataclass(frozen=True, slots=True)
class Detector:
    """Looks for causes of one kind. ``find`` is pure.

    Attributes:
        id: unique; the cause that it looks for, or the kind.
        causes: ids that it can name.
        needs: data beyond two arrays of log-probabilities, as words for a user; "" for none.
        order: of two explanations that are equally good, the one of the lower number is taken.
    """

    id: str
    family: Family
    causes: tuple[str, ...]
    find: Callable[[Case], Look | NotTested]
    needs: str = ""
    order: int = 100


def paired_anew(
    case: Case,
    right: Floats,
    kept: Bools,
    evidence: tuple[Evidence, ...],
    cause: str,
    *alike: str,
    least: float | None,
    side: Side = "either",
) -> Look:
    """Return a finding if the mismatch goes once the trainer's numbers are where they belong.

    Args:
        least: share of it that has to go; None: these pairs are certain.
    """
    repair = Repair(case.left, right, kept)
    effect = case.gone(repair)
    if least is not None and not above(effect, least):
        return Look(evidence)
    finding = Finding(cause, side, effect, evidence, confirmed=True, alike=alike, repair=repair)
    return Look(evidence, (finding,))


def detectors() -> list[Detector]:
    """Return all of them, in their order."""
    return sorted(_built_in(), key=lambda detector: (detector.order, detector.id))


@cache
def _built_in() -> tuple[Detector, ...]:
    import mismatch.analysis.diagnosis.detectors as room

    names = [f"{room.__name__}.{info.name}" for info in pkgutil.iter_modules(room.__path__)]
    return tuple(
        detector for name in names for detector in getattr(import_module(name), "DETECTORS", ())
    )
