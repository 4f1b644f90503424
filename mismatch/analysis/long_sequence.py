"""Is a side another function from some position on? One long sequence in float32, judged by blocks.

A single sequence has no interval over prompts. A float32 gap is no sample of anything: it is judged
as it is, over the positions that the run itself did not reach, in blocks, so that a fault from some
position on is not averaged away. Of a block the median token counts, and at ten times the level
one token in 200, three at least, as of a cache whose blocks begin wrong: two experts that are
nearly tied change places by float32 rounding alone, and then one token is off by up to nats.

A side as it runs rounds, so its blocks are judged by those of a plain forward. There the mean of
all tokens but the worst tenth counts: half of a model's tokens may be so certain that the median is
next to nothing. One pair of experts that changes places early moves the tokens that attend to it,
for some blocks (4.7, 3.6, 1.5, 1.3, 0.9 … times were seen in a clean run). A fault stays: half of
the blocks, or the last quarter, have to be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.analysis.displaced import device_class, levels_for
from mismatch.analysis.results import Block, LongGap, LongSequence, OneSide, sentence, short
from mismatch.analysis.square import PlainCost, incomparable, precision_of, same_law
from mismatch.keys import FLOAT32, PLAIN, REFERENCE, REFERENCE_LONG, TRAIN, Key, yardsticks
from mismatch.run import store
from mismatch.run.long_rollout import FOLDER
from mismatch.specs import CheckSpec
from mismatch.types import Check, Floats, Scoring

BLOCKS = 8  # of positions beyond the run's own
BLOCK = 100  # tokens at least: of 47, clean trainers' rounding varies from 0.8 to 1.5 times
# Over the level of a gap. Experts of one token exchanged on purpose, in each of 24 nearest ties of
# tiny-gpt-oss, moved the median token of a later block by 1.9e-5 nats at most (the level is 1e-5).
FACTOR = 10.0
RARE = 1 / 200  # tokens of a block that may be beyond that level
# Times a plain forward. Clean trainers in bf16 (gpt-oss, qwen3, qwen3_moe, llama): 0.8 to 1.3.
TIMES = (2.0, 2.5)
ROUNDING = "long-sequence-trainer-rounding"  # the check of the trainer as it runs


def of_run(run_dir: Path | str, spec: CheckSpec, fix: str = "") -> LongSequence | None:
    """Return what the long sequence of a run shows; None where it has none.

    Args:
        fix: name of a trainer with a fix, which takes the place of the run's.

    Raises:
        MismatchError: artefacts are damaged.
    """
    run_dir = Path(run_dir)
    folder = run_dir / FOLDER
    names = store.scoring_names(folder) if folder.exists() else []
    own = store.scoring_names(run_dir)
    if REFERENCE_LONG not in names or REFERENCE not in own:
        return None
    exact = store.load_scoring(run_dir, REFERENCE)
    yardsticks = {n: store.load_scoring(run_dir, n) for n in own if Key(n).side == PLAIN}
    plain = PlainCost.of(yardsticks, exact.logprobs)
    scorings = {name: store.load_scoring(folder, name) for name in names}
    tokens = len(store.load_rollout(folder).token_ids)
    reached = int(np.diff(store.load_rollout(run_dir).offsets).max())
    gaps = tuple(_gaps(scorings, spec, plain, reached, fix))
    return LongSequence(tokens, reached, gaps) if gaps else None


def _gaps(
    scorings: dict[str, Scoring], spec: CheckSpec, cost: PlainCost, reached: int, fix: str
) -> Iterator[LongGap]:
    reference, engine = scorings[REFERENCE_LONG], spec.rollout.engine.engine
    prints = {Key(name).side: scoring.fingerprint for name, scoring in scorings.items()}
    device = device_class(prints.get(engine, {}), prints.get(TRAIN, {}))
    level = levels_for(device).gap_bounds(cost.floor, cost.nats)
    trainer = Key(fix or TRAIN)
    in_float32, rounded = trainer.over_long(FLOAT32), trainer.over_long()
    sides: dict[str, OneSide] = {Key(engine).over_long(FLOAT32): "either", in_float32: "trainer"}
    for name, side in sides.items():
        if name in scorings and not incomparable(scorings[name], reference):
            away = scorings[name].logprobs - reference.logprobs
            pairs = zip(_blocks(away, reached), _blocks(away, reached, _rare), strict=True)
            # The run itself reached the first, and other checks judge that.
            blocks = tuple(replace(b, rare=few.nats if b.low > 1 else 0.0) for b, few in pairs)
            yield LongGap(name, side, blocks, FACTOR * level.passed, FACTOR * level.failed)
    both: dict[str, OneSide] = {Key(engine).over_long(): "engine", rounded: "trainer"}
    for name, side in both.items():
        own = scorings.get(name)
        facts = own.fingerprint if own else {}
        names = yardsticks(facts, precision_of(facts), side == "trainer")
        plain = next((scorings[n] for n in map(Key.over_long, names) if n in scorings), None)
        if own and plain and same_law(own, reference):
            away, yardstick = (each.logprobs - reference.logprobs for each in (own, plain))
            # The mean of all but the largest tenth.
            mean = lambda sizes: np.sort(sizes)[: math.ceil(0.9 * len(sizes))].mean()  # noqa: E731
            own_blocks, plains = (_blocks(each, reached, mean) for each in (away, yardstick))
            pairs = zip(own_blocks, plains, strict=True)
            blocks = tuple(replace(block, plain=of_plain.nats) for block, of_plain in pairs)
            yield LongGap(name, side, blocks, *TIMES)


def _rare(sizes: Floats) -> float:
    """Return the size that one token in 200 exceeds, and at least three do."""
    beyond = max(3, math.ceil(len(sizes) * RARE))
    return float(np.sort(sizes)[-beyond]) if beyond <= len(sizes) else 0.0


def _blocks(
    delta: Floats, reached: int, size: Callable[[Floats], Any] = np.median
) -> Iterator[Block]:
    """Yield the size of |delta| where the run was, then beyond; ``delta`` begins at position 1."""
    end = len(delta) + 1
    count = min(BLOCKS, max(1, (end - reached) // BLOCK))
    edges = np.unique(np.linspace(reached, end, count + 1).astype(int)).tolist()
    for low, high in zip([1, *edges[:-1]], edges, strict=True):
        yield Block(low, high, float(size(np.abs(delta[low - 1 : high - 1]))))


FROM_THE_START = "it begins at position 1: look at what other failed checks and causes name first"


def checks(result: LongSequence) -> tuple[Check, ...]:
    """Return one check for each side in float32, and one for the trainer as it runs."""
    made = []
    for gap in result.gaps:
        side = "trainer" if gap.side == "trainer" else "engine"
        id_ = f"long-sequence-{side}{'-rounding' if gap.rounded else ''}"
        fix = "" if gap.status == "passed" else FROM_THE_START if gap.begins == 1 else (
            "compare what depends on position: rotary settings, attention window, chunked prefill"
        )  # fmt: skip
        detail = f"{sentence(result, gap)} (level {short(gap.passed, 2)})"
        made.append(Check(id_, gap.status, detail, fix))
    return tuple(made)
