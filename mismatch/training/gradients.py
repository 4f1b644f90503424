"""The policy gradient of one batch under FSDP2, prompt by prompt.

The numerics are the trainer's: its dtypes, kernels, activation checkpointing and reductions. For
each prompt all ranks take samples of that prompt, so that what FSDP2 reduces is that prompt's
gradient; it is added to the batch's and folded into a sketch, and no second copy is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mismatch.errors import MismatchError
from mismatch.experiments.gradients.types import Gradients
from mismatch.specs import Pass
from mismatch.training.batch import to_device
from mismatch.training.distributed import Progress, World
from mismatch.training.gradient_sketch import Shards, chunks
from mismatch.training.load import Loaded
from mismatch.training.memory import MemoryPeak
from mismatch.training.packing import MicroBatch, plan_batches
from mismatch.training.routing.replay import Source
from mismatch.training.scorer import Ask
from mismatch.training.validate import prepare_pass
from mismatch.types import Floats, Ints, Rollout

LOSS_SCALE = 2.0**16  # where fp16 starts, as trainers do
BACK_OFF = 2.0**4


@dataclass
class Total:
    """A batch's gradient: this rank's shards, float32, by parameter name, on the host or device."""

    parts: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, place: slice, numel: int, values: torch.Tensor) -> None:
        """Add a chunk of one parameter's gradient."""
        if name not in self.parts:
            self.parts[name] = torch.zeros(numel, device=values.device)
        self.parts[name][place] += values

    def on_host(self) -> Total:
        """The same in host memory."""
        return Total({name: part.cpu() for name, part in self.parts.items()})


@dataclass(frozen=True)
class Work:
    """One gradient to take.

    Attributes:
        coefficients: their name; ``values`` [A] are they.
        prompts: [P] in the order of the sketches.
        one: the pass, with ``grad`` on and ``routing`` off.
        source: routes to replay, where the spec asks for that.
    """

    coefficients: str
    values: Floats
    prompts: Ints
    one: Pass
    source: Source | None = None


@dataclass(frozen=True)
class Taken:
    """What one :class:`Work` gave, the same on every rank but for ``total``.

    Attributes:
        loss_scale: that the backward passes ended with; 1 for dtypes that need none.
        loss: ``-sum c · logprob`` of the batch.
    """

    gradients: Gradients
    total: Total
    loss_scale: float
    loss: float


def take(
    world: World, loaded: Loaded, rollout: Rollout, work: Work, reference: Total | None = None
) -> Taken:
    """One trainer's gradient for one vector of coefficients; all ranks call it.

    Args:
        reference: this rank's shards of the reference's gradient for the same loss.

    Raises:
        MismatchError: what cannot be scored, a gradient that is not finite.
        torch.OutOfMemoryError: it does not fit on this rank's GPU.
    """
    ask, _ = prepare_pass(world, loaded, rollout, work.one.spec, work.source)
    shards: Shards = loaded.once("shards", lambda: Shards(loaded.scorer))
    with MemoryPeak(world.device, True) as peak, torch.enable_grad():
        run = _Run(world, loaded, rollout, work, ask, shards)
        try:
            run.all_prompts()
        finally:
            _clear(loaded)
    squared, dot, squared_reference = _products(world, shards, run.total, reference)
    sketches = world.sum(shards.signed(run.sketches).cpu())
    peaks = world.gather(peak.bytes) or [peak.bytes]
    gradients = Gradients(
        name=work.one.name,
        coefficients=work.coefficients,
        groups=shards.groups,
        squared_norm=squared,
        dot=dot,
        squared_norm_reference=squared_reference,
        sketches=sketches.numpy(),
        prompts=work.prompts,
        seconds=round(peak.seconds, 3),
        peak_bytes=max(peaks),
    )
    return Taken(gradients, run.total, run.scale, float(world.sum(run.loss)))


