"""Is a side another function from some position on? One long sequence in float32, judged by blocks.

A single sequence has no interval over prompts. A float32 gap is no sample of anything: it is judged
as it is, over the positions that the run itself did not reach, in blocks, so that a fault from some
position on is not averaged away. Of a block the median token counts: two experts that are nearly
tied change places by float32 rounding alone, and then one token is off by up to nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mismatch.analysis.displaced import device_class, levels_for
from mismatch.analysis.plugins import Analysis
from mismatch.analysis.square import OneSide, PlainCost, incomparable
from mismatch.run import store
from mismatch.run.store import PLAIN, REFERENCE, TRAIN
from mismatch.specs import CheckSpec
from mismatch.types import Check, CheckStatus, Floats, Scoring

FOLDER = "long"  # its run directory within that of the check
MODE = "long"  # of its scorings: vllm:long, fsdp:long, reference:long
EXACT = f"{REFERENCE.partition(':')[0]}:{MODE}"
BLOCKS = 8  # of positions beyond the run's own
# Over the level of a gap. Experts of one token exchanged on purpose, in each of 24 nearest ties of
# tiny-gpt-oss, moved the median token of a later block by 1.9e-5 nats at most (the level is 1e-5).
FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Block:
    """Positions from ``low`` up to, not including, ``high``: median |delta| there, nats."""

    low: int
    high: int
    nats: float


@dataclass(frozen=True, slots=True)
class LongGap:
    """A side in float32 against the reference along the long sequence.

    Attributes:
        side: which is off where they differ; the engine's may be the reference's fault.
        blocks: the first one is what the run itself reached.
        passed, failed: levels of the median |delta| of a block, nats.
    """

    scoring: str
    side: OneSide
    blocks: tuple[Block, ...]
    passed: float
    failed: float

    @property
    def worst(self) -> Block:
        """The worst block beyond the run's own positions; a number that is none is the worst."""
        return max(self.blocks[1:], key=lambda b: (not np.isfinite(b.nats), np.nan_to_num(b.nats)))

    @property
    def status(self) -> CheckStatus:
        """Judge the worst block; a number that is none fails."""
        if self.worst.nats <= self.passed:
            return "passed"
        return "inconclusive" if self.worst.nats <= self.failed else "failed"

    @property
    def begins(self) -> int | None:
        """First position of the first block beyond its level; None: all pass."""
        return next((b.low for b in self.blocks if not b.nats <= self.passed), None)


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
        return self.tokens if len(self.gaps) > 1 else 0


def of_run(run_dir: Path | str, spec: CheckSpec) -> LongSequence | None:
    """Return what the long sequence of a run shows; None where it has none.

    Raises:
        MismatchError: artefacts are damaged.
    """
    run_dir = Path(run_dir)
    folder = run_dir / FOLDER
    names = store.scoring_names(folder) if folder.exists() else []
    own = store.scoring_names(run_dir)
    if EXACT not in names or REFERENCE not in own:
        return None
    exact = store.load_scoring(run_dir, REFERENCE)
    yardsticks = {n: store.load_scoring(run_dir, n) for n in own if n.startswith(f"{PLAIN}:")}
    plain = PlainCost.of(yardsticks, exact.logprobs)
    scorings = {name: store.load_scoring(folder, name) for name in names}
    tokens = len(store.load_rollout(folder).token_ids)
    reached = int(np.diff(store.load_rollout(run_dir).offsets).max())
    gaps = tuple(_gaps(scorings, spec, plain, scorings.pop(EXACT), reached))
    return LongSequence(tokens, reached, gaps) if gaps else None


def _gaps(
    scorings: dict[str, Scoring],
    spec: CheckSpec,
    plain: PlainCost,
    reference: Scoring,
    reached: int,
) -> Iterator[LongGap]:
    engine = spec.rollout.engine.engine
    prints = {name.partition(":")[0]: scoring.fingerprint for name, scoring in scorings.items()}
    device = device_class(prints.get(engine, {}), prints.get(TRAIN, {}))
    level = levels_for(device).gap_bounds(plain.floor, plain.nats)
    sides: dict[str, OneSide] = {f"{engine}:{MODE}": "either", f"{TRAIN}:{MODE}": "trainer"}
    for name, side in sides.items():
        if name in scorings and not incomparable(scorings[name], reference):
            blocks = tuple(_blocks(scorings[name].logprobs - reference.logprobs, reached))
            yield LongGap(name, side, blocks, FACTOR * level.passed, FACTOR * level.failed)


def _blocks(delta: Floats, reached: int) -> Iterator[Block]:
    """Yield the median |delta| where the run was, then beyond; ``delta`` begins at position 1."""
    end = len(delta) + 1
    edges = np.unique(np.linspace(reached, end, BLOCKS + 1).astype(int)).tolist()
    for low, high in zip([1, *edges[:-1]], edges, strict=True):
        yield Block(low, high, float(np.median(np.abs(delta[low - 1 : high - 1]))))


def checks(result: LongSequence) -> tuple[Check, ...]:
    """Return one check for each side in float32."""
    made = []
    for gap in result.gaps:
        side = "trainer" if gap.side == "trainer" else "engine"
        fix = "" if gap.status == "passed" else (
            "compare what depends on position: rotary settings, attention window, chunked prefill"
        )  # fmt: skip
        detail = f"{sentence(result, gap)} (level {gap.passed:.2g})"
        made.append(Check(f"long-sequence-{side}", gap.status, detail, fix))
    return tuple(made)


def sentence(result: LongSequence, gap: LongGap) -> str:
    """Say from which position on a side is another function, or that it is none anywhere."""
    name, nats = gap.scoring.partition(":")[0], f"{gap.worst.nats:.2g} nats"
    if gap.begins is None:
        return (
            f"at all {result.tokens:,} positions {name} in float32 agrees with the float32 "
            f"reference: the median token of a block is within {nats}"
        )
    return (
        f"from position {gap.begins:,} on {name} in float32 computes another function than the "
        f"float32 reference: the median token of a block is up to {nats} off"
    )


ANALYSIS = Analysis("long_sequence", LongSequence, order=20, from_run=of_run, checks=checks)
