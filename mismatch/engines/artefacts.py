"""From what an engine returned to a rollout and its scorings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import CacheKind, CachePair, Likeliest, narrowest
from mismatch.engines.base import Continued, Engine, ExpertLayout, Progress
from mismatch.engines.model_info import ModelInfo
from mismatch.engines.turns import Trajectory, joined
from mismatch.errors import CorruptCapture, MismatchError
from mismatch.keys import Key
from mismatch.models.tokenizers import special_texts
from mismatch.prompts.prompt import Prompt, grade
from mismatch.specs import RolloutSpec
from mismatch.types import (
    CACHED,
    Floats,
    Rollout,
    Routing,
    Scoring,
    SideFacts,
    SparseKeys,
    kept_rows,
    selecting_rows,
)

CAPTURE_FIX = "upgrade the engine, or run without routing: --no-routing"


def decode_fingerprint(
    engine: Engine, spec: RolloutSpec, tokenizer: Any, info: ModelInfo, pushed: str = ""
) -> SideFacts:
    """Return the engine's fingerprint with the weights as loaded.

    Args:
        pushed: why its weights are none of a checkpoint; they are not digested then.

    Raises:
        MismatchError: the engine runs in another dtype than was asked for.
    """
    facts: SideFacts = {**engine.fingerprint("decode"), "model": spec.engine.model}
    if facts["dtype"] not in (None, spec.engine.dtype):  # None: a server that does not say
        fault = f"{engine.name} runs in {facts['dtype']}, --dtype asked for {spec.engine.dtype}"
        raise MismatchError(fault, f"use --dtype {facts['dtype']}")
    facts |= {"stop_token_ids": list(info.stop_ids), "bos_token_id": tokenizer.bos_token_id}
    lost = "fp16 weights have lost bits that the checkpoint has"
    if reason := lost if facts["dtype"] == "fp16" else pushed:
        facts["weights_not_comparable"] = reason
        return facts
    weights = engine.weights()
    facts["weights"] = {name: list(digest) for name, digest in weights.digests.items()}
    facts["unmapped_weights"] = list(weights.unmapped)
    if weights.in_memory:
        facts["weights_in_memory"] = True
    if weights.of_adapter:
        facts["adapter_held_otherwise"] = list(weights.of_adapter)
        if weights.adapter_scale is not None:
            facts["adapter_times"] = weights.adapter_scale
    return facts


def build_rollout(
    trajectories: Sequence[Trajectory], spec: RolloutSpec, fingerprint: SideFacts
) -> Rollout:
    """Return all sequences as one flat rollout; the digests stay with the scoring."""
    sequences = [trajectory.token_ids for trajectory in trajectories]
    facts = fingerprint.copy()
    facts.pop("weights", None)
    facts.pop("unmapped_weights", None)
    return Rollout(
        token_ids=np.concatenate([np.asarray(ids, np.int64) for ids in sequences]),
        offsets=np.cumsum([0, *map(len, sequences)]).astype(np.int64),
        action_mask=np.concatenate([trajectory.sampled for trajectory in trajectories]),
        turn=np.concatenate([trajectory.turn for trajectory in trajectories]),
        prompt_index=np.asarray([trajectory.prompt for trajectory in trajectories], np.int64),
        finish_reason=tuple(trajectory.finish_reason for trajectory in trajectories),
        sampling=spec.sampling,
        fingerprint=facts,
    )


def decode_scoring(
    engine: Engine, trajectories: Sequence[Trajectory], rollout: Rollout, fingerprint: SideFacts
) -> Scoring:
    """Return what the engine said while it sampled; :func:`decode_routing` has the experts."""
    cached = np.concatenate([trajectory.cached for trajectory in trajectories])
    return Scoring(
        name=Key.of(engine.name, "decode"),
        token_ids=rollout.token_ids[rollout.actions],
        logprobs=np.concatenate([trajectory.logprobs for trajectory in trajectories]),
        fingerprint=fingerprint,
        likeliest=Likeliest.joined(
            sample.likeliest for trajectory in trajectories for sample in trajectory.responses
        ),
        extra={} if np.isnan(cached).all() else {CACHED: cached},
    )


def decode_routing(
    engine: Engine, trajectories: Sequence[Trajectory], rollout: Rollout
) -> Routing | None:
    """Return the experts that the engine used while it sampled; None where it captures none.

    Raises:
        CorruptCapture: as :func:`build_routing`.
    """
    layout = engine.experts()
    if layout is None:
        return None
    rows = [trajectory.routed for trajectory in trajectories]
    routing = build_routing(rows, layout, rollout, Key.of(engine.name, "decode"))
    given = [joined(sample.routed_weights for sample in each.responses) for each in trajectories]
    parts = [part for part in given if part is not None]
    if [len(part) for part in parts] != (np.diff(rollout.offsets) - 1).tolist():
        return routing  # the engine gives no weights, or not of every token
    weights = np.zeros(routing.ids.shape, np.float32)
    weights[routing.present] = np.concatenate(parts)
    return replace(routing, weights=weights)


def decode_keys(
    engine: Engine, trajectories: Sequence[Trajectory], rollout: Rollout
) -> SparseKeys | None:
    """Return what sparse attention selected while it sampled; None where nothing was captured."""
    given = [trajectory.keys for trajectory in trajectories]
    parts = [part for part in given if part is not None]
    if not parts or len(parts) < len(given):
        return None
    layers, ids = engine.key_layers(), np.concatenate(parts)
    rows = selecting_rows(rollout, ids.shape[2])
    kept = np.isin(rows, kept_rows(rollout, ids.shape[2], len(layers)))
    if len(ids) != len(rows) or not kept.any():
        return None
    return SparseKeys.of(rollout, layers, {"rows": rows[kept], "ids": ids[kept]})


def prefill_scoring(engine: Engine, rollout: Rollout, progress: Progress) -> Scoring:
    """Return the engine's own rescoring of the sampled ids by prefill."""
    sequences = [ids.tolist() for ids in rollout.sequences()]
    masks = np.split(rollout.action_mask, rollout.offsets[1:-1])
    starts = [int(np.flatnonzero(mask)[0]) for mask in masks]
    scores = engine.prefill(sequences, starts, rollout.sampling.temperature, progress)
    sampled = [
        logprobs[mask[start:]] for logprobs, mask, start in zip(scores, masks, starts, strict=True)
    ]
    return Scoring(
        name=Key.of(engine.name, "prefill"),
        token_ids=rollout.token_ids[rollout.actions],
        logprobs=np.concatenate(sampled),
        fingerprint=engine.fingerprint("prefill"),
    )


