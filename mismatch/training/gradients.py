"""The policy gradient of one batch under FSDP2, prompt by prompt.

The numerics are the trainer's: its dtypes, kernels, activation checkpointing and reductions. All
ranks work on samples of the same prompt at a time, so that FSDP2 reduces that prompt's gradient; it
is added to the batch's and folded into a sketch. No second copy of a gradient is ever held.

A sketch folds a gradient into k numbers: element i of a parameter is added, with a random sign, to
one bucket. Sign and bucket depend on the parameter's name and the element's place in the *whole*
parameter, so sketches of any sharding add up to the same, and two gradients are folded alike. With
independent signs the inner product of two sketches has the gradients' own as its mean (a count
sketch: Charikar, Chen and Farach-Colton 2002).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mismatch.errors import MismatchError, OutOfMemory
from mismatch.specs import Pass
from mismatch.training.backward import Backward
from mismatch.training.distributed import MemoryPeak, Progress, World
from mismatch.training.load import LoadedModel
from mismatch.training.routing.replay import ReplaySource
from mismatch.training.scorer import ForwardOptions
from mismatch.training.validate import prepare_pass
from mismatch.types import Floats, Ints, Rollout

GROUPS = ("attention", "sinks", "router", "experts", "mlp", "embeddings", "norms", "head", "other")
SKETCH_SIZE = 2048  # buckets of one group
CHUNK = 1 << 20  # elements per step: bounds the temporaries
CACHED_BYTES = 256 << 20  # of bucket numbers that are cached; larger models recompute them
_MULTIPLIERS = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)  # odd, so that they are invertible

# A name is cut at its dots; the first rule that holds one of the parts wins.
_FIRST: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sinks", ("sinks", "sink", "attention_sink_bias")),
    ("head", ("lm_head", "embed_out")),
    (
        "embeddings",
        (
            *("embed_tokens", "embed_positions", "wte", "wpe", "embed_in", "word_embeddings"),
            *("embed_tokens_per_layer", "embeddings"),
        ),
    ),
    ("attention", ("q_proj", "k_proj", "v_proj", "o_proj")),  # Nemotron-H calls the layer "mixer"
)
_LATER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("router", ("router", "gate", "shared_expert_gate", "e_score_correction_bias")),
    ("experts", ("experts", "shared_expert", "shared_experts", "shared_mlp")),
    ("mlp", ("mlp", "feed_forward", "ffn", "block_sparse_moe")),
)
_ATTENTION = ("attn", "attention")


def group_of(name: str) -> str:
    """The group of a parameter by its name in transformers, one of :data:`GROUPS`.

    A head that is tied to the embeddings is one parameter with them, and counts there.

    >>> group_of("model.layers.0.self_attn.sinks"), group_of("model.layers.0.mlp.router.weight")
    ('sinks', 'router')
    >>> group_of("model.layers.0.mlp.gate_proj.weight"), group_of("model.norm.weight")
    ('mlp', 'norms')
    """
    parts = name.split(".")
    if any("norm" in part or part.startswith("ln_") for part in parts):
        return "norms"
    for group, words in _FIRST:
        if not set(parts).isdisjoint(words):
            return group
    if any(word in part for part in parts for word in _ATTENTION):
        return "attention"  # before the routers: some attention has a gate
    for group, words in _LATER:
        if not set(parts).isdisjoint(words):
            return group
    return "other"


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """This rank's shard of one parameter.

    Attributes:
        group: index into the groups of :class:`ParameterShards`.
        start: index of its first element in the flattened whole parameter.
        numel: number of its elements.
    """

    name: str
    group: int
    parameter: Any
    start: int
    numel: int

    def gradient(self) -> torch.Tensor | None:
        """Its gradient, [numel]; None where the backward pass produced none."""
        grad = self.parameter.grad
        if grad is None:
            return None
        local: torch.Tensor = (grad.to_local() if isinstance(grad, DTensor) else grad).reshape(-1)
        return local


class ParameterShards:
    """The trainable parameters of one loaded model, as this rank holds them.

    Attributes:
        groups: the G of :data:`GROUPS` that the model has, in that order.
        shards: of the parameters of which this rank holds any element.
        total: number of trainable elements on all ranks.
    """

    def __init__(self, model: torch.nn.Module, size: int = SKETCH_SIZE) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise MismatchError("gradients: the model has no trainable parameter")
        present = {group_of(name) for name, _ in named}
        self.size = size
        self.groups = tuple(group for group in GROUPS if group in present)
        self.total = sum(parameter.numel() for _, parameter in named)
        shards = [_shard(name, parameter, self.groups) for name, parameter in named]
        self.shards = [shard for shard in shards if shard.numel]
        local = sum(shard.numel for shard in self.shards)
        self._cache: dict[tuple[str, int, int], torch.Tensor] | None = (
            {} if 4 * local <= CACHED_BYTES else None
        )

    @property
    def local(self) -> int:
        """Number of elements on this rank."""
        return sum(shard.numel for shard in self.shards)

    def accumulator(self, device: torch.device) -> torch.Tensor:
        """Zeros for :meth:`add`, [G, 2k] float64: k buckets for sign +, then k for sign -."""
        return torch.zeros(len(self.groups), 2 * self.size, dtype=torch.float64, device=device)

    def add(
        self, sketch: torch.Tensor, shard: ParameterShard, first: int, values: torch.Tensor
    ) -> None:
        """Fold ``values``, the shard's elements from ``first`` on, float64, into an accumulator."""
        sketch[shard.group].scatter_add_(0, self._slots(shard, first, values), values)

    def signed(self, sketch: torch.Tensor) -> torch.Tensor:
        """Sketches [..., k] of accumulators [..., 2k]."""
        return sketch[..., : self.size] - sketch[..., self.size :]

    def _slots(self, shard: ParameterShard, first: int, values: torch.Tensor) -> torch.Tensor:
        key = (shard.name, first, len(values))
        if self._cache is not None and key in self._cache:
            return self._cache[key].long()
        start = shard.start + first
        slots = bucket_numbers(shard.name, start, len(values), 2 * self.size, values.device)
        if self._cache is not None:
            self._cache[key] = slots.to(torch.int32)
        return slots


