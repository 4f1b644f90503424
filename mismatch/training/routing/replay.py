"""Router replay (R3): the trainer's forward with the experts that another forward chose.

The result of the router's own ``torch.topk`` is replaced by the replayed expert ids and the model's
own scores at these ids. The rest is the family's own code: softmax or normalisation over the chosen
experts, scaling, experts. So the gate is recomputed and gradients flow through it; only the choice
is replayed. With "ids+weights" the experts get the replayed weights too: constants, which leave the
router without a gradient.

Tokens without captured routes (the last sampled token of a sequence, prompts that came from a
cache) and padding keep the model's own choice.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mismatch.errors import CorruptCapture, MismatchError
from mismatch.facts import Replayed
from mismatch.specs import ReplayMode, TrainSpec
from mismatch.training.packing import Batch, collate
from mismatch.training.routing.capture import (
    MoeLayer,
    Override,
    moe_layers,
    override_recorded_choice,
    recording,
)
from mismatch.training.routing.interventions import (
    CallArguments,
    RouterIntervention,
    blocks_of,
    intervening,
)
from mismatch.training.scorer import Scorer
from mismatch.types import Ints, Rollout, Routing, Scoring, SparseKeys, selecting_rows

TOPK = (torch.topk, torch.Tensor.topk)
MAX = (torch.max, torch.Tensor.max)


@dataclass(frozen=True, slots=True)
class ReplaySource:
    """The routes of a whole rollout, to be replayed.

    Attributes:
        name: of the scoring that captured them.
        mode: "ids" or "ids+weights".
        keys: what sparse attention selected, where it was kept of every token.
    """

    name: str
    mode: ReplayMode
    routing: Routing
    keys: SparseKeys | None = None

    @classmethod
    def of(cls, scoring: Scoring, mode: ReplayMode, rollout: Rollout) -> ReplaySource:
        """Return the validated routes of a scoring.

        Raises:
            MismatchError: the scoring holds no routes, or no weights where ``mode`` needs them.
            CorruptCapture: impossible routes; the message names layer and row.
        """
        routing = scoring.routing
        if routing is None:
            fault = f"--replay-routing {mode}: {scoring.name} holds no routed experts"
            raise MismatchError(fault, "capture them (drop --no-routing), or drop --replay-routing")
        if mode == "ids+weights" and routing.weights is None:
            raise MismatchError(
                f"--replay-routing ids+weights: {scoring.name} holds expert ids without weights",
                "use --replay-routing ids: the weights are then recomputed by the model's own gate",
            )
        routing.validate(rollout, scoring.name)
        if mode == "ids+weights" and routing.weights is not None:
            bad = ~np.isfinite(routing.weights[routing.present]).all(axis=2)
            if bad.any():
                row, layer = np.argwhere(bad)[0]
                token = int(np.flatnonzero(routing.present)[row])
                raise CorruptCapture(
                    f"{scoring.name}: corrupt route capture: a weight that is no number for token "
                    f"{token} at layer {routing.layers[layer]}",
                    "use --replay-routing ids, or run without routing: --no-routing",
                )
        keys = scoring.keys
        if keys and len(keys.rows) < len(selecting_rows(rollout, keys.choices.top_k)):
            keys = None
        return cls(scoring.name, mode, routing, keys)

    def require_fits(self, layers: list[MoeLayer]) -> None:
        """Check that the routes belong to a model with these MoE layers.

        Raises:
            MismatchError: other layers, or another number of experts.
        """
        fix = "replay routes of the same model, or drop --replay-routing"
        indices = tuple(layer.index for layer in layers)
        if indices != self.routing.layers:
            raise MismatchError(
                f"replay: {self.name} has routes of layers {_listed(self.routing.layers)}, the "
                f"trainer has MoE layers {_listed(indices)}",
                fix,
            )
        for layer in layers:
            if layer.num_experts != self.routing.num_experts:
                raise MismatchError(
                    f"replay: {self.name} chose among {self.routing.num_experts} experts, layer "
                    f"{layer.index} of the trainer has {layer.num_experts}",
                    fix,
                )

    def on(self, tokens: Ints, batch: Batch) -> Replay:
        """Return the routes of one forward pass.

        Args:
            tokens: [n] indices into T of the batch's real tokens, sequence after sequence.
        """
        device = batch.input_ids.device
        total = batch.input_ids.numel()
        shape = (total, len(self.routing.layers), self.routing.top_k)
        replayed = torch.zeros(total, dtype=torch.bool, device=device)
        replayed[batch.rows] = torch.from_numpy(self.routing.present[tokens]).to(device)
        ids = torch.zeros(shape, dtype=torch.int64, device=device)
        ids[batch.rows] = torch.from_numpy(self.routing.ids[tokens].astype(np.int64)).to(device)
        weights = None
        if self.mode == "ids+weights":
            assert self.routing.weights is not None
            weights = torch.zeros(shape, dtype=torch.float32, device=device)
            weights[batch.rows] = torch.from_numpy(self.routing.weights[tokens]).to(device)
        columns = {layer: column for column, layer in enumerate(self.routing.layers)}
        return Replay(self.name, columns, replayed, ids, weights)

    def keys_of(self, tokens: Ints) -> torch.Tensor | None:
        """Return what sparse attention selected for these tokens, [r, L, K].

        Args:
            tokens: [r] rows of T, all among those whose selections were kept.
        """
        if self.keys is None:
            return None
        ids = self.keys.choices.ids[np.searchsorted(self.keys.rows, tokens)]
        return torch.from_numpy(ids.astype(np.int64))

    def facts(self, overruled: int) -> Replayed:
        """Return what is said of it; ``overruled``: choices that it changed."""
        replayed = int(self.routing.present.sum())
        facts: Replayed = {
            "mode": self.mode,
            "source": self.name,
            "rows_replayed": replayed,
            "rows_own": len(self.routing.present) - replayed,
            "overruled": overruled,
        }
        if self.keys is not None:
            facts["keys"] = len(self.keys.rows)
        return facts


class Replay(RouterIntervention):
    """The replayed routes of one forward pass over R flattened rows.

    Args:
        columns: layer -> column of ``ids``.
        replayed: [R] bool; the other rows keep the model's own choice.
        ids: [R, L, K] int64.
        weights: [R, L, K] float32, or None: those of the model's own gate.
    """

    unreached = (
        "replay: the router{where} was not seen to choose experts",
        "routes of this family cannot be replayed: drop --replay-routing",
    )

    def __init__(
        self,
        source: str,
        columns: dict[int, int],
        replayed: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.source, self.columns = source, columns
        self.replayed, self.ids, self.weights = replayed, ids, weights
        self._overruled: dict[int, torch.Tensor] = {}
        self._weighted: set[int] = set()

    @property
    def overruled(self) -> int:
        """Number of (token, layer) pairs whose own choice of experts was different."""
        return int(sum(int(count) for count in self._overruled.values()))

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])

    def override(self, layer: MoeLayer, block: torch.nn.Module) -> Override:
        if type(block).__name__ == "PhimoeTopKRouter":
            return self._override_max_twice(layer)

        def replayed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """Give the replayed ids and the scores of these ids for a top-k over all experts.

            Calls of other sizes are left alone: some routers score groups of experts first.
            """
            out = func(*args, **kwargs)
            if func not in TOPK:
                return out
            scores = args[0] if args else kwargs["input"]
            if scores.shape[-1] != layer.num_experts or out.indices.shape[-1] != self.top_k:
                return out
            ids = self.chosen(layer, out.indices.reshape(-1, self.top_k))
            override_recorded_choice(ids)
            values = scores.reshape(-1, layer.num_experts).gather(-1, ids)
            shape = out.indices.shape
            return torch.return_types.topk((values.reshape(shape), ids.reshape(shape)))

        return replayed

    def _override_max_twice(self, layer: MoeLayer) -> Override:
        """For a router that selects one expert after the other by ``max``: Phi-3.5-MoE, K = 2.

        Its mask of near candidates is relative to the selected expert, so it follows the replay.
        """
        slots: list[torch.Tensor] = []  # the ids that are still to be given

        def replayed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = func(*args, **kwargs)
            if func not in MAX or not args or args[0].shape[-1] != layer.num_experts:
                return out
            scores = args[0]
            if not slots:  # the router's own second choice: the best of the rest
                rest = scores.scatter(-1, out.indices, float("-inf"))
                own = torch.cat([out.indices, rest.argmax(-1, keepdim=True)], -1)
                chosen = self.chosen(layer, own.reshape(-1, own.shape[-1]))
                slots.extend(torch.tensor_split(chosen.reshape(own.shape), own.shape[-1], dim=-1))
            ids = slots.pop(0)
            return torch.return_types.max((scores.gather(-1, ids), ids))

        return replayed

    def before_experts(self, layer: MoeLayer, arguments: CallArguments) -> CallArguments:
        """Replace the gate's weights by the replayed weights, in mode "ids+weights"."""
        if self.weights is None:
            return arguments
        args, kwargs = arguments
        values: dict[Any, Any] = dict(enumerate(args)) | kwargs
        shape = (len(self.replayed), self.top_k)
        keys = [
            key
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.shape == shape
            and key != 0  # the hidden states
        ]
        if len(keys) != 1:
            raise MismatchError(
                f"replay: the experts of layer {layer.index} take their weights in a form that is "
                "not known",
                "use --replay-routing ids",
            )
        own = values[keys[0]]
        replayed = self.weights[:, self.columns[layer.index]].to(own.dtype)
        values[keys[0]] = torch.where(self.replayed[:, None], replayed, own)
        self._weighted.add(layer.index)
        return tuple(values[i] for i in range(len(args))), {key: values[key] for key in kwargs}

    def chosen(self, layer: MoeLayer, own: torch.Tensor) -> torch.Tensor:
        """Return the ids [R, K] to use instead of the router's ``own``: replayed if there are any.

        Raises:
            MismatchError: the router sees other rows than the batch has.
        """
        if own.shape != (len(self.replayed), self.top_k):
            raise MismatchError(
                f"replay: the router of layer {layer.index} chooses {tuple(own.shape)} experts, "
                f"{self.source} has {(len(self.replayed), self.top_k)}",
                "routes of this family cannot be replayed: drop --replay-routing",
            )
        ids = self.ids[:, self.columns[layer.index]].to(own.dtype)
        ids = torch.where(self.replayed[:, None], ids, own)
        differ = (ids.sort(-1).values != own.sort(-1).values).any(-1)
        self._overruled[layer.index] = differ.sum()  # a later choice of the same router replaces it
        self._reached.add(layer.index)
        return ids

    def finish(self) -> None:
        super().finish()
        unweighted = sorted(self._entered - self._weighted)
        if self.weights is not None and unweighted:
            fault = f"replay: layer {unweighted[0]} gives its experts no weights to replace"
            raise MismatchError(fault, "use --replay-routing ids")


def _listed(layers: tuple[int, ...]) -> str:
    """Layer indices for messages: all of them up to six, else the range and their number."""
    if len(layers) <= 6:
        return ", ".join(map(str, layers)) or "(none)"
    return f"{layers[0]} to {layers[-1]} ({len(layers)})"


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
    # K consecutive experts, another start in every row and layer.
    start = torch.arange(PROBE_TOKENS)[:, None, None] + torch.arange(len(moe))[None, :, None]
    top_k = torch.arange(source.routing.top_k)
    expected = ((start + top_k) % moe[0].num_experts).to(device)
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


def require_interventions_possible(spec: TrainSpec, bare: Any) -> None:
    """Do the same check on the model's structure, before any weight is loaded.

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


class _Stop(RouterIntervention):
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
