"""One micro-batch on its device, with the interventions on its routers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from mismatch.models.moe import ROUTER_NOISE
from mismatch.specs import TrainSpec
from mismatch.training.packing import Batch, MicroBatch, collate
from mismatch.training.routing.interventions import RouterDtype, RouterNoise
from mismatch.training.routing.replay import Replay, ReplaySource
from mismatch.training.scorer import ForwardOptions, torch_dtype
from mismatch.training.sequence_parallel import SequenceParallel
from mismatch.types import Bools, Ints, Rollout


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The arguments of :meth:`mismatch.training.scorer.Scorer.score` for one micro-batch.

    Attributes:
        tokens: [n] indices into T of all tokens that this rank forwards.
        targets: [a] indices into T of the action tokens that it predicts.
        predicting: [a] flattened rows of the batch that predict them.
        target_ids: [a] their token ids.
        options: those of the pass, with the interventions of this micro-batch.
        replay: the replayed routes among the interventions, if any.
    """

    tokens: Ints
    targets: Ints
    batch: Batch
    predicting: torch.Tensor
    target_ids: torch.Tensor
    options: ForwardOptions
    replay: Replay | None


def to_device(
    rollout: Rollout,
    group: MicroBatch,
    spec: TrainSpec,
    options: ForwardOptions,
    device: torch.device,
    source: ReplaySource | None,
    parallel: SequenceParallel,
) -> DeviceBatch:
    """Collate one micro-batch, and build its interventions: replay, noise, router dtype."""
    spans = [(int(rollout.offsets[n]), int(rollout.offsets[n + 1])) for n in group.sequences]
    whole = collate([rollout.token_ids[a:b] for a, b in spans], spec.layout, device)
    tokens = np.concatenate([np.arange(a, b) for a, b in spans])
    acting = np.flatnonzero(rollout.action_mask[tokens])
    width = whole.input_ids.shape[1]
    # Tokens of a sequence are neighbours, and its first is never an action: t - 1 is one back.
    before = whole.rows[torch.from_numpy(acting - 1).to(device)]
    predicted, predicting = parallel.local(before, width)
    here, rows = parallel.local(whole.rows, width)
    batch = replace(parallel.split(whole), rows=rows)
    targets, tokens = tokens[acting][predicted], tokens[here]
    target_ids = torch.from_numpy(rollout.token_ids[targets]).to(device)
    replay = None if source is None else source.on(tokens, batch)
    candidates = (replay, _noise(spec, rollout, group, batch, here), _router_dtype(spec))
    interventions = tuple(change for change in candidates if change is not None)
    options = replace(options, interventions=interventions)
    return DeviceBatch(tokens, targets, batch, predicting, target_ids, options, replay)


def _noise(
    spec: TrainSpec, rollout: Rollout, group: MicroBatch, batch: Batch, here: Bools
) -> RouterNoise | None:
    sigma = dict(spec.inject).get(ROUTER_NOISE)
    if sigma is None:
        return None
    return RouterNoise.of(sigma, spec.inject_seed, rollout, group.sequences, batch, here)


def _router_dtype(spec: TrainSpec) -> RouterDtype | None:
    return None if spec.router_dtype is None else RouterDtype(torch_dtype(spec.router_dtype))
