"""One pass: every sequence of a rollout through the trainer's forward, teacher-forced."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from mismatch.distributions import Distributions
from mismatch.errors import EmptyComparison, MismatchError
from mismatch.routing_store import narrowest
from mismatch.specs import Pass, TrainSpec
from mismatch.training.changes import (
    changed_facts,
    noise_of,
    require_changeable,
    router_dtype_of,
)
from mismatch.training.distributions import Watch
from mismatch.training.fingerprint import fingerprint
from mismatch.training.load import Loaded, torch_dtype
from mismatch.training.logprobs import Law, Rounding, TokenStats
from mismatch.training.memory import MemoryPeak
from mismatch.training.packing import Batch, MicroBatch, collate, plan_batches
from mismatch.training.replay import Source
from mismatch.training.routing import LayerRoutes
from mismatch.training.scorer import Ask
from mismatch.training.world import Progress, World
from mismatch.types import Fingerprint, Ints, Rollout, Routing, Scoring

HEAD_TOLERANCE = 0.02  # of the logits' range; our head runs the same matmul as the family's
LEAK_TOLERANCE = 0.1  # standard deviations


@dataclass(frozen=True, slots=True)
class Part:
    """What one micro-batch gave, as numpy arrays.

    Attributes:
        tokens: [n] indices into T of all forwarded tokens, the rows of ``routes``.
        targets: [a] indices into T of the action tokens, the rows of ``stats``.
        routes: (ids, weights, margin) stacked over layers: [n, L, K], [n, L, K], [n, L].
        overruled: (token, layer) pairs whose own choice of experts was replaced by replayed ones.
        whole: distributions of those targets that are watched.
    """

    tokens: Ints
    targets: Ints
    stats: dict[str, np.ndarray]
    routes: tuple[np.ndarray, np.ndarray, np.ndarray | None] | None
    overruled: int = 0
    whole: np.ndarray | None = None


def score_pass(
    world: World,
    loaded: Loaded,
    rollout: Rollout,
    job: Pass,
    source: Source | None = None,
    asked: Distributions | None = None,
) -> Scoring | None:
    """Score a rollout as ``job.spec`` says; all ranks call it, rank 0 gets the scoring.

    Args:
        source: the routes to replay, where the spec asks for that.
        asked: the engine's whole distributions, whose positions and ids are kept here too.

    Raises:
        EmptyComparison: the rollout has no action token.
        MismatchError: token ids outside the vocabulary, dropout in a pass with gradients, a family
            whose head or layout this tool does not reproduce.
    """
    spec = job.spec
    _require_scorable(rollout, loaded)
    if spec.grad:
        _require_no_dropout(loaded)
    loaded.scorer.train(spec.grad)
    ask = _ask(spec, rollout, loaded)
    with torch.no_grad():
        loaded.once((spec.layout, spec.grad), lambda: _probe(loaded, spec, world))
        routing_note = loaded.once(
            (ask, spec.routing, spec.grad), lambda: _probe_routing(loaded, ask, spec, world)
        )
        require_changeable(loaded, spec, source, world)
    if routing_note != "captured":
        ask = replace(ask, routing=False)
    ask = replace(ask, watch=Watch.of(asked, rollout))
    with MemoryPeak(world.device, True) as peak, torch.set_grad_enabled(spec.grad):
        parts = run_batches(world, loaded, rollout, job, ask, source)
    gathered, peaks = world.gather(parts), world.gather(peak.bytes)
    facts = fingerprint(world, loaded, job, rollout.sampling, routing_note)
    if gathered is None:
        return None
    parts = [part for rank in gathered for part in rank]
    facts |= changed_facts(spec, source, sum(part.overruled for part in parts))
    facts |= {"seconds": round(peak.seconds, 3), "peak_bytes": peaks}
    scoring = _assemble(job.name, rollout, parts, facts, loaded)
    if ask.watch is None:
        return scoring
    whole = [(part.targets, part.whole) for part in parts if part.whole is not None]
    return replace(scoring, distributions=ask.watch.joined(whole))


def _ask(spec: TrainSpec, rollout: Rollout, loaded: Loaded) -> Ask:
    sampling = rollout.sampling
    return Ask(
        law=Law(sampling.temperature, sampling.top_k, sampling.top_p),
        autocast=torch_dtype(spec.autocast) if spec.autocast else None,
        head_dtype=torch_dtype(spec.head_dtype) if spec.head_dtype else None,
        routing=spec.routing and bool(loaded.scorer.moe),
        rounding=Rounding(
            spec.temperature_in,
            torch_dtype(spec.logprobs_dtype) if spec.logprobs_dtype else None,
        ),
    )


def run_batches(
    world: World,
    loaded: Loaded,
    rollout: Rollout,
    job: Pass,
    ask: Ask,
    source: Source | None = None,
) -> list[Part]:
    """This rank's micro-batches: every W-th, and as many forward passes as any other rank."""
    lengths = [int(n) for n in np.diff(rollout.offsets)]
    batches = plan_batches(lengths, job.spec.micro_batch_tokens, job.spec.layout)
    progress = Progress(job.name, sum(lengths), world.rank == 0)
    parts, done = [], 0
    for first in range(0, len(batches), world.size):
        mine = first + world.rank
        idle = mine >= len(batches)
        # FSDP2 gathers in step: a rank without work repeats a batch and drops the result.
        group = batches[0 if idle else mine]
        part = _forward(loaded, rollout, group, job.spec, ask, world, source)
        if not idle:
            parts.append(part)
        done += sum(batch.tokens for batch in batches[first : first + world.size])
        progress.update(done)
    return parts


