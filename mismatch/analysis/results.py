"""The results of the core's analyses as a report holds them; causes: see cause_results.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mismatch.keys import REFERENCE, TRAIN, Key
from mismatch.types import CheckStatus, Estimate, NotTested

Side = Literal["engine", "trainer", "other-engine", "either"]
OneSide = Literal["engine", "trainer", "either"]
Standing = Literal["within", "wide", "undecided", "beyond"]
ORDER: tuple[Standing, ...] = ("within", "wide", "undecided", "beyond")
LATER_LAYERS = "implementation gap of the engine in later layers"  # what is not tested of it
Evidence = Literal["excess", "gap"]
Kind = Literal["rare", "shift", "response"]
AS_RUN, REPLAY, OVERRIDE = "as-run", "router-replay", "on-policy-override"


@dataclass(frozen=True, slots=True)
class Leg:
    """One scoring against the same side's float32, and what a plain forward at its precision costs.

    Attributes:
        exact: the float32 scoring that it is measured from.
        plain: the plain forward at its precision.
        rms, size: root mean square and mean of |scoring - exact|, nats.
        excess, excess_size: the same over the plain forward's.
    """

    side: Side
    scoring: str
    exact: str
    plain: str
    rms: Estimate
    size: Estimate
    excess: Estimate
    excess_size: Estimate


@dataclass(frozen=True, slots=True)
class Gap:
    """Two implementations of one function in float32.

    Attributes:
        side: which is off where they differ, see :func:`gap_side`.
        size, k3, largest: of right - left, nats.
        floor: mean |delta| that float32 rounding is expected to cost: that of a plain forward at
            the run's precision, scaled by the ratio of their roundings. None: no such forward.
    """

    side: Side
    left: str
    right: str
    size: Estimate
    k3: Estimate
    largest: Estimate
    floor: float | None


@dataclass(frozen=True, slots=True)
class FarToken:
    """A token, by its id and its place; ``nats``: |delta|."""

    token: int
    sequence: int
    position: int
    nats: float


@dataclass(frozen=True, slots=True)
class FarTokens:
    """Tokens of a gap that are farther apart than rounding and differing experts explain.

    Attributes:
        bound: nats, see :meth:`Levels.gap_bounds` of the yardstick's largest token.
        worst: three of ``count`` at most.
    """

    bound: float
    count: int
    worst: tuple[FarToken, ...]

    def __str__(self) -> str:
        places = "; ".join(
            f"token {each.token} at position {each.position} of sequence {each.sequence} by "
            f"{short(each.nats, 2)}"
            for each in self.worst
        )
        tokens = "1 token is" if self.count == 1 else f"{self.count:,} tokens are"
        return f"{tokens} more than {short(self.bound, 2)} nats off: {places}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One number of the square against its level.

    Attributes:
        level: up to which it passes.
        far: tokens for which a gap is beyond its level, whatever its mean. None: there are none.
    """

    side: Side
    evidence: Evidence
    scoring: str
    value: Estimate
    level: float
    standing: Standing
    far: FarTokens | None = None


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


@dataclass(frozen=True, slots=True)
class Square:
    """The square of one run.

    Attributes:
        device: class of devices whose levels apply.
        calibrated: there are levels for it.
        correlation: of the roundings of engine and trainer; near 0 they add up in quadrature.
        nearest: of a side's with the plain forward's, the larger one.
        findings: every excess and gap, judged.
        displaced: prompts of every side that lie farther off than in the plain forward.
        declared: what the trainer's declared settings alone cost, over the plain forward's rounding
            without them; None: it declares none.
        not_judged: sides and corners that could not be measured, and why.
        seconds: of each pass that only the square needs.
        unmeasured: checks that this leaves without any number ("excess-engine" …).
    """

    device: str
    calibrated: bool
    legs: tuple[Leg, ...]
    gaps: tuple[Gap, ...]
    correlation: Estimate | None
    findings: tuple[Finding, ...]
    not_judged: tuple[NotTested, ...]
    seconds: dict[str, float]
    unmeasured: tuple[str, ...] = ()
    displaced: tuple[Displaced, ...] = ()
    declared: Estimate | None = None
    nearest: Estimate | None = None


