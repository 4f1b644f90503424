"""The causes of a run as its report holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from mismatch.types import Estimate, NotTested

Side = Literal["engine", "trainer", "either"]
Status = Literal["suspected", "confirmed", "of little weight"]
LITTLE: Final = "of little weight"  # stated, and the mismatch stays without it
# Kinds of cause, where none is named.
KINDS = ("function-differs", "weights-differ", "rounding-differs", "side-off")
LEADS = 0.5  # share of the mismatch, below which more is left than a cause takes out
ONE_RANK = "with the whole model on one rank"
MODULE = "first module that differs"  # the evidence of a cause that running modules found
DIFFER = "what differs"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that a detector measured.

    >>> Evidence("best lag", -8, "0").value
    -8

    Attributes:
        normal: what a healthy pair has, as text; "" where there is no such value.
    """

    what: str
    value: float | str
    normal: str = ""


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause, with what speaks for it.

    Attributes:
        id: its entry in causes.toml.
        effect: share of the run's mean |delta|; None where this run did not measure it.
        alike: causes that these data cannot separate from it.
        consequences: what other detectors saw and no longer see once this is taken out.
        stated: a difference in what the sides state: it is there, whatever its share.
        kind: what the data alone would call it, where a statement gave it its name; else "".
        fact: digests, resolved settings, or what a module gives on the same input differ.
        made_here: confirmed of a setting that ran in place of the run's own, which was not
            measured: of the run it is suspected.
        advice: what to do at the module and on the side that were found; "": see causes.toml.
    """

    id: str
    status: Status
    side: Side
    effect: Estimate | None
    evidence: tuple[Evidence, ...]
    alike: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()
    stated: bool = False
    kind: str = ""
    fact: bool = False
    made_here: bool = False
    advice: str = ""

    @property
    def located(self) -> bool:
        """Whether running modules found it."""
        return any(item.what == MODULE for item in self.evidence)

    @property
    def scored_again(self) -> bool:
        """Whether another scoring of the same tokens, in another layout, found it."""
        return any(item.what == ONE_RANK for item in self.evidence)

    @property
    def decided(self) -> bool:
        """Whether an experiment confirmed it of what ran, if not of the run's own setting."""
        return self.status == "confirmed" or self.made_here


@dataclass(frozen=True, slots=True)
class RuledOut:
    """A detector that looked and saw what a healthy pair has."""

    detector: str
    causes: tuple[str, ...]
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Excluded:
    """What running the parts of one side showed that it cannot be."""

    side: Literal["engine", "trainer"]
    causes: tuple[str, ...]
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Failure:
    """A detector that raised: its causes were not looked for."""

    detector: str
    error: str


@dataclass(frozen=True, slots=True)
class Causes:
    """The result of the analysis.

    Attributes:
        ranked: by share of the mismatch; () where nothing is above normal.
        unexplained: share of mean |delta| that no cause explains: rounding, and what is not known.
    """

    ranked: tuple[Cause, ...]
    ruled_out: tuple[RuledOut, ...]
    not_tested: tuple[NotTested, ...]
    failures: tuple[Failure, ...]
    mean_abs_delta: float
    unexplained: float


def place_of(found: Sequence[Cause]) -> str:
    """Return the first module that running modules found to differ; "" where none is named."""
    return next(filter(None, map(_place, found)), "")


def places_of(found: Sequence[Cause]) -> dict[str, str]:
    """Return the module that differs by the side that was run: "engine", "trainer"."""
    places = {"trainer" if each.side == "trainer" else "engine": _place(each) for each in found}
    return {side: place for side, place in places.items() if place}


def _place(cause: Cause) -> str:
    return next((str(item.value) for item in cause.evidence if item.what == MODULE), "")
