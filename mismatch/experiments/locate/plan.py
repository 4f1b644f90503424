"""Which sequences of a run are recorded, and what runs on them."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np

from mismatch.analysis.square import precision_of
from mismatch.errors import MismatchError
from mismatch.experiments.locate.types import Sequence
from mismatch.experiments.passes import plain_of, reference_of
from mismatch.models.config import ModelConfig
from mismatch.run.store import PLAIN, REFERENCE, TRAIN
from mismatch.specs import Dtype, EngineSpec, Pass, Sampling, TrainSpec
from mismatch.types import Fingerprint, Floats, Ints, Rollout

SEQUENCES, TOKENS = 8, 512  # recorded by default, and of each at most
FLOAT32_BYTES = 4
WHOLE = Sampling().top_k  # no token is cut
SHORT: dict[str, Dtype] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


def select(
    rollout: Rollout, delta: Floats | None, count: int, longest: int, seed: int
) -> tuple[Sequence, ...]:
    """The worst half by mean |delta|, and others at random; sequences keep their beginning.

    A decoder looks back only: the beginning of a sequence gives what it gives within the whole.

    Args:
        delta: [A] train - rollout of the action tokens; None: all are taken at random.
        longest: tokens of a sequence that are kept.

    Raises:
        MismatchError: no sequence has an action token that early.
    """
    able, means = [], {}
    ends = rollout.offsets[1:]
    owner = rollout.sequence_of_token[rollout.actions]
    for index, (start, end) in enumerate(zip(rollout.offsets[:-1], ends, strict=True)):
        if rollout.action_mask[start : min(end, start + longest)].any():
            able.append(index)
    if not able:
        raise MismatchError(
            f"no sequence has an action token among its first {longest} tokens",
            "raise --max-sequence-tokens",
        )
    if delta is not None:
        size = np.abs(np.nan_to_num(delta))
        means = {index: float(size[owner == index].mean()) for index in able}
    worst = sorted(able, key=lambda index: -means[index])[: (count + 1) // 2] if means else []
    rest = [index for index in able if index not in worst]
    drawn = np.random.default_rng(seed).permutation(rest)[: count - len(worst)]
    chosen = [(index, "worst") for index in worst] + [(int(index), "random") for index in drawn]
    return tuple(
        Sequence(index, int(min(ends[index] - rollout.offsets[index], longest)), why)  # type: ignore[arg-type]
        for index, why in sorted(chosen)
    )


def part_of(rollout: Rollout, sequences: Several[Sequence]) -> Rollout:
    """The rollout of these sequences alone, as far as they are kept.

    The law is that of all tokens: engines rescore without top-p and top-k.
    """
    spans = [(int(rollout.offsets[s.index]), s.tokens) for s in sequences]
    rows = np.concatenate([np.arange(start, start + size) for start, size in spans])
    index = np.asarray([one.index for one in sequences])
    return replace(
        rollout,
        token_ids=rollout.token_ids[rows],
        sampling=replace(rollout.sampling, top_p=1.0, top_k=WHOLE),
        offsets=np.concatenate([[0], np.cumsum([size for _, size in spans])]),
        action_mask=rollout.action_mask[rows],
        turn=rollout.turn[rows],
        prompt_index=rollout.prompt_index[index],
        finish_reason=tuple(rollout.finish_reason[one] for one in index),
        rewards=None if rollout.rewards is None else rollout.rewards[index],
    )


def actions_of(rollout: Rollout, sequences: Several[Sequence]) -> Ints:
    """Places among the rollout's action tokens [A] of those in :func:`part_of`, in its order."""
    place = np.cumsum(rollout.action_mask) - 1
    spans = [(int(rollout.offsets[s.index]), s.tokens) for s in sequences]
    rows = np.concatenate([np.arange(start, start + size) for start, size in spans])
    places: Ints = place[rows[rollout.action_mask[rows]]]
    return places


def values_of(config: ModelConfig) -> int:
    """Numbers that all sites of one token hold."""
    heads = config.heads * (2 * config.head_dim + (config.value_dim or config.head_dim))
    shared = config.kv_heads * (2 * config.head_dim + (config.value_dim or config.head_dim))
    return 2 * config.hidden + config.layers * (6 * config.hidden + heads + shared + config.experts)


def disk_bytes(config: ModelConfig, tokens: int, sides: int) -> int:
    """What is on disk at most while these sides are held against the reference.

    Each leaves what it recorded and what is new in it, in float32 at most; so does the reference.
    """
    return values_of(config) * tokens * FLOAT32_BYTES * (2 * sides + 1)


def require_disk(config: ModelConfig, tokens: int, sides: int, free: int) -> None:
    """Refuse what would fill a disk.

    Raises:
        MismatchError: more than ``free`` bytes.
    """
    needed = disk_bytes(config, tokens, sides)
    if needed > free:
        raise MismatchError(
            f"what {sides} sides record of {tokens:,} tokens takes up to {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free in the run directory",
            "lower --max-sequence-tokens or --sequences, or free some",
        )


def dtype_of(facts: Fingerprint | dict[str, object]) -> Dtype | None:
    """What a side computes in, whatever its cache holds; None where no plain forward does."""
    precision = precision_of(facts)
    return None if precision is None else SHORT.get(precision.partition("-")[0])


def trainer_of(train: TrainSpec) -> TrainSpec:
    """The run's trainer on one rank, by itself: nothing of the engine's in it."""
    return replace(
        train, sequence_parallel=1, replay_routing=None, replay_source=None, inject=(), grad=False,
        routing=False,
    )  # fmt: skip


def passes_of(train: TrainSpec, dtypes: set[Dtype]) -> list[Pass]:
    """The trainer, a plain forward in each reduced dtype, the float32 reference last."""
    plain = [
        Pass(f"{PLAIN}:{dtype}", replace(plain_of(train, dtype), routing=False))
        for dtype in sorted(dtypes - {"fp32"})
    ]
    reference = replace(reference_of(train), routing=False)
    alone = replace(trainer_of(train), micro_batch_tokens=reference.micro_batch_tokens)
    return [Pass(TRAIN, alone), *plain, Pass(REFERENCE, reference)]


EAGER = {  # all tokens go through the modules, and no graph hides them
    "vllm": ("enforce_eager",),
    "sglang": ("disable_cuda_graph", "disable_radix_cache"),
}


def eager(engine: EngineSpec) -> EngineSpec:
    """The engine as it can be watched: one replica, no graphs, no routes."""
    own = EAGER.get(engine.engine, ())
    args = [pair for pair in engine.args if pair[0].lstrip("-").replace("-", "_") not in own]
    given = (*args, *((name, True) for name in own))
    return replace(engine, args=given, routing=False, data_parallel_size=None, prefill=True)