def short(value: float, digits: int = 3) -> str:
    """Return a number to some significant digits, its exponent without zeros.

    >>> short(2.319e-7), short(1e-5), short(0.5)
    ('2.32e-7', '1e-5', '0.5')
    """
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e")


def check_id(finding: Finding) -> str:
    """As "excess-engine", "excess-other-engine", "implementation-gap-trainer"."""
    if finding.evidence == "excess":
        return f"excess-{finding.side}"
    trainers = Key(finding.scoring).side == TRAIN
    return "implementation-gap" + ("-trainer" if trainers else "")


def shared(square: Square, finding: Finding | Displaced) -> bool:
    """Return whether a finding rests on the trainer's model code being right.

    The reference shares that code: a fault of it would look like the other side's.
    """
    if isinstance(finding, Finding) and finding.evidence == "gap":
        return finding.side == "either"
    legs = {leg.scoring for leg in square.legs if leg.exact == REFERENCE}
    return finding.side != "trainer" and finding.scoring in legs


# Share of the correlation with a plain forward that the two sides' reaches: 41 clean blocks of six
# models on a CPU 0.62 to 0.96, planted faults 0.15 to 0.54 (docs/evidence/precisions.md).
ALIKE = 0.55


def rounds_alike(square: Square) -> bool | None:
    """Return whether both sides round alike, for a model in which roundings can be alike at all.

    Differences grow through the layers, and so correlations fall: of a clean model of 30 layers
    they are near 0. The side that rounds more like the plain forward says how far they fall.
    None where that is not asked: of two functions or precisions, of a side that rounds more than
    it may or has tokens that are far off, and on devices without calibration. On GPUs kernels are
    independent by nature.
    """
    found = square.correlation
    off: list[Finding | Displaced] = [
        each
        for each in square.findings
        if each.standing == "beyond" or (each.evidence == "gap" and each.standing != "within")
    ]
    off += [each for each in square.displaced if each.standing == "beyond"]
    if square.unmeasured or off:
        return None
    plains = {leg.plain for leg in square.legs if leg.side in ("engine", "trainer")}
    if found is None or square.nearest is None or not square.calibrated or len(plains) > 1:
        return None
    return found.value >= ALIKE * square.nearest.value


def sides_at_fault(square: Square) -> list[Side]:
    """Return the side of everything beyond its level; "either" where that cannot be told."""
    findings: list[Finding | Displaced] = [*square.findings, *square.displaced]
    return [
        "either" if shared(square, finding) else finding.side
        for finding in findings
        if finding.standing == "beyond"
    ]


@dataclass(frozen=True, slots=True)
class Block:
    """Positions from ``low`` up to, not including, ``high``.

    Attributes:
        nats: median |delta| there; with ``plain`` the mean without the worst tenth.
        plain: that of a plain forward in the same precision; None: the side is in float32.
        rare: |delta| that one token in 200 reaches, and three at least; 0: not counted.
    """

    low: int
    high: int
    nats: float
    plain: float | None = None
    rare: float = 0.0

    @property
    def off(self) -> float:
        """How far it is off: in nats, or in times of the plain forward.

        Few tokens have ten times the level: two experts that are nearly tied change places by
        float32 rounding alone, in a token of thousands.
        """
        if self.plain is None:
            return max(self.nats, self.rare / 10.0)
        return self.nats / self.plain if self.plain else float(np.inf if self.nats else 1.0)


