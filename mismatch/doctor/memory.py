"""How much memory a run needs, from config.json and specs alone: arithmetic, no torch, no weights.

A prediction is what stays (weights, KV cache) and the largest of a few *moments*: what a forward
pass adds at its worst line. ``benchmarks/memory.py`` compares the trainer with measured peaks.

Letters in formulas: B rows, T tokens of the longest row, N = B·T tokens of the largest micro-batch
(of which ranks that share sequences have a part each),
H hidden, I width of an MLP or expert, h heads, q, kv their dimensions together, E experts, K
experts per token, V vocabulary, L layers, P parameters, W ranks, b bytes of the computation's
dtype, m of the sharded parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mismatch.doctor.experts import forward_bytes
from mismatch.models.config import ModelConfig
from mismatch.specs import TrainSpec
from mismatch.training.logprobs import CHUNK_BYTES, STRIP_BYTES
from mismatch.training.packing import plan_batches
from mismatch.types import Sampling

GIB = 1 << 30
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PLAIN_BLOCK = 256  # queries at a time, as mismatch/training/attention has it; a test compares them
EXPERTS = {  # implementation: name of the part, formula (see mismatch.doctor.experts)
    "eager": ("expert by expert", "N·K·E·8 + N·(H + 9I)·b at most"),
    "grouped_mm": ("experts workspace", "N·K·max(H + 9I, 5H)·b"),
    "batched_mm": ("weights gathered per token and expert", "3·N·K·H·I·b"),
    "bounded": ("experts in parts", "N·H·b + min(N, 4096)·max(7I, 2H + 4I)·b"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that takes memory.

    >>> Part("logits chunk", 1 << 20, "16·rows·V").bytes
    1048576
    """

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time, and what is alive then; parts of no bytes are left out."""

    name: str
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: str, *parts: Part) -> Moment:
        return cls(name, tuple(part for part in parts if part.bytes))

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Peak memory of one side on one device (GPU, or rank on a CPU).

    Attributes:
        side: "engine" or the name of a pass of the trainer.
        moments: every point that could be the highest; the highest one decides.
    """

    side: str
    moments: tuple[Moment, ...]

    @property
    def highest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def peak_bytes(self) -> int:
        return self.highest.bytes

    @property
    def moment(self) -> str:
        return self.highest.name


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be scored: tokens of every sequence, prompt included, and the sampling law."""

    lengths: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)

    def largest_batch(self, spec: TrainSpec) -> tuple[int, int]:
        """(B, T) of the micro-batch that takes most: by tokens², which attention scores cost."""
        sizes = []
        for batch in plan_batches(list(self.lengths), spec.micro_batch_tokens, spec.layout):
            lengths = [self.lengths[index] for index in batch.sequences]
            packed = spec.layout == "packing"
            sizes.append((1, sum(lengths)) if packed else (len(lengths), max(lengths)))
        return max(sizes, key=lambda size: (size[0] * size[1] ** 2, size[0] * size[1]))


def predict_trainer(
    shape: ModelConfig,
    spec: TrainSpec,
    world: int,
    work: Work,
    device: str = "cuda",
    name: str = "fsdp",
) -> Prediction:
    """Peak bytes of one rank of the training world for one pass.

    A pass with gradients keeps one input per layer (gradient checkpointing) and needs the same
    otherwise.

    Args:
        world: number of ranks the parameters are sharded over.
        device: "cuda", or "cpu" (whose gloo collectives copy once more).
    """
    b, act = BYTES[spec.dtype], BYTES[spec.autocast or spec.dtype]
    rows, longest = work.largest_batch(spec)
    # Ranks that share a sequence have a part of its positions; in attention, of its heads.
    tokens, layer = rows * -(-longest // spec.sequence_parallel), shape.layer_parameters * b
    kept = shape.layers * tokens * shape.hidden * act if spec.grad else 0
    head = spec.head_dtype
    copy = shape.vocab * shape.hidden * BYTES[head] if head not in (None, spec.dtype) else 0
    stays = (
        shard_part(shape, spec, world),
        Part("unsharded embedding and head", shape.root_parameters * b, "(2·V·H + H)·b"),
        # FSDP2 keeps a block's all-gather result until the next block has been copied out.
        Part("all-gather result in flight", layer if world > 1 else 0, "P_layer·b"),
        Part("head in its own dtype", copy, "V·H·b_head"),
        Part("kept for the backward pass", kept, "L·N·H·b, one input per layer"),
    )
    unsharded = Part("unsharded layer", layer, "P_layer·b")
    copies = 0 if world == 1 else 2 if device == "cpu" else 1
    buffers = Part("all-gather buffers", copies * layer, f"{copies}·P_layer·b")
    scores, returned, masks = _scores(shape, spec, rows, longest, act)
    # Rotary embeddings, or the kernel's copies of queries, keys and values.
    states = tokens * act * (2 * shape.hidden + 4 * shape.q_width + 2 * shape.kv_width)
    hidden = Part("hidden states", 2 * tokens * shape.hidden * act, "2·N·H·b")
    # The eager kernel returns its weights, and the layer holds them until the MLP is done.
    held = Part("attention weights held on", returned + masks, "B·h·T²·b, and masks")
    recorded = shape.layers * tokens * (12 * shape.top_k + 4) if spec.routing else 0
    routes = Part(
        "recorded routes",
        recorded + 8 * tokens * shape.experts if shape.experts else 0,
        "L·N·(12K + 4)",
    )
    return Prediction(
        name,
        (
            Moment.of("gathering a layer", *stays, unsharded, buffers),
            Moment.of(
                "attention",
                *stays,
                unsharded,
                Part("attention scores", scores, "3·B·h·T²·b, or B·h·T²·(b + 8)"),
                Part("attention masks", masks, "B·T²"),
                Part("attention states", states, "N·b·(2H + 4q + 2kv)"),
            ),
            Moment.of(
                "experts" if shape.experts else "MLP",
                *(*stays, unsharded, held, hidden, _mlp(shape, spec, tokens, act), routes),
            ),
            Moment.of("logprobs", *stays, *_head(shape, spec, tokens, work), hidden, routes),
        ),
    )


def shard_part(shape: ModelConfig, spec: TrainSpec, world: int) -> Part:
    """Parameters at rest; with offloading none on the device."""
    if spec.offload:
        return Part("sharded parameters", 0, "in host memory")
    return host_shard(shape, spec, world)


def host_shard(shape: ModelConfig, spec: TrainSpec, world: int) -> Part:
    """Parameters at rest, wherever. Experts are cut along E: more ranks share no further."""
    m = BYTES[shape.rests_in(spec.master_dtype)]
    per_rank = -(-shape.experts // world) / shape.experts if shape.experts else 1 / world
    experts = shape.layers * shape.expert_parameters
    count = (shape.parameters - experts) / world + experts * per_rank
    return Part("sharded parameters", int(count * m), "P·m/W")


def _scores(
    shape: ModelConfig, spec: TrainSpec, rows: int, longest: int, b: int
) -> tuple[int, int, int]:
    """Bytes of whole scores at the worst line, as returned, and of [B, 1, T, T] masks.

    Fused kernels have none of them, but a mask for packed rows, and the plain kernel a block of
    scores. The eager kernel holds scores with the sink's column and less their maximum, or in the
    spec's dtype and in float32 twice.
    """
    square = rows * longest**2
    if spec.attention == "eager":
        copies = 3 * b if shape.sinks else (b + 8 if b == 2 else 2 * b)
        once = square * shape.heads // spec.sequence_parallel
        return once * copies, once * b, square * b * (2 if shape.window else 1)
    if spec.attention.startswith("plain"):  # a block of queries, in float32 and in its own dtype
        block = rows * min(PLAIN_BLOCK, longest) * longest
        return block * shape.heads // spec.sequence_parallel * (8 + 2 * b), 0, 0
    fused = spec.attention in ("auto", "transformers", "sdpa")
    return 0, 0, square if fused and not shape.sinks and spec.layout == "packing" else 0


def _mlp(shape: ModelConfig, spec: TrainSpec, tokens: int, b: int) -> Part:
    """What a layer's MLP or experts add at their worst line."""
    if not shape.experts:
        return Part("MLP", 3 * tokens * shape.width * b, "3·N·I·b")
    chosen = "grouped_mm" if spec.experts == "auto" else spec.experts
    name, formula = EXPERTS.get(chosen, EXPERTS["grouped_mm"])
    return Part(name, forward_bytes(shape, chosen, tokens, b), formula)


def _head(shape: ModelConfig, spec: TrainSpec, tokens: int, work: Work) -> tuple[Part, Part]:
    """While the chunks of logits are turned into logprobs."""
    b = BYTES[spec.head_dtype or spec.autocast or spec.dtype]
    rows = -(-tokens // -(-tokens // max(1, CHUNK_BYTES // (b * shape.vocab))))
    strip = max(1, min(STRIP_BYTES // (4 * shape.vocab), tokens))
    # Two float32 buffers serve all strips; with gradients every step is a new tensor. Truncation
    # needs them sorted, as mass, renormalised and summed up.
    each = (16 if spec.grad else 8) + (17 if work.sampling.truncates else 0)
    return (
        Part("logits chunk", b * rows * shape.vocab, f"b·rows·V, {rows} rows"),
        Part("float32 strips", each * strip * shape.vocab, f"{each}·rows·V, {strip} rows"),
    )
