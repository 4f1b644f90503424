"""Noise on router logits: what other company in a batch does to a router, where it does nothing.

Every token of every layer has noise of its own, drawn from the seed and its place in the rollout:
the same whatever the micro-batches, the layout and the number of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mismatch.training.answering import Answering, RouterChange
from mismatch.training.packing import Batch
from mismatch.training.routing import MoeLayer
from mismatch.types import Ints, Rollout


class RouterNoise(RouterChange):
    """Normal noise on the router logits of one forward pass. An intervention.

    Args:
        sigma: standard deviation, in the unit of the logits.
        seed: of all noise.
        sequences: [n] which sequences of the rollout the forward pass holds, in order.
        lengths: [n] their tokens.
        batch: where those tokens lie.
    """

    unreached = (
        "--inject router-noise: the router{where} gave no logits that could be disturbed",
        "this family's router is built in a way that is not known: leave --inject out",
    )

    def __init__(
        self, sigma: float, seed: int, sequences: Ints, lengths: Ints, batch: Batch
    ) -> None:
        super().__init__()
        self.sigma, self.seed = sigma, seed
        self.sequences, self.lengths, self.batch = sequences, lengths, batch

    @classmethod
    def of(
        cls, sigma: float, seed: int, rollout: Rollout, sequences: tuple[int, ...], batch: Batch
    ) -> RouterNoise:
        """The noise of a micro-batch of a rollout."""
        chosen = np.asarray(sequences, np.int64)
        return cls(sigma, seed, chosen, np.diff(rollout.offsets)[chosen], batch)

    def answering(self, layer: MoeLayer, block: torch.nn.Module) -> Answering:
        return _NoisyLogits(self, layer)

    def draw(self, layer: int, experts: int) -> np.ndarray:
        """Noise of the real tokens, sequence after sequence, [n, E] float32."""
        parts = [
            np.random.default_rng([self.seed, layer, int(sequence)]).standard_normal(
                (int(length), experts), np.float32
            )
            for sequence, length in zip(self.sequences, self.lengths, strict=True)
        ]
        return np.float32(self.sigma) * np.concatenate(parts)

    def added(self, layer: MoeLayer, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` [..., E] with the noise of a layer, rounded to their dtype as they were."""
        rows = logits.numel() // layer.num_experts
        noise = torch.zeros(rows, layer.num_experts, device=logits.device)
        drawn = torch.from_numpy(self.draw(layer.index, layer.num_experts))
        noise[self.batch.rows] = drawn.to(logits.device)
        self.reached(layer)
        return (logits.float() + noise.reshape(logits.shape)).to(logits.dtype)


class _NoisyLogits(Answering):
    """Adds the noise to the output of the block's first linear map onto the experts."""

    def __init__(self, noise: RouterNoise, layer: MoeLayer) -> None:
        super().__init__()
        self.noise, self.layer = noise, layer
        self.done = False

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if self.done or func is not torch.nn.functional.linear:
            return out
        if out.shape[-1] != self.layer.num_experts:
            return out
        self.done = True
        return self.noise.added(self.layer, out)