def build_routing(
    rows: Sequence[NDArray[Any] | None], layout: ExpertLayout, rollout: Rollout, source: str
) -> Routing:
    """Return experts of all sequences, [T, L, K]; the last token of a sequence has no row.

    Raises:
        CorruptCapture: a sequence without experts, of another shape, or impossible ids.
    """
    missing = [index for index, part in enumerate(rows) if part is None]
    if missing:
        says = f"{len(missing)} of {len(rows)} sequences have no routed experts"
        raise CorruptCapture(f"{source}, sequence {missing[0]}: {says}", CAPTURE_FIX)
    shape = (len(rollout.token_ids), len(layout.layers), layout.top_k)
    ids = np.zeros(shape, narrowest(layout.num_experts))
    present = np.zeros(shape[0], bool)
    bounds = zip(rollout.offsets[:-1], rollout.offsets[1:], strict=True)
    for sequence, (part, (start, end)) in enumerate(zip(rows, bounds, strict=True)):
        experts, forwarded = np.asarray(part), int(end - start) - 1
        where, wanted = f"{source}, sequence {sequence}", (forwarded, *shape[1:])
        # Some engines also return a row for the last token, which no forward made: not used.
        if experts.shape[1:] != wanted[1:] or len(experts) - forwarded not in (0, 1):
            says = f"{where}: routed experts {experts.shape}, expected {wanted}"
            raise CorruptCapture(says, CAPTURE_FIX)
        # Before they are narrowed to the smallest dtype.
        if experts.max(initial=0) >= layout.num_experts or experts.min(initial=0) < 0:
            says = f"{where}: expert {experts.max()} of {layout.num_experts}"
            raise CorruptCapture(says, CAPTURE_FIX)
        ids[start : end - 1] = experts[:forwarded]
        present[start : end - 1] = True
    routing = Routing(layout.layers, layout.num_experts, ids, present)
    routing.validate(rollout, source)
    return routing


