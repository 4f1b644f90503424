"""Prompts that one side moves farther from float32 than rounding moves them.

The excess (:mod:`mismatch.analysis.square`) cuts heavy tails on both sides alike. A fault of few
tokens, one that moves every token a little one way, or one response that is wholly wrong can lie
within it. Here each prompt of the side is compared with the same prompt in the plain forward.
The formulas, of how much more one difference spreads than another, are of no comparison of two
scorings and so in no registry of metrics.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import numpy as np

from mismatch.analysis.results import Displaced, Kind, Side, Standing
from mismatch.metrics.registry import POSITIVE, REAL, Bounds, Combine, Metric, floats
from mismatch.types import Floats, Ints, SideFacts

WINSOR = 0.995  # quantile of both sides' |differences| together, above which they are cut
BOUNDS = 256  # of a sign test, at most


def excess_terms(away: Floats, yardstick: Floats) -> Floats:
    """Terms of the metrics below, [A, 4], of both differences cut at one quantile of both."""
    side, plain = winsorised(away, yardstick), winsorised(yardstick, away)
    return floats(np.stack([side * side, plain * plain, np.abs(side), np.abs(plain)], axis=1))


def correlation_terms(left: Floats, right: Floats) -> Floats:
    """Return terms of the correlation of two sides' roundings, [A, 5], cut at a quantile each."""
    left, right = winsorised(left, left), winsorised(right, right)
    return floats(np.stack([left, right, left * right, left * left, right * right], axis=1))


def winsorised(values: Floats, others: Floats) -> Floats:
    """``values`` cut to the ``WINSOR`` quantile of both arrays' sizes together."""
    cut = float(np.quantile(np.abs(np.concatenate([values, others])), WINSOR))
    return floats(np.clip(values, -cut, cut))


@dataclass(frozen=True, slots=True)
class SignTest:
    """Units of two paired samples beyond one bound, and the chance of so many in the first alone.

    Attributes:
        bound: the one at which the chance is smallest.
        beyond, other_beyond: units beyond it in the first sample and in the other.
        chance: of as many discordant units in the first, if each could as well be the other's.
    """

    bound: float
    beyond: int
    other_beyond: int
    chance: float


def sign_test(sizes: Floats, others: Floats, only_largest: bool = False) -> SignTest:
    """Whether more of ``sizes`` [P] than of ``others`` [P] lie beyond a bound, at the worst bound.

    Bounds are values of ``others``; ``only_largest``: its largest alone. The chance is that of one
    bound and not corrected for their number.
    """
    from scipy.stats import binom

    bounds = np.unique(others)
    if only_largest:
        bounds = bounds[-1:]
    elif len(bounds) > BOUNDS:
        bounds = bounds[np.linspace(0, len(bounds) - 1, BOUNDS).astype(int)]
    far, other = (values[None, :] > bounds[:, None] for values in (sizes, others))
    own, theirs = (far & ~other).sum(axis=1), (other & ~far).sum(axis=1)
    chances = binom.sf(own - 1, own + theirs, 0.5)
    worst = int(np.flatnonzero(chances == chances.min())[-1])
    return SignTest(float(bounds[worst]), int(far[worst].sum()), int(other[worst].sum()),
                    float(chances[worst]))  # fmt: skip


def _correlation(means: Floats) -> Floats:
    left, right, product, square, square_other = np.moveaxis(means, -1, 0)
    spread = (square - left * left) * (square_other - right * right)
    return np.where(spread > 0.0, (product - left * right) / np.sqrt(spread), np.nan)


def _metric(name: str, combine: Combine, unit: str, bounds: Bounds = POSITIVE) -> Metric:
    return Metric(name, lambda terms: terms, "ratio", unit, combine=combine, bounds=bounds)


RMS = _metric("square_rms", lambda means: floats(np.sqrt(means[..., 0])), "nats")
SIZE = _metric("square_size", lambda means: floats(means[..., 2]), "nats")
EXCESS = _metric(
    "square_excess", lambda means: floats(np.sqrt(means[..., 0] / means[..., 1])), "ratio"
)
EXCESS_SIZE = _metric(
    "square_excess_size", lambda means: floats(means[..., 2] / means[..., 3]), "ratio"
)
CORRELATION = _metric("square_correlation", _correlation, "correlation", REAL)


FILE = "square_levels.toml"


@dataclass(frozen=True, slots=True)
class Bound:
    """Up to ``passed`` a value passes, beyond ``failed`` it fails; between: nothing is decided."""

    passed: float
    failed: float


