"""One micro-batch as tensors, with what its pass changes in the routers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from mismatch.injections import ROUTER_NOISE
from mismatch.specs import TrainSpec
from mismatch.training.packing import Batch, MicroBatch, collate
from mismatch.training.routing.interventions import RouterDtype, RouterNoise
from mismatch.training.routing.replay import Replay, Source
from mismatch.training.scorer import Ask, torch_dtype
from mismatch.types import Ints, Rollout


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One micro-batch on its device, ready for :meth:`mismatch.training.scorer.Scorer.score`.

    Attributes:
        tokens: [n] indices into T of all forwarded tokens.
        targets: [a] indices into T of the action tokens.
        predicting: [a] flattened rows that predict them.
        wanted: [a] their ids.
        ask: with what the pass changes in the routers.
    """

    tokens: Ints
    targets: Ints
    batch: Batch
    predicting: torch.Tensor
    wanted: torch.Tensor
    ask: Ask
    replay: Replay | None


def to_device(
    rollout: Rollout,
    group: MicroBatch,
    spec: TrainSpec,
    ask: Ask,
    device: torch.device,
    source: Source | None,
) -> DeviceBatch:
    """The tensors of one micro-batch, and the changes of its routers."""
    spans = [(int(rollout.offsets[n]), int(rollout.offsets[n + 1])) for n in group.sequences]
    batch = collate([rollout.token_ids[a:b] for a, b in spans], spec.layout, device)
    tokens = np.concatenate([np.arange(a, b) for a, b in spans])
    acting = np.flatnonzero(rollout.action_mask[tokens])
    targets = tokens[acting]
    # Tokens of a sequence are neighbours, and its first is never an action: t - 1 is one back.
    predicting = batch.rows[torch.from_numpy(acting - 1).to(device)]
    wanted = torch.from_numpy(rollout.token_ids[targets]).to(device)
    replay = None if source is None else source.on(tokens, batch)
    noise = noise_of(spec, rollout, group.sequences, batch)
    router = router_dtype_of(spec)
    changes = (replay, noise, router)
    ask = replace(ask, changes=tuple(change for change in changes if change is not None))
    return DeviceBatch(tokens, targets, batch, predicting, wanted, ask, replay)


def noise_of(
    spec: TrainSpec, rollout: Rollout, sequences: tuple[int, ...], batch: Batch
) -> RouterNoise | None:
    """The noise that a pass injects into one micro-batch, if any."""
    sigma = dict(spec.inject).get(ROUTER_NOISE)
    if sigma is None:
        return None
    return RouterNoise.of(sigma, spec.inject_seed, rollout, sequences, batch)


def router_dtype_of(spec: TrainSpec) -> RouterDtype | None:
    """Routers in another dtype than the rest, if the spec asks for that."""
    if spec.router_dtype is None:
        return None
    return RouterDtype(torch_dtype(spec.router_dtype))