def _forward(
    loaded: Loaded,
    rollout: Rollout,
    group: MicroBatch,
    spec: TrainSpec,
    ask: Ask,
    world: World,
    source: Source | None,
) -> Part:
    spans = [(int(rollout.offsets[n]), int(rollout.offsets[n + 1])) for n in group.sequences]
    batch = collate([rollout.token_ids[a:b] for a, b in spans], spec.layout, world.device)
    tokens = np.concatenate([np.arange(a, b) for a, b in spans])
    acting = np.flatnonzero(rollout.action_mask[tokens])
    targets = tokens[acting]
    # Tokens of a sequence are neighbours, and its first is never an action: t - 1 is one back.
    predicting = batch.rows[torch.from_numpy(acting - 1).to(world.device)]
    wanted = torch.from_numpy(rollout.token_ids[targets]).to(world.device)
    scorer = loaded.scorer
    replay = None if source is None else source.on(tokens, batch)
    noise = noise_of(spec, rollout, group.sequences, batch)
    router = router_dtype_of(spec)
    changes = (replay, noise, router)
    ask = replace(ask, changes=tuple(change for change in changes if change is not None))
    rows = None if ask.watch is None else ask.watch.rows(targets)
    values, routes = scorer(scorer.score, batch, predicting, wanted, ask, rows)
    stats = {
        field.name: _numpy(value)
        for field, value in zip(fields(TokenStats), values, strict=True)
        if value is not None
    }
    small = narrowest(scorer.moe[0].num_experts) if scorer.moe else None
    stacked = _stack(routes, batch, small) if routes is not None else None
    whole = stats.pop("distributions", None)
    return Part(tokens, targets, stats, stacked, 0 if replay is None else replay.overruled, whole)


