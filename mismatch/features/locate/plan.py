"""Which sequences of a run are recorded, and what runs on them."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from pathlib import Path

import numpy as np

from mismatch.analysis.square import precision_of
from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import plain_of, reference_of
from mismatch.features.locate.results import Sequence
from mismatch.keys import PLAIN, REFERENCE, TRAIN, Key
from mismatch.specs import DTYPES, Dtype, EngineSpec, Pass, TrainSpec
from mismatch.types import Floats, Ints, Rollout, SideFacts


def select(
    rollout: Rollout, delta: Floats | None, count: int, longest: int
) -> tuple[Sequence, ...]:
    """Choose the worst half by mean |delta|, and others at random; sequences keep their beginning.

    A decoder looks back only: the beginning of a sequence gives what it gives within the whole.

    Args:
        delta: [A] train - rollout of the action tokens; None: all are taken at random.
        longest: tokens of a sequence that are kept.

    Raises:
        MismatchError: no sequence has an action token that early.
    """
    lengths = np.diff(rollout.offsets)
    masks = np.split(rollout.action_mask, rollout.offsets[1:-1])
    able = [index for index, mask in enumerate(masks) if mask[:longest].any()]
    if not able:
        fault = f"no sequence has an action token among its first {longest} tokens"
        raise MismatchError(fault, "raise --max-sequence-tokens")
    worst: list[int] = []
    if delta is not None:
        owner, size = rollout.sequence_of_token[rollout.actions], np.abs(np.nan_to_num(delta))
        means = {index: float(size[owner == index].mean()) for index in able}
        worst = sorted(able, key=lambda index: -means[index])[: (count + 1) // 2]
    rest = [index for index in able if index not in worst]
    drawn = np.random.default_rng(0).permutation(rest)[: count - len(worst)].tolist()
    return tuple(
        Sequence(index, min(int(lengths[index]), longest), "worst" if index in worst else "random")
        for index in sorted([*worst, *drawn])
    )


def _rows(rollout: Rollout, sequences: Several[Sequence]) -> Ints:
    """Return the places of these sequences' tokens, as far as they are kept."""
    starts = [int(rollout.offsets[sequence.index]) for sequence in sequences]
    spans = zip(starts, sequences, strict=True)
    return np.concatenate([np.arange(at, at + sequence.tokens) for at, sequence in spans])


def part_of(rollout: Rollout, sequences: Several[Sequence]) -> Rollout:
    """Return the rollout of these sequences alone, as far as they are kept.

    Its distribution is that of all tokens: engines rescore without a cut.
    """
    rows = _rows(rollout, sequences)
    index = np.asarray([sequence.index for sequence in sequences])
    return replace(
        rollout,
        token_ids=rollout.token_ids[rows],
        sampling=rollout.sampling.uncut(),
        offsets=np.concatenate([[0], np.cumsum([sequence.tokens for sequence in sequences])]),
        action_mask=rollout.action_mask[rows],
        turn=rollout.turn[rows],
        prompt_index=rollout.prompt_index[index],
        finish_reason=tuple(rollout.finish_reason[number] for number in index),
        rewards=None if rollout.rewards is None else rollout.rewards[index],
    )


def actions_of(rollout: Rollout, sequences: Several[Sequence]) -> Ints:
    """Return the places among the rollout's action tokens [A] of those in :func:`part_of`."""
    rows = _rows(rollout, sequences)
    return (np.cumsum(rollout.action_mask) - 1)[rows[rollout.action_mask[rows]]]


def side_folder(directory: Path | str, name: str) -> Path:
    """Return the folder in which a side leaves what it recorded."""
    folder = Path(directory) / name.replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def dtype_of(facts: SideFacts) -> Dtype | None:
    """Return what a side computes in, whatever its cache holds; None: no plain forward does."""
    precision = (precision_of(facts) or "").partition("-")[0]
    return next((dtype for dtype in DTYPES if dtype == precision), None)


def passes_of(train: TrainSpec, dtypes: set[Dtype]) -> list[Pass]:
    """Plan the trainer, a plain forward in each reduced dtype, and the float32 reference last.

    The trainer runs on one rank, by itself: nothing of the engine's is in it.
    """
    plain = [
        Pass(Key.of(PLAIN, precision=dtype), replace(plain_of(train, dtype), routing=False))
        for dtype in sorted(dtypes - {"fp32"})
    ]
    reference = replace(reference_of(train), routing=False)
    alone = replace(
        train,
        sequence_parallel=1,
        replay_routing=None,
        replay_source=None,
        inject=(),
        grad=False,
        routing=False,
        micro_batch_tokens=reference.micro_batch_tokens,
    )
    return [Pass(TRAIN, alone), *plain, Pass(REFERENCE, reference)]


EAGER = {  # all tokens go through the modules, and no graph hides them
    "vllm": ("enforce_eager",),
    "sglang": ("disable_cuda_graph", "disable_radix_cache"),
}


def eager(engine: EngineSpec) -> EngineSpec:
    """Return the engine as it can be watched: no graphs, no routes."""
    own = EAGER.get(engine.engine, ())
    args = [pair for pair in engine.args if pair[0].lstrip("-").replace("-", "_") not in own]
    given = (*args, *((name, True) for name in own))
    return replace(engine, args=given, routing=False, prefill=True)
