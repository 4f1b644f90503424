"""Forward and backward passes of a policy-gradient loss over chosen samples, all ranks in step.

The loss is ``-sum_t c_t · logprob_t``; the coefficients are constants to autograd and may follow
from the log-probabilities of the same forward pass (PPO's ratio). The numerics are the trainer's:
its dtypes, kernels, activation checkpointing and reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from mismatch.specs import Pass
from mismatch.training.distributed import World
from mismatch.training.load import LoadedModel
from mismatch.training.packing import MicroBatch, plan_batches
from mismatch.training.routing.replay import ReplaySource
from mismatch.training.scorer import ForwardOptions
from mismatch.training.sequence_parallel import SequenceParallel
from mismatch.training.validate import to_device
from mismatch.types import Floats, Ints, Rollout

LOSS_SCALE = 2.0**16  # where fp16 starts, as trainers do
BACK_OFF = 2.0**4
Coefficients = Callable[[Ints, Floats], Floats]


class Backward:
    """Accumulates gradients of one rollout in the model's parameters.

    Args:
        one: the pass, with ``grad`` on.
        coefficients: (indices into A [a], log-probabilities of this pass [a]) -> c [a].
        source: routes to replay, where the spec asks for that.

    Attributes:
        scale: of the loss, for fp16; divided where a gradient overflows.
    """

    def __init__(
        self,
        world: World,
        loaded: LoadedModel,
        rollout: Rollout,
        pass_: Pass,
        options: ForwardOptions,
        coefficients: Coefficients,
        source: ReplaySource | None = None,
    ) -> None:
        self.world, self.loaded, self.rollout = world, loaded, rollout
        self.spec, self.coefficients, self.source = pass_.spec, coefficients, source
        self.options = replace(options, routing=False)
        self.parallel = SequenceParallel.of(world, pass_.spec.sequence_parallel)
        self.action = np.full(len(rollout.token_ids), -1)  # token -> index among the actions
        self.action[rollout.actions] = np.arange(rollout.n_actions)
        self.scale = LOSS_SCALE if pass_.spec.dtype == "fp16" else 1.0
        # Ranks run different samples: an expert module that only one of them uses must be reduced
        # by all.
        loaded.scorer.set_reduce_scatter_unused_params(world.size > 1)  # type: ignore[operator]

    def installed(self) -> AbstractContextManager[None]:
        """Within it ranks share their sequences, where the spec asks for that."""
        return self.parallel.installed(self.loaded.attention.implementation)

    def until_finite(self, rows: Sequence[int]) -> float | None:
        """:meth:`backward`, with a smaller scale after each overflow; None: not finite at scale 1.

        Gradients are left in the parameters, :attr:`factor` times too small.
        """
        while True:
            loss = self.backward(rows)
            if self.finite():
                return loss
            self.clear()
            if self.scale <= 1.0:
                return None
            self.scale /= BACK_OFF

    @property
    def factor(self) -> float:
        """What a parameter's gradient is multiplied by: FSDP2 gives the mean over ranks."""
        return self.world.size / self.scale

    def backward(self, rows: Sequence[int]) -> float:
        """Sum the gradients of these samples over micro-batches; this rank's loss."""
        count = self.parallel.count  # ranks that share their sequences have the same plan
        plans = [self.plan(rows[index::count]) for index in range(count)]
        own, total = plans[self.parallel.index], 0.0
        for step in range(max(len(plan) for plan in plans)):
            idle = step >= len(own)
            # FSDP2 gathers and reduces in step: a rank without work adds a gradient of 0.
            group = MicroBatch((rows[0],), 0) if idle else own[step]
            total += self.micro_batch(group, idle)
        return total

    def plan(self, rows: Sequence[int]) -> list[MicroBatch]:
        """Micro-batches of some samples."""
        if not rows:
            return []
        lengths = [int(n) for n in np.diff(self.rollout.offsets)[list(rows)]]
        batches = plan_batches(lengths, self.spec.micro_batch_tokens, self.spec.layout)
        return [MicroBatch(tuple(rows[i] for i in b.sequences), b.tokens) for b in batches]

    def micro_batch(self, group: MicroBatch, idle: bool) -> float:
        """Backward of one micro-batch; returns its loss."""
        device, scorer = self.world.device, self.loaded.scorer
        inputs = to_device(
            self.rollout, group, self.spec, self.options, device, self.source, self.parallel
        )
        values, _ = scorer(
            scorer.score, inputs.batch, inputs.predicting, inputs.target_ids, inputs.options
        )
        scaled = np.zeros(len(inputs.targets))
        if not idle:
            logprobs = values[0].detach().double().cpu().numpy()
            # A power of two: scaling changes no digit.
            scaled = self.scale * self.coefficients(self.action[inputs.targets], logprobs)
        loss = -(torch.from_numpy(scaled.astype(np.float32)).to(device) * values[0]).sum()
        loss.backward()
        return float(loss.detach()) / self.scale

    def finite(self) -> bool:
        """Return whether every rank's gradient is."""
        gradients = (local_gradient(p) for p in self.loaded.scorer.parameters())
        bad = any(not bool(torch.isfinite(grad).all()) for grad in gradients if grad is not None)
        return not bool(self.world.sum(torch.tensor(int(bad))))

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self.loaded.scorer.parameters():
            parameter.grad = None


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this rank's shard of a parameter's gradient; None without one."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad
