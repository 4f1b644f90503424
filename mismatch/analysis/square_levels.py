"""Levels of the square, by device: square_levels.toml, measured on clean runs."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from mismatch.types import Fingerprint

UNCALIBRATED = 2.0  # excess from which a side is off on any device
FILE = "square_levels.toml"
Side = Literal["engine", "trainer", "other-engine", "either"]
Standing = Literal["within", "wide", "undecided", "uncalibrated", "beyond"]


@dataclass(frozen=True, slots=True)
class Levels:
    """What clean runs on one class of devices stay below.

    Attributes:
        excess: of a side's rounding over a plain forward's, root mean square.
        gap: mean |delta| of two implementations in float32, times the rounding that is expected.
        least_gap: nats under which no gap is beyond its level.
        displaced: factor by which a prompt may lie farther from float32 than in a plain forward.
        chance: of a sign test over prompts, at or below which a side lies beyond that factor.
        response: the factor for the median token of one response.
        source: the page or run that they were measured in.
    """

    excess: float
    gap: float
    least_gap: float
    displaced: float
    chance: float
    response: float
    source: str

    def gap_level(self, floor: float | None) -> float:
        """Nats; the rounding that is expected (None: not known) differs by model."""
        return max(self.least_gap, self.gap * (floor or 0.0))


def read_levels() -> dict[str, Levels]:
    """Those that ship with the package, by class of devices."""
    text = resources.files("mismatch.analysis").joinpath(FILE).read_text(encoding="utf-8")
    return {device: Levels(**cells) for device, cells in tomllib.loads(text).items()}


LEVELS = read_levels()


def device_class(engine: Fingerprint, trainer: Fingerprint) -> str:
    """ "cpu" where both sides ran on one, else the trainer's device by its name."""
    names = [str(facts.get("device") or "unknown") for facts in (engine, trainer)]
    return "cpu" if names == ["cpu", "cpu"] else names[1]