def _stack(
    routes: list[LayerRoutes], batch: Batch, small: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    ids = np.stack([_numpy(layer.ids[batch.rows]).astype(small) for layer in routes], axis=1)
    weights = np.stack([_numpy(layer.weights[batch.rows]) for layer in routes], axis=1)
    margins = [layer.margin for layer in routes]
    if any(margin is None for margin in margins):
        return ids, weights, None
    known = [_numpy(margin[batch.rows]) for margin in margins if margin is not None]
    return ids, weights, np.stack(known, axis=1)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


# ---------------------------------------------------------------- before scoring


def _require_scorable(rollout: Rollout, loaded: Loaded) -> None:
    if rollout.n_actions == 0:
        raise EmptyComparison("the rollout has no action token to score")
    config = loaded.scorer.decoder_config
    highest = int(rollout.token_ids.max())
    if highest >= config.vocab_size or int(rollout.token_ids.min()) < 0:
        raise MismatchError(
            f"token id {highest} lies outside the vocabulary of {loaded.spec.model} "
            f"({config.vocab_size})",
            "score with the model (and tokenizer) that produced the rollout",
        )


def _require_no_dropout(loaded: Loaded) -> None:
    """Train mode must change nothing but gradients, or the pass would measure dropout."""
    config = loaded.scorer.decoder_config.to_dict()
    noisy = {
        name: value
        for name, value in config.items()
        if ("dropout" in name or name.endswith("_pdrop") or "jitter" in name)
        and isinstance(value, float)
        and value > 0
    }
    if noisy:
        name, value = next(iter(noisy.items()))
        raise MismatchError(
            f"{loaded.spec.model} has {name} = {value}: a train-mode pass would be random",
            f"set {name} to 0 in config.json, as RL trainers do, or leave the grad pass out",
        )


def _probe(loaded: Loaded, spec: TrainSpec, world: World) -> None:
    """A few tokens through the model, to refuse what would be scored wrongly without any error."""
    vocabulary = loaded.scorer.decoder_config.vocab_size
    first, second, third = (np.arange(8) * step % vocabulary for step in (3, 5, 7))
    scorer = loaded.scorer
    plain = collate([first], "padding", world.device)
    gap = float(scorer(scorer.head_gap, plain))
    if not gap <= HEAD_TOLERANCE:
        raise MismatchError(
            f"{scorer.decoder_config.model_type}: its forward does more to the logits than the "
            f"language-model head (difference {gap:.3g})",
            "this architecture cannot be scored yet; please report it",
        )
    if spec.layout == "packing":
        leak = _leak(loaded, (first, second, third), world)
        if not leak <= LEAK_TOLERANCE:
            raise MismatchError(
                f"{scorer.decoder_config.model_type}: packed documents see each other (changing "
                f"one moves the next by {leak:.2g} standard deviations)",
                "use --layout padding",
            )


def _leak(loaded: Loaded, documents: tuple[Ints, Ints, Ints], world: World) -> float:
    """How far a document's hidden states move when the one before it changes.

    The median over its tokens, in standard deviations: a leak moves all of them (by 1.4 to 3 for
    gpt-oss), while other company in the experts' matmuls moves a few in their last bits.
    """
    first, second, third = documents
    packed = [collate([document, second], "packing", world.device) for document in (first, third)]
    scorer = loaded.scorer
    one, other = (scorer(scorer.hidden, batch)[0, len(first) :].float() for batch in packed)
    return float(((one - other).abs().amax(-1) / one.std()).median())


def _probe_routing(loaded: Loaded, ask: Ask, spec: TrainSpec, world: World) -> str:
    """ "captured", or why not, found out on a few tokens before anything is scored."""
    from mismatch.errors import CorruptCapture

    if not loaded.scorer.moe:
        return "dense"
    if not spec.routing:
        return "not asked for"
    batch = collate([np.arange(8)], "padding", world.device)
    scorer = loaded.scorer
    try:
        scorer(scorer.score, batch, batch.rows[:1], batch.rows[1:2], ask)
    except CorruptCapture as error:
        return f"not supported: {error.message}"
    return "captured"


# ---------------------------------------------------------------- after scoring


def _assemble(
    name: str, rollout: Rollout, parts: list[Part], facts: Fingerprint, loaded: Loaded
) -> Scoring:
    """Put the parts in the rollout's order, and make sure that nothing is missing."""
    targets = np.concatenate([part.targets for part in parts])
    order = np.argsort(targets, kind="stable")
    if not np.array_equal(targets[order], rollout.actions):
        raise MismatchError(
            f"{name}: {len(targets)} tokens were scored, the rollout has {rollout.n_actions}",
            "a rank lost its part; run the pass again",
        )
    stats = {
        key: np.concatenate([part.stats[key] for part in parts])[order] for key in parts[0].stats
    }
    extra = {"untempered": "logprobs_untempered", "kept_mass": "kept_mass"}
    return Scoring(
        name=name,
        token_ids=rollout.token_ids[rollout.actions],
        logprobs=stats["logprobs"].astype(np.float64),
        entropy=stats["entropy"].astype(np.float64),
        top1=stats["top1"].astype(np.int64),
        fingerprint=facts,
        routing=_routing(rollout, parts, loaded),
        extra={label: stats[k].astype(np.float64) for k, label in extra.items() if k in stats},
    )


def _routing(rollout: Rollout, parts: list[Part], loaded: Loaded) -> Routing | None:
    routes = [part.routes for part in parts if part.routes is not None]
    if not routes:
        return None
    moe = loaded.scorer.moe
    rows = np.argsort(np.concatenate([part.tokens for part in parts]), kind="stable")
    margins = [margin for _, _, margin in routes if margin is not None]
    return Routing(
        layers=tuple(layer.index for layer in moe),
        num_experts=moe[0].num_experts,
        ids=np.concatenate([ids for ids, _, _ in routes])[rows],
        present=np.ones(len(rollout.token_ids), np.bool_),
        weights=np.concatenate([weights for _, weights, _ in routes])[rows],
        margin=np.concatenate(margins)[rows] if len(margins) == len(routes) else None,
    )
