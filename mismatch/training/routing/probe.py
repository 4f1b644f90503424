"""Refusals before a pass: routers whose choice of experts cannot be replaced."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from mismatch.errors import MismatchError
from mismatch.specs import TrainSpec
from mismatch.training.packing import collate
from mismatch.training.routing.capture import MoeLayer, moe_layers, recording
from mismatch.training.routing.interventions import CallArguments, blocks_of, intervening
from mismatch.training.routing.replay import Replay, ReplaySource
from mismatch.training.scorer import Scorer

PROBE_TOKENS = 8


def require_interventions_work(
    scorer: Scorer, spec: TrainSpec, source: ReplaySource | None, device: torch.device
) -> None:
    """Replay arbitrary routes on a few tokens and check that they run; all ranks call it.

    Raises:
        MismatchError: a dense model, routes of another model, or routers that cannot be overridden.
    """
    moe = scorer.moe
    if not moe and (source is not None or spec.inject or spec.router_dtype):
        raise _dense(spec, scorer.decoder_config.model_type)
    if source is None:
        return
    source.require_fits(moe)
    batch = collate([np.arange(PROBE_TOKENS)], "padding", device)
    expected = _every_expert(len(moe), moe[0].num_experts, source.routing.top_k, device)
    columns = {layer.index: column for column, layer in enumerate(moe)}
    replayed = torch.ones(PROBE_TOKENS, dtype=torch.bool, device=device)
    with (
        intervening(scorer.decoder, moe, (Replay("the probe", columns, replayed, expected),)),
        recording(moe) as recorder,
    ):
        scorer(scorer.hidden, batch)
    for column, routes in enumerate(recorder.finished()):
        if not torch.equal(routes.ids.cpu(), expected[:, column].cpu()):
            raise MismatchError(
                f"replay: layer {moe[column].index} of {scorer.decoder_config.model_type} runs "
                "other experts than it is told to",
                "routes of this family cannot be replayed: drop --replay-routing",
            )


def _every_expert(layers: int, experts: int, top_k: int, device: torch.device) -> torch.Tensor:
    """Arbitrary routes [R, L, K]: K consecutive experts, another start in every row and layer."""
    start = torch.arange(PROBE_TOKENS)[:, None, None] + torch.arange(layers)[None, :, None]
    return ((start + torch.arange(top_k)) % experts).to(device)


def require_interventions_possible(spec: TrainSpec, bare: Any) -> None:
    """The same check on the model's structure, before any weight is loaded.

    Every class of MoE block is run on the meta device up to its experts. A block that cannot run
    there is left to :func:`require_interventions_work`.

    Args:
        bare: the model on the meta device.

    Raises:
        MismatchError: a dense model, or a router whose top-k is not observed.
    """
    if spec.replay_routing is None and not spec.inject and not spec.router_dtype:
        return
    decoder = bare.get_decoder()
    moe = moe_layers(decoder)
    if not moe:
        raise _dense(spec, bare.config.model_type)
    config = bare.config.get_text_config()
    top_k = getattr(config, "num_experts_per_tok", None)
    kinds = {type(block).__name__: (layer, block) for layer, block in blocks_of(decoder, moe)}
    for layer, block in kinds.values():
        if spec.replay_routing is not None and isinstance(top_k, int):
            _run_to_experts(layer, block, top_k, config.hidden_size)


class _ReachedError(Exception):
    """The experts are about to run: the router has been observed."""


class _Stop:
    """An intervention that ends the forward pass before the experts."""

    def mode(self, layer: MoeLayer, block: torch.nn.Module) -> Any:
        return nullcontext()

    def before_experts(self, layer: MoeLayer, arguments: CallArguments) -> CallArguments:
        raise _ReachedError

    def finish(self) -> None:
        pass


def _run_to_experts(layer: MoeLayer, block: torch.nn.Module, top_k: int, hidden: int) -> None:
    rows = torch.ones(PROBE_TOKENS, dtype=torch.bool, device="meta")
    ids = torch.zeros(PROBE_TOKENS, 1, top_k, dtype=torch.int64, device="meta")
    replay = Replay("the probe", {layer.index: 0}, rows, ids)
    # A block takes [B, S, H], a router by itself rows.
    shape = (PROBE_TOKENS, hidden) if block is layer.experts else (1, PROBE_TOKENS, hidden)
    states = torch.zeros(shape, device="meta", dtype=next(block.parameters()).dtype)
    was_training = block.training
    block.eval()
    try:
        with torch.no_grad(), intervening(block, [layer], (replay, _Stop())):
            block(states)
    except _ReachedError:
        replay.finish()
    except MismatchError:
        raise
    except Exception:  # a block that does not run on the meta device is probed with its weights
        pass
    finally:
        block.train(was_training)


def _dense(spec: TrainSpec, family: str) -> MismatchError:
    flag = "--replay-routing" if spec.replay_routing else "--inject router-noise"
    if spec.router_dtype and not spec.replay_routing and not spec.inject:
        flag = "--router-dtype"
    return MismatchError(f"{flag}: {family} is dense, it has no routers", f"drop {flag}")
