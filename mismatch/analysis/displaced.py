"""Prompts that one side moves farther from float32 than rounding moves them.

The excess (:mod:`mismatch.analysis.square`) cuts heavy tails on both sides alike. A fault of few
tokens, one that moves every token a little one way, or one response that is wholly wrong can lie
within it. Here each prompt of the side stands against the same prompt in the plain forward.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import numpy as np

from mismatch.metrics.excess import sign_test
from mismatch.types import Fingerprint, Floats, Ints

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


Kind = Literal["rare", "shift", "response"]
CHANCE = 1e-4  # where no level is calibrated
UNSURE = 1e-3  # chance below which a number of prompts is not passed either
LONG = 16  # tokens of a response whose median says something about all of it


@dataclass(frozen=True, slots=True)
class Displaced:
    """How many prompts of a scoring lie beyond what the plain forward shows, at the worst bound.

    Attributes:
        kind: of displacement. "rare": the largest of a prompt's tokens. "shift": the mean of a
            prompt's tokens. "response": the median token of a prompt's worst response.
        nats: the bound, for the side: ``factor`` times the plain forward's.
        beyond, plain_beyond: prompts beyond it.
        chance: that as many are the side's and not the plain forward's, if it were no more than
            ``factor`` times as far off (sign test over prompts).
    """

    side: Side
    scoring: str
    kind: Kind
    factor: float
    nats: float
    beyond: int
    plain_beyond: int
    n_prompts: int
    chance: float
    standing: Standing


def displaced(
    side: Side,
    scoring: str,
    away: Floats,
    yardstick: Floats,
    sequence: Ints,
    prompt: Ints,
    levels: Levels | None,
) -> Iterator[Displaced]:
    """All kinds of one scoring.

    Args:
        away: [A] its difference from its float32, nats.
        yardstick: [A] that of the plain forward at its precision.
        sequence: [A] sequence of each token, rising.
        prompt: [A] prompt of each token.
        levels: None: none are calibrated, so that only a larger factor is beyond.
    """
    prompts = np.unique(prompt, return_inverse=True)[1]
    factor = levels.displaced if levels else UNCALIBRATED
    yield _judged(side, scoring, "rare", factor, _largest(away, prompts),
                  _largest(yardstick, prompts), levels)  # fmt: skip
    # Over tokens that a side drew itself its mean is a KL, half of its variance: twice that is let
    # pass.
    drift = float(np.mean(yardstick**2))
    yield _judged(side, scoring, "shift", factor,
                  np.maximum(_mean(away, prompts) - drift, 0.0),
                  _mean(yardstick, prompts), levels)  # fmt: skip
    if levels is not None:
        moved, plain = (_medians(values, sequence, prompts) for values in (away, yardstick))
        if len(moved):
            plain = np.maximum(plain, np.abs(yardstick).mean())  # near 0 where tokens are certain
            yield _judged(side, scoring, "response", levels.response, moved, plain, levels)


def _judged(
    side: Side,
    scoring: str,
    kind: Kind,
    factor: float,
    moved: Floats,
    plain: Floats,
    levels: Levels | None,
) -> Displaced:
    test = sign_test(moved / factor, plain, only_largest=kind == "response")
    standing: Standing = "within" if levels else "uncalibrated"
    if test.chance <= (levels.chance if levels else CHANCE):
        standing = "beyond"
    elif levels and test.chance <= max(UNSURE, 0.5 ** len(moved)):
        standing = "undecided"
    elif kind == "response" and test.beyond:
        standing = "undecided"  # too few prompts to count, and too far to pass
    return Displaced(side, scoring, kind, factor, factor * test.bound, test.beyond,
                     test.other_beyond, len(moved), test.chance, standing)  # fmt: skip


def _largest(values: Floats, prompts: Ints) -> Floats:
    sizes = np.zeros(prompts.max() + 1)
    np.maximum.at(sizes, prompts, np.abs(values))
    return sizes


def _mean(values: Floats, prompts: Ints) -> Floats:
    return np.asarray(np.abs(np.bincount(prompts, values) / np.bincount(prompts)))


def _medians(values: Floats, sequence: Ints, prompts: Ints) -> Floats:
    """The largest median of |values| of a prompt's long responses, of prompts that have one."""
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    ends = np.append(starts[1:], len(sequence))
    found: dict[int, float] = {}
    for start, end in zip(starts, ends, strict=True):
        if end - start >= LONG:
            median = float(np.median(np.abs(values[start:end])))
            prompt = int(prompts[start])
            found[prompt] = max(found.get(prompt, 0.0), median)
    return np.array(list(found.values()))
