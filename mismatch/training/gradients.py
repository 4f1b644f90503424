"""The policy gradient of one batch under FSDP2, prompt by prompt.

The numerics are the trainer's: its dtypes, kernels, activation checkpointing and reductions. All
ranks work on samples of the same prompt at a time, so that FSDP2 reduces that prompt's gradient; it
is added to the batch's and folded into a sketch. No second copy of a gradient is ever held.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mismatch.errors import MismatchError, OutOfMemory
from mismatch.specs import Pass
from mismatch.training.backward import Backward
from mismatch.training.distributed import MemoryPeak, Progress, World
from mismatch.training.gradient_sketch import ParameterShards, chunks
from mismatch.training.load import LoadedModel
from mismatch.training.routing.replay import ReplaySource
from mismatch.training.scorer import ForwardOptions
from mismatch.training.validate import prepare_pass
from mismatch.types import Floats, Ints, Rollout


@dataclass
class GradientSum:
    """A batch's gradient: this rank's shards, float32, by parameter name, on the host or device."""

    parts: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, chunk: slice, numel: int, values: torch.Tensor) -> None:
        """Add a chunk of one parameter's gradient; ``numel``: of this rank's shard."""
        if name not in self.parts:
            self.parts[name] = torch.zeros(numel, device=values.device)
        self.parts[name][chunk] += values

    def on_host(self) -> GradientSum:
        """The same in host memory."""
        return GradientSum({name: part.cpu() for name, part in self.parts.items()})


@dataclass(frozen=True)
class GradientJob:
    """One gradient to compute.

    Attributes:
        coefficients: name of the vector ``values`` [A].
        prompts: [P] prompt indices, in the order of the sketches.
        scoring: the pass, with ``grad`` on and ``routing`` off.
        source: routes to replay, where the spec asks for that.
    """

    coefficients: str
    values: Floats
    prompts: Ints
    scoring: Pass
    source: ReplaySource | None = None


@dataclass(frozen=True)
class BatchGradient:
    """The gradient of one :class:`GradientJob`, the same on every rank except ``total``.

    Attributes:
        groups: the G parameter groups of the model.
        squared_norm: [G] of the whole batch's gradient, exact.
        dot: [G] with the reference's gradient, exact; None without a reference.
        squared_norm_reference: [G] likewise.
        sketches: [P, G, k] float64, one linear sketch of every prompt's part of the gradient.
        total: this rank's shards of the gradient.
        loss_scale: at the end of the backward passes; 1 for dtypes without loss scaling.
        loss: ``-sum c · logprob`` of the batch.
        seconds: wall clock of all forward and backward passes.
        peak_bytes: beyond the loaded weights, the most of any rank.
    """

    groups: tuple[str, ...]
    squared_norm: Floats
    dot: Floats | None
    squared_norm_reference: Floats | None
    sketches: Floats
    total: GradientSum
    loss_scale: float
    loss: float
    seconds: float
    peak_bytes: int | None


def batch_gradient(
    world: World,
    loaded: LoadedModel,
    rollout: Rollout,
    job: GradientJob,
    reference: GradientSum | None = None,
) -> BatchGradient:
    """One trainer's gradient for one vector of coefficients; all ranks call it.

    Args:
        reference: this rank's shards of the reference's gradient for the same loss.

    Raises:
        MismatchError: what cannot be scored, a gradient that is not finite.
        torch.OutOfMemoryError: it does not fit on this rank's GPU.
    """
    options, _ = prepare_pass(world, loaded, rollout, job.scoring.spec, job.source)
    shards: ParameterShards = loaded.once("shards", lambda: ParameterShards(loaded.scorer))
    with MemoryPeak(world.device, True) as peak, torch.enable_grad():
        run = _Accumulation(world, loaded, rollout, job, options, shards)
        try:
            with run.passes.installed():
                run.all_prompts()
        finally:
            run.passes.clear()
    squared, dot, squared_reference = _products(world, shards, run.total, reference)
    sketches = world.sum(shards.signed(run.sketches).cpu())
    peaks = world.gather(peak.bytes) or [peak.bytes]
    return BatchGradient(
        groups=shards.groups,
        squared_norm=squared,
        dot=dot,
        squared_norm_reference=squared_reference,
        sketches=sketches.numpy(),
        total=run.total,
        loss_scale=run.passes.scale,
        loss=float(world.sum(run.loss)),
        seconds=round(peak.seconds, 3),
        peak_bytes=max(peaks),
    )


class _Accumulation:
    """All prompts of one :class:`GradientJob`, one after the other."""

    def __init__(
        self,
        world: World,
        loaded: LoadedModel,
        rollout: Rollout,
        job: GradientJob,
        options: ForwardOptions,
        shards: ParameterShards,
    ) -> None:
        self.world, self.rollout, self.job, self.shards = world, rollout, job, shards

        def coefficients(actions: Ints, logprobs: Floats) -> Floats:
            return job.values[actions]

        self.passes = Backward(
            world, loaded, rollout, job.scoring, options, coefficients, job.source
        )
        self.total = GradientSum()
        slots = shards.accumulator(world.device)
        self.sketches = slots.new_zeros(len(job.prompts), *slots.shape)
        self.loss = torch.zeros((), dtype=torch.float64)

    def all_prompts(self) -> None:
        lengths = np.diff(self.rollout.offsets)
        members = [np.flatnonzero(self.rollout.prompt_index == p) for p in self.job.prompts]
        tokens = sum(int(lengths[rows].sum()) for rows in members)
        label = f"gradient {self.job.scoring.name} {self.job.coefficients}"
        progress, done = Progress(label, tokens, self.world.rank == 0), 0
        for number, rows in enumerate(members):
            self.prompt(number, [int(row) for row in rows])
            done += int(lengths[rows].sum())
            progress.update(done)

    def prompt(self, number: int, rows: list[int]) -> None:
        """Add one prompt's gradient; one without coefficients has none."""
        sequence = self.rollout.sequence_of_token[self.rollout.actions]
        if not self.job.values[np.isin(sequence, rows)].any():
            return
        loss = self.passes.until_finite(rows)
        if loss is None:
            raise MismatchError(
                f"the gradient of prompt {self.job.prompts[number]} under "
                f"{self.job.scoring.name} is not finite",
                "look for overflow: another --train-dtype",
            )
        self.loss += loss
        self.collect(number)
        self.passes.clear()

    def collect(self, number: int) -> None:
        """Add the accumulated gradient to the batch's and to the prompt's sketch."""
        for shard in self.shards.shards:
            flat = shard.gradient()
            if flat is None:
                continue
            for chunk in chunks(shard.numel):
                values = flat[chunk].float() * self.passes.factor
                self.total.add(shard.name, chunk, shard.numel, values)
                self.shards.add(self.sketches[number], shard, chunk.start, values.double())


