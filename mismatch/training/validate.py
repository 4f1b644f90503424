"""Before a pass: micro-batches on the device; refusing what would be scored wrongly."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from mismatch.errors import CorruptCapture, EmptyComparison, MismatchError, WrongAnswer
from mismatch.facts import ROUTER_NOISE
from mismatch.models.moe import CAPTURED, DENSE, NOT_ASKED
from mismatch.specs import TrainSpec
from mismatch.training.distributed import World
from mismatch.training.load import LoadedModel
from mismatch.training.logprobs import Earlier, Rounding
from mismatch.training.packing import Batch, MicroBatch, collate
from mismatch.training.routing.interventions import RouterDtype, RouterIntervention, RouterNoise
from mismatch.training.routing.replay import Replay, ReplaySource, require_interventions_work
from mismatch.training.scorer import ForwardOptions, torch_dtype
from mismatch.training.sequence_parallel import SequenceParallel
from mismatch.types import Ints, Rollout


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
    interventions: list[RouterIntervention] = []
    replay = None if source is None else source.on(tokens, batch)
    if replay is not None:
        interventions.append(replay)
    sigma = dict(spec.inject).get(ROUTER_NOISE)
    if sigma is not None:
        chosen = np.asarray(group.sequences, np.int64)
        lengths = np.diff(rollout.offsets)[chosen]
        interventions.append(RouterNoise(sigma, spec.inject_seed, chosen, lengths, batch, here))
    if spec.router_dtype is not None:
        interventions.append(RouterDtype(torch_dtype(spec.router_dtype)))
    earlier = Earlier.of(rollout, targets, device) if options.counting else None
    options = replace(options, interventions=tuple(interventions), earlier=earlier)
    return DeviceBatch(tokens, targets, batch, predicting, target_ids, options, replay)


HEAD_TOLERANCE = 0.02  # of the logits' range; our head runs the same matmul as the family's
LEAK_TOLERANCE = PART_TOLERANCE = 0.1  # standard deviations


def prepare_pass(
    world: World,
    loaded: LoadedModel,
    rollout: Rollout,
    spec: TrainSpec,
    source: ReplaySource | None,
) -> tuple[ForwardOptions, str]:
    """Put the model into train or eval mode and refuse what cannot run; all ranks call it.

    Returns:
        The options of the forward passes, and whether experts are captured: "captured", or why not.

    Raises:
        EmptyComparison, MismatchError: no action token, token ids outside the vocabulary, a head or
            layout of a family that is not reproduced.
    """
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
    loaded.scorer.train(spec.grad)
    options = ForwardOptions(
        sampling=rollout.sampling,
        autocast=torch_dtype(spec.autocast) if spec.autocast else None,
        head_dtype=torch_dtype(spec.head_dtype) if spec.head_dtype else None,
        routing=spec.routing and bool(loaded.scorer.moe),
        rounding=Rounding(
            spec.temperature_in, torch_dtype(spec.logprobs_dtype) if spec.logprobs_dtype else None
        ),
    )
    with torch.no_grad():
        loaded.once((spec.layout, spec.grad), lambda: _probe_scoring(loaded, spec, world))
        routing_note = loaded.once(
            (options, spec.routing, spec.grad), lambda: _probe_routing(loaded, options, spec, world)
        )
        _probe_parts(world, loaded, spec)
        require_interventions_work(loaded.scorer, spec, source, world.device)
    if routing_note != CAPTURED:
        options = replace(options, routing=False)
    return options, routing_note


def _probe_scoring(loaded: LoadedModel, spec: TrainSpec, world: World) -> None:
    """Run a few tokens: the head must be reproduced, packed documents must not see each other."""
    scorer = loaded.scorer
    family, vocabulary = scorer.decoder_config.model_type, scorer.decoder_config.vocab_size
    first, second, third = (np.arange(8) * step % vocabulary for step in (3, 5, 7))
    gap = float(scorer(scorer.head_gap, collate([first], "padding", world.device)))
    if not gap <= HEAD_TOLERANCE:
        raise MismatchError(
            f"{family}: its forward does more to the logits than the language-model head "
            f"(difference {gap:.3g})",
            "this architecture cannot be scored yet; please report it",
        )
    if spec.layout != "packing":
        return
    # The change of a document's hidden states when the document before it changes, as the median
    # over its tokens, in standard deviations: a leak moves all of them (by 1.4 to 3 for gpt-oss),
    # while other rows in the experts' matmuls change a few in their last bits.
    packed = [collate([other, second], "packing", world.device) for other in (first, third)]
    before, after = (scorer(scorer.hidden, batch)[0, len(first) :].float() for batch in packed)
    leak = float(((before - after).abs().amax(-1) / before.std()).median())
    if not leak <= LEAK_TOLERANCE:
        wrong = WrongAnswer if math.isfinite(leak) else MismatchError
        raise wrong(
            f"{family}: packed documents see each other (changing one moves the next by "
            f"{leak:.2g} standard deviations)",
            "use --layout padding",
        )


def _probe_parts(world: World, loaded: LoadedModel, spec: TrainSpec) -> None:
    """Ranks that share sequences must compute the hidden states that each computes alone."""
    if spec.sequence_parallel == 1:
        return
    scorer, config = loaded.scorer, loaded.scorer.decoder_config

    def typical_gap() -> float:
        """Return the median over tokens: near ties of experts may move a few."""
        parallel = SequenceParallel.of(world, spec.sequence_parallel)
        documents = [np.arange(length) * 5 % config.vocab_size for length in (19, 8)]
        whole = collate(documents, spec.layout, world.device)
        alone: torch.Tensor = scorer(scorer.hidden, whole).flatten(0, 1).float()
        here, rows = parallel.local(whole.rows, whole.input_ids.shape[1])
        with parallel.installed(loaded.attention.implementation):
            shared = scorer(scorer.hidden, parallel.split(whole)).flatten(0, 1).float()
        gaps = (alone[whole.rows[torch.from_numpy(here)]] - shared[rows]).abs().amax(-1)
        gathered = world.gather((gaps / alone[whole.rows].std()).cpu())
        typical = torch.zeros((), dtype=torch.float64)
        if gathered is not None:
            typical += torch.cat(gathered).median()
        return float(world.sum(typical))

    gap = loaded.once((spec.layout, "parts"), typical_gap)
    if not gap <= PART_TOLERANCE:
        wrong = WrongAnswer if math.isfinite(gap) else MismatchError
        raise wrong(
            f"{config.model_type}: sequences that are split over ranks give other hidden states "
            f"(by {gap:.2g} standard deviations)",
            "leave --sequence-parallel out",
        )


def _probe_routing(
    loaded: LoadedModel, options: ForwardOptions, spec: TrainSpec, world: World
) -> str:
    """Return "captured", or why not, from a forward pass of a few tokens."""
    if not loaded.scorer.moe:
        return DENSE
    if not spec.routing:
        return NOT_ASKED
    batch = collate([np.arange(8)], "padding", world.device)
    scorer = loaded.scorer
    try:
        scorer(scorer.score, batch, batch.rows[:1], batch.rows[1:2], options)
    except CorruptCapture as error:
        return f"not supported: {error.message}"
    return CAPTURED