@dataclass(frozen=True, slots=True)
class Levels:
    """What clean runs on one class of devices stay below.

    Attributes:
        excess: of a side's rounding over a plain forward's, root mean square.
        excess_failed: from which the side is at fault; between the two nothing is decided.
        gap: mean |delta| of two implementations in float32, times the rounding that is expected.
        gap_share, gap_share_failed: the same as shares of the plain forward's cost, where gap is 0.
        least_gap: nats under which no gap is beyond its level.
        displaced: factor by which a prompt may lie farther from float32 than in a plain forward.
        chance: of a sign test over prompts, at or below which a side lies beyond that factor.
        response: the factor for the median token of one response.
        source: the page or run that they were measured in.
    """

    excess: float
    excess_failed: float
    gap: float
    gap_share: float
    gap_share_failed: float
    least_gap: float
    displaced: float
    chance: float
    response: float
    source: str

    def gap_bounds(self, floor: float | None, plain: float | None) -> Bound:
        """Return the levels of a gap, nats.

        Args:
            floor: float32 rounding that is expected of this model; None: not known.
            plain: cost of the plain forward at the run's precision; None: not known.
        """
        if self.gap:
            level = max(self.least_gap, self.gap * (floor or 0.0))
            return Bound(level, level)
        shares = (self.gap_share, self.gap_share_failed)
        passed, failed = (max(self.least_gap, share * (plain or 0.0)) for share in shares)
        return Bound(passed, failed)


# Those that ship with the package, by class of devices.
_text = resources.files("mismatch.analysis").joinpath(FILE).read_text(encoding="utf-8")
LEVELS = {device: Levels(**cells) for device, cells in tomllib.loads(_text).items()}
GENERIC = "generic"


def levels_for(device: str) -> Levels:
    """Return the levels of a class of devices, or those that need no calibration."""
    return LEVELS.get(device, LEVELS[GENERIC])


def device_class(engine: SideFacts, trainer: SideFacts) -> str:
    """ "cpu" where both sides ran on one, else the trainer's device by its name."""
    names = [str(facts.get("device") or "unknown") for facts in (engine, trainer)]
    return "cpu" if names == ["cpu", "cpu"] else names[1]


UNSURE = 1e-3  # chance below which a number of prompts is not passed either
LONG = 16  # tokens of a response whose median says something about all of it


def displaced(
    side: Side,
    scoring: str,
    away: Floats,
    yardstick: Floats,
    sequence: Ints,
    prompt: Ints,
    levels: Levels,
) -> Iterator[Displaced]:
    """Yield all kinds of one scoring.

    Args:
        away: [A] its difference from its float32, nats.
        yardstick: [A] that of the plain forward at its precision.
        sequence: [A] sequence of each token, rising.
        prompt: [A] prompt of each token.
    """
    prompts = np.unique(prompt, return_inverse=True)[1]
    # Over tokens that a side drew itself its mean is a KL, half of its variance: twice that is let
    # pass.
    drift = float(np.mean(yardstick**2))
    shifts = np.maximum(_mean(away, prompts) - drift, 0.0)
    medians, plain = (_medians(values, sequence, prompts) for values in (away, yardstick))
    least = np.abs(yardstick).mean()  # medians are near 0 where tokens are certain
    kinds: tuple[tuple[Kind, float, Floats, Floats], ...] = (
        ("rare", levels.displaced, _largest(away, prompts), _largest(yardstick, prompts)),
        ("shift", levels.displaced, shifts, _mean(yardstick, prompts)),
        ("response", levels.response, medians, np.maximum(plain, least)),
    )
    for kind, factor, moved, others in kinds:
        if not len(moved):
            continue
        test = sign_test(moved / factor, others, only_largest=kind == "response")
        standing: Standing = "within"
        if test.chance <= levels.chance:
            standing = "beyond"
        elif test.chance <= max(UNSURE, 0.5 ** len(moved)):
            standing = "undecided"
        elif kind == "response" and test.beyond:
            standing = "undecided"  # too few prompts to count, and too far to pass
        yield Displaced(side, scoring, kind, factor, factor * test.bound, test.beyond,
                        test.other_beyond, len(moved), test.chance, standing)  # fmt: skip


def _largest(values: Floats, prompts: Ints) -> Floats:
    sizes = np.zeros(prompts.max() + 1)
    np.maximum.at(sizes, prompts, np.abs(values))
    return sizes


def _mean(values: Floats, prompts: Ints) -> Floats:
    return np.asarray(np.abs(np.bincount(prompts, values) / np.bincount(prompts)))


def _medians(values: Floats, sequence: Ints, prompts: Ints) -> Floats:
    """Return the largest median of |values| of a prompt's long responses, if it has any."""
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    ends = np.append(starts[1:], len(sequence))
    medians: dict[int, float] = {}
    for start, end in zip(starts, ends, strict=True):
        if end - start >= LONG:
            median = float(np.median(np.abs(values[start:end])))
            prompt = int(prompts[start])
            medians[prompt] = max(medians.get(prompt, 0.0), median)
    return np.array(list(medians.values()))