class _Run:
    """Forward and backward passes of one :class:`Work`."""

    def __init__(
        self,
        world: World,
        loaded: Loaded,
        rollout: Rollout,
        work: Work,
        ask: Ask,
        shards: Shards,
    ) -> None:
        self.world, self.loaded, self.rollout, self.work = world, loaded, rollout, work
        self.ask, self.shards = replace(ask, routing=False), shards
        self.action = np.full(len(rollout.token_ids), -1)
        self.action[rollout.actions] = np.arange(rollout.n_actions)
        self.total = Total()
        slots = shards.accumulator(world.device)
        self.sketches = slots.new_zeros(len(work.prompts), *slots.shape)
        self.scale = LOSS_SCALE if work.one.spec.dtype == "fp16" else 1.0
        self.loss = torch.zeros((), dtype=torch.float64)
        # Ranks take different samples: an expert module that only one of them uses must be reduced
        # by all.
        loaded.scorer.set_reduce_scatter_unused_params(world.size > 1)  # type: ignore[operator]

    def all_prompts(self) -> None:
        lengths = np.diff(self.rollout.offsets)
        members = [np.flatnonzero(self.rollout.prompt_index == p) for p in self.work.prompts]
        tokens = sum(int(lengths[rows].sum()) for rows in members)
        label = f"gradient {self.work.one.name} {self.work.coefficients}"
        progress, done = Progress(label, tokens, self.world.rank == 0), 0
        for number, rows in enumerate(members):
            self.prompt(number, [int(row) for row in rows])
            done += int(lengths[rows].sum())
            progress.update(done)

    def prompt(self, number: int, rows: list[int]) -> None:
        """Add one prompt's gradient; one without coefficients has none."""
        sequence = self.rollout.sequence_of_token[self.rollout.actions]
        if not self.work.values[np.isin(sequence, rows)].any():
            return
        while True:
            loss = self.backward(rows)
            if self.finite():
                break
            _clear(self.loaded)
            if self.scale <= 1.0:
                raise MismatchError(
                    f"the gradient of prompt {self.work.prompts[number]} under "
                    f"{self.work.one.name} is not finite",
                    "look for overflow: another --train-dtype",
                )
            self.scale /= BACK_OFF
        self.loss += loss
        self.collect(number)
        _clear(self.loaded)

    def backward(self, rows: list[int]) -> float:
        """Gradients of the prompt's samples, summed over micro-batches; the loss of this rank's."""
        shares = [rows[rank :: self.world.size] for rank in range(self.world.size)]
        plans = [self.plan(share) for share in shares]
        mine, total = plans[self.world.rank], 0.0
        for step in range(max(len(plan) for plan in plans)):
            idle = step >= len(mine)
            # FSDP2 gathers and reduces in step: a rank without work adds a gradient of 0.
            group = MicroBatch((rows[0],), 0) if idle else mine[step]
            total += self.micro_batch(group, 0.0 if idle else 1.0)
        return total

    def plan(self, rows: Sequence[int]) -> list[MicroBatch]:
        """Micro-batches of some samples."""
        if not rows:
            return []
        lengths = [int(n) for n in np.diff(self.rollout.offsets)[list(rows)]]
        spec = self.work.one.spec
        made = plan_batches(lengths, spec.micro_batch_tokens, spec.layout)
        return [MicroBatch(tuple(rows[i] for i in b.sequences), b.tokens) for b in made]

    def micro_batch(self, group: MicroBatch, weight: float) -> float:
        spec, device, scorer = self.work.one.spec, self.world.device, self.loaded.scorer
        laid = to_device(self.rollout, group, spec, self.ask, device, self.work.source)
        given = (laid.batch, laid.predicting, laid.wanted, laid.ask)
        values, _ = scorer(scorer.score, *given)
        coefficients = weight * self.work.values[self.action[laid.targets]]
        # A power of two: scaling changes no digit.
        scaled = torch.from_numpy((self.scale * coefficients).astype(np.float32)).to(device)
        loss = -(scaled * values[0]).sum()
        loss.backward()
        return float(loss.detach()) / self.scale

    def finite(self) -> bool:
        """Whether every rank's gradient is."""
        found = [piece.gradient() for piece in self.shards.pieces]
        bad = any(not bool(torch.isfinite(one).all()) for one in found if one is not None)
        return not bool(self.world.sum(torch.tensor(int(bad))))

    def collect(self, number: int) -> None:
        """Add what the backward passes left to the batch's gradient and to the prompt's sketch."""
        factor = self.world.size / self.scale  # FSDP2 gives the mean over ranks
        for piece in self.shards.pieces:
            flat = piece.gradient()
            if flat is None:
                continue
            for place in chunks(piece.numel):
                values = flat[place].float() * factor
                self.total.add(piece.name, place, piece.numel, values)
                wide = values.double()
                self.shards.add(self.sketches[number], piece, place.start, wide)


def _clear(loaded: Loaded) -> None:
    for parameter in loaded.scorer.parameters():
        parameter.grad = None


def _products(
    world: World, shards: Shards, total: Total, reference: Total | None
) -> tuple[Floats, Floats | None, Floats | None]:
    """|g|², g · ref and |ref|² by group, [G] each, exact: float64 sums over all shards."""
    sums = torch.zeros(3, len(shards.groups), dtype=torch.float64)
    for piece in shards.pieces:
        ours = total.parts.get(piece.name)
        theirs = None if reference is None else reference.parts.get(piece.name)
        for place in chunks(piece.numel):
            one = None if ours is None else ours[place].double()
            other = None if theirs is None else theirs[place].double()
            if one is not None:
                sums[0, piece.group] += float(one @ one)
            if other is not None:
                sums[2, piece.group] += float(other @ other)
            if one is not None and other is not None:
                sums[1, piece.group] += float(one @ other.to(one.device))
    found: Any = world.sum(sums).numpy()
    return found[0], *((None, None) if reference is None else (found[1], found[2]))


def require_room(world: World, loaded: Loaded, totals: int) -> None:
    """Refuse before anything runs what cannot fit; all ranks call it and say the same.

    Args:
        totals: gradients of the reference that are kept on the host, one per loss.

    Raises:
        MismatchError: host or GPU memory is too small, with the numbers.
    """
    import psutil

    shards: Shards = loaded.once("shards", lambda: Shards(loaded.scorer))
    one = 4.0 * shards.local
    host, device = totals * one, 2.0 * one  # a gradient at work and the batch's
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
    raise MismatchError(
        f"gradients of {shards.total:,} parameters need {need / 2**30:.1f} GiB more of {where}, "
        f"{have / 2**30:.1f} GiB are free",
        "use more GPUs (--nproc-per-node) or a larger host, or leave --gradients out",
    )