def response_rewards(prompts: Sequence[Prompt], rollout: Rollout, tokenizer: Any) -> Floats | None:
    """Return the reward of every sequence, 0 to 1; None where nothing says what is right."""
    if not all(prompts[index].gradable for index in rollout.prompt_index):
        return None
    masks = np.split(rollout.action_mask, rollout.offsets[1:-1])
    special = special_texts(tokenizer)
    rewards = [
        grade(prompts[index], tokenizer.decode(ids[mask], skip_special_tokens=False), special)
        for index, ids, mask in zip(rollout.prompt_index, rollout.sequences(), masks, strict=True)
    ]
    return np.asarray(rewards, np.float64)


NEW = 16  # tokens that are compared, of each continuation
BLOCK = 128  # largest block of a cache that contexts are made long enough for


def context_of(longest: int) -> int:
    """Return the tokens that the triple needs, for prompts of at most ``longest``."""
    return max(longest, BLOCK + 1) + BLOCK + 2 * NEW


def measure(
    engine: Engine, prompts: Sequence[list[int]], block: int, progress: Progress
) -> list[CachePair]:
    """Return both pairs of every prompt.

    Args:
        block: tokens of a block of the cache; only whole blocks are read from it.

    Raises:
        MismatchError: blocks larger than contexts are long, or a cold pass that was not cold.
    """
    if not 0 < block <= BLOCK:
        raise MismatchError(f"the prefix cache has blocks of {block} tokens, at most {BLOCK} fit")
    contexts = [ids * -(-(block + 1) // len(ids)) for ids in prompts]  # of a block and more
    cold = engine.continue_greedily(contexts, block + NEW, False, progress)
    warm = engine.continue_greedily(contexts, NEW, True, progress)
    longer = [ids + continued.token_ids for ids, continued in zip(contexts, cold, strict=True)]
    # Warm first: a cold pass would leave blocks of the same tokens that prefill has written.
    warm_decode = engine.continue_greedily(longer, NEW, True, progress)
    cold_decode = engine.continue_greedily(longer, NEW, False, progress)
    if any(continued.cached for continued in (*cold, *cold_decode)):
        raise MismatchError("the engine read its prefix cache although it was told to leave it")
    rounds: list[tuple[CacheKind, list[list[int]], list[Continued], list[Continued]]] = [
        ("warm prompt", contexts, cold, warm),
        ("warm decode", longer, cold_decode, warm_decode),
    ]
    return [
        pair_of(kind, (len(ids), len(prompt)), left, right)
        for kind, given, lefts, rights in rounds
        for prompt, ids, left, right in zip(contexts, given, lefts, rights, strict=True)
    ]


def pair_of(
    kind: CacheKind, context: tuple[int, int], cold: Continued, warm: Continued
) -> CachePair:
    """Compare the logprobs of the cold continuation's tokens, up to where the warm one parts.

    A token that is not among the likeliest of the warm one is given the least of those: an upper
    bound of its log-probability, so that the two are at least that far apart.

    Args:
        context: its tokens, and how many of them prefill had written.
    """
    length = min(len(cold.token_ids), len(warm.token_ids), NEW)
    left, right = np.asarray(cold.token_ids[:length]), np.asarray(warm.token_ids[:length])
    differ = np.flatnonzero(left != right)
    parts = int(differ[0]) if len(differ) else None
    used = length if parts is None else parts + 1
    rows = list(zip(cold.token_ids, cold.likeliest, warm.likeliest, strict=False))[:used]
    return CachePair(
        kind,
        *context,
        warm.cached,
        tuple(own[token] for token, own, _ in rows),
        tuple(other.get(token, min(other.values())) for token, _, other in rows),
        parts,
    )