def chunks(length: int) -> Iterator[slice]:
    """Slices of at most CHUNK elements."""
    for first in range(0, length, CHUNK):
        yield slice(first, min(first + CHUNK, length))


def bucket_numbers(
    name: str, start: int, count: int, size: int, device: torch.device
) -> torch.Tensor:
    """Pseudo-random numbers below ``size`` (a power of two), one per element: [count] int64.

    Args:
        start: index of the first element in the flattened whole parameter.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    mixed = torch.arange(start, start + count, device=device, dtype=torch.int64) + seed
    for factor, shift in ((_MULTIPLIERS[0], 32), (_MULTIPLIERS[1], 29), (_MULTIPLIERS[0], 32)):
        mixed.mul_(factor)  # wraps around
        mixed.bitwise_xor_(mixed >> shift)
    return mixed.bitwise_and_(size - 1)


def _shard(name: str, parameter: torch.nn.Parameter, groups: tuple[str, ...]) -> ParameterShard:
    group = groups.index(group_of(name))
    if not isinstance(parameter, DTensor):
        return ParameterShard(name, group, parameter, 0, parameter.numel())
    placements = parameter.placements
    if not (len(placements) == 1 and isinstance(placements[0], Shard) and placements[0].dim == 0):
        raise MismatchError(
            f"gradients: {name} is sharded as {placements}, not by its first dimension",
            "this tool shards by FSDP2 alone; please report it",
        )
    mesh = parameter.device_mesh
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    row = parameter.numel() // max(1, parameter.shape[0])
    return ParameterShard(name, group, parameter, offset[0] * row, parameter.to_local().numel())


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
        coefficients: [A] of every action token.
        prompts: [P] prompt indices, in the order of the sketches.
        scoring: the pass, with ``grad`` on and ``routing`` off.
        source: routes to replay, where the spec asks for that.
    """

    coefficients: Floats
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
    """One trainer's gradient; all ranks call it.

    Args:
        reference: this rank's shards of the reference's gradient.

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
            return job.coefficients[actions]

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
        label = f"gradient {self.job.scoring.name}"
        progress, done = Progress(label, tokens, self.world.rank == 0), 0
        for number, rows in enumerate(members):
            self.prompt(number, [int(row) for row in rows])
            done += int(lengths[rows].sum())
            progress.update(done)

    def prompt(self, number: int, rows: list[int]) -> None:
        """Add one prompt's gradient; one without coefficients has none."""
        sequence = self.rollout.sequence_of_token[self.rollout.actions]
        if not self.job.coefficients[np.isin(sequence, rows)].any():
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


def require_memory(world: World, loaded: LoadedModel) -> None:
    """Refuse gradients that cannot fit, before any is computed; all ranks call it and agree.

    Raises:
        OutOfMemory: host or GPU memory is too small, with the numbers.
    """
    import psutil

    shards: ParameterShards = loaded.once("shards", lambda: ParameterShards(loaded.scorer))
    gradient_bytes = 4.0 * shards.local
    # The reference's stays on the host; the device holds autograd's and the batch's.
    host, device = gradient_bytes, 2.0 * gradient_bytes
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