@dataclass(frozen=True, slots=True)
class LongGap:
    """A side against the float32 reference along the long sequence.

    Attributes:
        side: which is off where they differ; the engine's may be the reference's fault.
        blocks: the first one is what the run itself reached.
        passed, failed: levels of :attr:`Block.off`.
    """

    scoring: str
    side: OneSide
    blocks: tuple[Block, ...]
    passed: float
    failed: float

    @property
    def off(self) -> float:
        """What is judged: the worst block, or how far a side as it runs stays off; NaN fails."""
        beyond = [block.off for block in self.blocks[1:]]
        if not self.rounded or np.isnan(beyond).any():
            return float(np.max(beyond))
        last = math.ceil(len(beyond) / 4)
        return max(float(np.median(beyond)), min(beyond[-last:]))

    @property
    def status(self) -> CheckStatus:
        """Judge it; a number that is none fails."""
        if self.off <= self.passed:
            return "passed"
        return "inconclusive" if self.off <= self.failed else "failed"

    @property
    def begins(self) -> int | None:
        """First position of the first block beyond its level; None: all pass.

        Of several the first whose median is.
        """
        beyond = [block for block in self.blocks if not block.off <= self.passed]
        whole = [b for b in beyond if b.off == b.nats or b.plain is not None or np.isnan(b.off)]
        return (whole or beyond)[0].low if beyond else None

    @property
    def rounded(self) -> bool:
        """Whether the side is in the precision of the run."""
        return self.blocks[0].plain is not None


@dataclass(frozen=True, slots=True)
class LongSequence:
    """What one long sequence showed.

    Attributes:
        tokens: of the sequence.
        reached: tokens of the run's own longest sequence.
    """

    tokens: int
    reached: int
    gaps: tuple[LongGap, ...]

    @property
    def tested(self) -> int:
        """Up to which length both sides were looked at; 0 where only one was."""
        return self.tokens if len({gap.side == "trainer" for gap in self.gaps}) > 1 else 0


def sentence(result: LongSequence, gap: LongGap) -> str:
    """Say from which position on a side is off, or that it is nowhere."""
    name, off = Key(gap.scoring).side, f"{gap.off:.2g}"
    where = "at every position" if (gap.begins or 0) <= 1 else f"from position {gap.begins:,} on"
    if gap.rounded and gap.status == "passed":
        return (
            f"up to position {result.tokens:,} the error of {name} is {off} times that of a plain "
            "forward, which is rounding"
        )
    if gap.rounded:
        return f"{where} the error of {name} is {off} times that of a plain forward"
    median = float(np.max([block.nats for block in gap.blocks[1:]]))
    if gap.begins is None:
        return (
            f"in float32 {name} agrees with the reference at all {result.tokens:,} positions: the "
            f"median token is {f'within {short(median, 2)} nats' if median else 'identical'}"
        )
    what = f"the median token is up to {short(median, 2)} nats off"
    if median <= gap.passed:
        rare = max(block.rare for block in gap.blocks)
        what = f"one token in 200 is {short(rare, 2)} nats off, or more"
    return f"{where} {name} computes the wrong function: in float32 {what}"


SAID = {
    "rare": "has a token",
    "shift": "has a mean",
    "response": "has a response whose median token is",
}


def displacement(finding: Displaced) -> str:
    """Return how many prompts are how far from float32, and how many a plain forward has."""
    far, plain = f"{short(finding.nats, 2)} nats", short(finding.nats / finding.factor, 2)
    return (
        f"in {finding.beyond} of {finding.n_prompts} prompts {finding.scoring} "
        f"{SAID[finding.kind]} more than {far} from float32; precision alone puts "
        f"{finding.plain_beyond} beyond {plain} (p = {short(finding.chance, 1)})"
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """The new pass against the old one, as it runs or with one remedy.

    Attributes:
        id: AS_RUN, REPLAY or OVERRIDE.
        scoring: the new pass; None where nothing was run, because the ratio is set, not measured.
        metrics: name -> estimate, see ``METRICS_OF_RATIO``; empty where nothing was measured.
        routing: share of (token, layer), and of tokens, whose experts differ between the passes.
    """

    id: str
    scoring: str | None
    metrics: dict[str, Estimate] = field(default_factory=dict)
    routing: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TwoPasses:
    """What two forward passes of one trainer differ by.

    Attributes:
        old: the first pass.
        injected: what was injected into the new pass on purpose, or "".
        replayed: what both passes replay, so that their routes cannot differ, or "".
        notes: what was not run, and why; one sentence each.
    """

    old: str
    variants: tuple[Variant, ...]
    injected: str = ""
    replayed: str = ""
    notes: tuple[str, ...] = ()

    def named(self, id: str) -> Variant | None:
        """Return one variant, or None where it was not run."""
        return next((variant for variant in self.variants if variant.id == id), None)
