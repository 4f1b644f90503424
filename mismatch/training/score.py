"""One pass: every sequence of a rollout through the trainer's forward, teacher-forced."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from mismatch.captures import Distributions, narrowest
from mismatch.errors import MismatchError
from mismatch.specs import Pass
from mismatch.training.batch import DeviceBatch, to_device
from mismatch.training.distributed import Progress, World
from mismatch.training.distributions import DistributionCapture
from mismatch.training.fingerprint import fingerprint, intervention_facts
from mismatch.training.load import LoadedModel
from mismatch.training.logprobs import TokenStats
from mismatch.training.memory import MemoryPeak
from mismatch.training.packing import Batch, plan_batches
from mismatch.training.routing.capture import LayerRoutes
from mismatch.training.routing.replay import ReplaySource
from mismatch.training.scorer import ForwardOptions
from mismatch.training.sequence_parallel import SequenceParallel
from mismatch.training.validate import prepare_pass
from mismatch.types import Fingerprint, Ints, Rollout, Routing, Scoring


@dataclass(frozen=True, slots=True)
class MicroBatchScores:
    """The results of one micro-batch, as numpy arrays.

    Attributes:
        tokens: [n] indices into T of all forwarded tokens, the rows of ``routes``.
        targets: [a] indices into T of the action tokens, the rows of ``stats``.
        routes: (ids, weights, margin) stacked over layers: [n, L, K], [n, L, K], [n, L].
        overruled: (token, layer) pairs whose own choice of experts was replaced by replayed ones.
        distributions: of the captured targets.
    """

    tokens: Ints
    targets: Ints
    stats: dict[str, np.ndarray]
    routes: tuple[np.ndarray, np.ndarray, np.ndarray | None] | None
    overruled: int = 0
    distributions: np.ndarray | None = None


def score_pass(
    world: World,
    loaded: LoadedModel,
    rollout: Rollout,
    job: Pass,
    source: ReplaySource | None = None,
    engine_distributions: Distributions | None = None,
) -> Scoring | None:
    """Score a rollout as ``job.spec`` says; all ranks call it, rank 0 gets the scoring.

    Args:
        source: the routes to replay, where the spec asks for that.
        engine_distributions: their positions and ids are kept here too.

    Raises:
        EmptyComparison: the rollout has no action token.
        MismatchError: token ids outside the vocabulary, dropout in a pass with gradients, a family
            whose head or layout this tool does not reproduce.
    """
    spec = job.spec
    options, routing_note = prepare_pass(world, loaded, rollout, spec, source)
    options = replace(options, capture=DistributionCapture.of(engine_distributions, rollout))
    with MemoryPeak(world.device, True) as peak, torch.set_grad_enabled(spec.grad):
        parts = run_batches(world, loaded, rollout, job, options, source)
    gathered, peaks = world.gather(parts), world.gather(peak.bytes)
    facts = fingerprint(world, loaded, job, rollout.sampling, routing_note)
    if gathered is None:
        return None
    parts = [part for rank in gathered for part in rank]
    facts |= intervention_facts(spec, source, sum(part.overruled for part in parts))
    facts |= {"seconds": round(peak.seconds, 3), "peak_bytes": peaks}
    scoring = _assemble(job.name, rollout, parts, facts, loaded)
    if options.capture is None:
        return scoring
    captured = [(p.targets, p.distributions) for p in parts if p.distributions is not None]
    return replace(scoring, distributions=options.capture.joined(captured))


def run_batches(
    world: World,
    loaded: LoadedModel,
    rollout: Rollout,
    job: Pass,
    options: ForwardOptions,
    source: ReplaySource | None = None,
) -> list[MicroBatchScores]:
    """This rank's micro-batches: every W-th, and as many forward passes as any other rank.

    Ranks that share their sequences take the same ones, each its own positions.
    """
    lengths = [int(n) for n in np.diff(rollout.offsets)]
    batches = plan_batches(lengths, job.spec.micro_batch_tokens, job.spec.layout)
    parallel = SequenceParallel.of(world, job.spec.sequence_parallel)
    progress = Progress(job.name, sum(lengths), world.rank == 0)
    parts, done = [], 0
    with parallel.installed(loaded.attention.implementation):
        for first in range(0, len(batches), parallel.count):
            own = first + parallel.index
            idle = own >= len(batches)
            # FSDP2 gathers in step: a rank without work repeats a batch and drops the result.
            group = batches[0 if idle else own]
            inputs = to_device(rollout, group, job.spec, options, world.device, source, parallel)
            part = _forward(loaded, inputs)
            if not idle:
                parts.append(part)
            done += sum(batch.tokens for batch in batches[first : first + parallel.count])
            progress.update(done)
    return parts


def _forward(loaded: LoadedModel, inputs: DeviceBatch) -> MicroBatchScores:
    batch, scorer, capture = inputs.batch, loaded.scorer, inputs.options.capture
    captured = None if capture is None else capture.rows(inputs.targets)
    values, routes = scorer(
        scorer.score, batch, inputs.predicting, inputs.target_ids, inputs.options, captured
    )
    stats = {
        field.name: _numpy(value)
        for field, value in zip(fields(TokenStats), values, strict=True)
        if value is not None
    }
    id_dtype = narrowest(scorer.moe[0].num_experts) if scorer.moe else None
    stacked = _stack(routes, batch, id_dtype) if routes is not None else None
    distributions = stats.pop("distributions", None)
    overruled = 0 if inputs.replay is None else inputs.replay.overruled
    return MicroBatchScores(inputs.tokens, inputs.targets, stats, stacked, overruled, distributions)


def _stack(
    routes: list[LayerRoutes], batch: Batch, id_dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    ids = np.stack([_numpy(layer.ids[batch.rows]).astype(id_dtype) for layer in routes], axis=1)
    weights = np.stack([_numpy(layer.weights[batch.rows]) for layer in routes], axis=1)
    margins = [layer.margin for layer in routes]
    if any(margin is None for margin in margins):
        return ids, weights, None
    rows = [_numpy(margin[batch.rows]) for margin in margins if margin is not None]
    return ids, weights, np.stack(rows, axis=1)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _assemble(
    name: str,
    rollout: Rollout,
    parts: list[MicroBatchScores],
    facts: Fingerprint,
    loaded: LoadedModel,
) -> Scoring:
    """Concatenate all micro-batches in the rollout's order; no action token may be missing."""
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


def _routing(
    rollout: Rollout, parts: list[MicroBatchScores], loaded: LoadedModel
) -> Routing | None:
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