def _products(
    world: World, shards: ParameterShards, total: GradientSum, reference: GradientSum | None
) -> tuple[Floats, Floats | None, Floats | None]:
    """|g|², g · ref and |ref|² by group, [G] each, exact: float64 sums over all shards."""
    sums = torch.zeros(3, len(shards.groups), dtype=torch.float64)
    for shard in shards.shards:
        own = total.parts.get(shard.name)
        other = None if reference is None else reference.parts.get(shard.name)
        for chunk in chunks(shard.numel):
            g = None if own is None else own[chunk].double()
            ref = None if other is None else other[chunk].double()
            if g is not None:
                sums[0, shard.group] += float(g @ g)
            if ref is not None:
                sums[2, shard.group] += float(ref @ ref)
            if g is not None and ref is not None:
                sums[1, shard.group] += float(g @ ref.to(g.device))
    products: Any = world.sum(sums).numpy()
    return products[0], *((None, None) if reference is None else (products[1], products[2]))


def require_memory(world: World, loaded: LoadedModel, totals: int) -> None:
    """Refuse gradients that cannot fit, before any is computed; all ranks call it and agree.

    Args:
        totals: gradients of the reference that are kept on the host, one per loss.

    Raises:
        OutOfMemory: host or GPU memory is too small, with the numbers.
    """
    import psutil

    shards: ParameterShards = loaded.once("shards", lambda: ParameterShards(loaded.scorer))
    gradient_bytes = 4.0 * shards.local
    host, device = totals * gradient_bytes, 2.0 * gradient_bytes  # autograd's and the batch's
    if world.device.type == "cpu":
        host, device = host + device, 0.0
    needed = world.sum(torch.tensor([host], dtype=torch.float64))  # ranks share the host
    available = float(psutil.virtual_memory().available)
    free = float("inf")
    if world.device.type == "cuda":
        free = float(torch.cuda.mem_get_info(world.device)[0])
        free += torch.cuda.memory_reserved(world.device)
        free -= torch.cuda.memory_allocated(world.device)
    short = torch.tensor([int(float(needed) > available), int(device > free)])
    on_host, on_device = (bool(n) for n in world.sum(short))
    if not (on_host or on_device):
        return
    if on_host:
        where, need, have = "host memory", float(needed), available
    else:
        where, need, have = "GPU memory of a rank", device, free
    raise OutOfMemory(
        f"gradients of {shards.total:,} parameters need {need / 2**30:.1f} GiB more of {where}, "
        f"{have / 2**30:.1f} GiB are free",
        "use more GPUs (--nproc-per-node) or a larger host, or leave --gradients out",
    )
