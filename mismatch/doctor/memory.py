"""How much memory each side needs, from config.json and specs alone: arithmetic, no torch.

A prediction is what stays (weights, KV cache) and the largest of a few *moments*: what a forward
pass adds at its worst line. ``benchmarks/memory.py`` compares the trainer with measured peaks.

Letters in formulas: B rows, T tokens of the longest row, N = B·T tokens of the largest micro-batch
(of which ranks that share sequences have a part each),
H hidden, I width of an MLP or expert, h heads, q, kv their dimensions together, E experts, K
experts per token, V vocabulary, L layers, P parameters, W ranks, b bytes of the computation's
dtype, m of the sharded parameters' dtype, r rows of the busiest expert (N at most).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mismatch.models.config import MXFP4_BITS, ModelConfig
from mismatch.specs import EngineSpec, TrainSpec
from mismatch.training.logprobs import CHUNK_BYTES, STRIP_BYTES
from mismatch.training.packing import EXPERT_ROWS, plan_batches
from mismatch.types import Sampling

GIB = 1 << 30
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PLAIN_BLOCK = 256  # queries at a time, as mismatch/training/attention has it; a test compares them
EXPERTS = {  # implementation: name of the part, formula of forward_bytes
    "eager": ("expert by expert", "N·K·E·8 + N·(H + 9I)·b at most"),
    "grouped_mm": ("experts workspace", "N·K·max(H + 9I, 5H)·b"),
    "batched_mm": ("weights gathered per token and expert", "3·N·K·H·I·b"),
    "bounded": ("experts in parts", "N·H·b + min(N, 4096)·max(7I, 2H + 4I)·b"),
}
# vLLM 0.32/0.33: vllm/config/cache.py, and vllm/engine/arg_utils.py get_batch_defaults (LLM class).
UTILISATION = 0.92
LARGE_BYTES = 70 * GIB  # from here on larger batches, but on A100s: see batch_class
CPU_KV_BYTES = GIB  # VLLM_CPU_KVCACHE_SPACE as mismatch sets it
PROMPT_CHUNK = 1024  # tokens whose prompt logprobs the GPU model runner takes at a time
TRANSFORMERS_BATCH = 64  # max_num_seqs of mismatch's own engine


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
class Workload:
    """What is sampled and scored: tokens of every sequence, prompt included; the sampling law."""

    lengths: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def largest_batch(self, spec: TrainSpec) -> tuple[int, int]:
        """(B, T) of the micro-batch that takes most: by tokens², which attention scores cost."""
        sizes = []
        for batch in plan_batches(list(self.lengths), spec.micro_batch_tokens, spec.layout):
            lengths = [self.lengths[index] for index in batch.sequences]
            packed = spec.layout == "packing"
            sizes.append((1, sum(lengths)) if packed else (len(lengths), max(lengths)))
        return max(sizes, key=lambda size: (size[0] * size[1] ** 2, size[0] * size[1]))


# ---------------------------------------------------------------- trainer


def predict_trainer(
    shape: ModelConfig,
    spec: TrainSpec,
    world: int,
    work: Workload,
    device: str = "cuda",
    name: str = "fsdp",
    trains: bool = False,
) -> Prediction:
    """Peak bytes of one rank of the training world for one pass.

    A pass with gradients keeps one input per layer (gradient checkpointing) and needs the same
    otherwise.

    Args:
        world: number of ranks the parameters are sharded over.
        device: "cuda", or "cpu" (whose gloo collectives copy once more).
        trains: gradients and AdamW's moments lie beside the parameters.
    """
    b, act = BYTES[spec.dtype], BYTES[spec.autocast or spec.dtype]
    rows, longest = work.largest_batch(spec)
    # Ranks that share a sequence have a part of its positions; in attention, of its heads.
    tokens, layer = rows * -(-longest // spec.sequence_parallel), shape.layer_parameters * b
    stays = _stays(shape, spec, world, tokens)
    if trains:
        shard = sharded(shape, spec, world)
        stays += (Part("gradients and two moments", 3 * shard.bytes, "3·P·m/W"),)
    unsharded = Part("unsharded layer", layer, "P_layer·b")
    copies = 0 if world == 1 else 2 if device == "cpu" else 1
    buffers = Part("all-gather buffers", copies * layer, f"{copies}·P_layer·b")
    scores, returned, masks = _scores(shape, spec, rows, longest, act)
    # Rotary embeddings, or the kernel's copies of queries, keys and values.
    states = tokens * act * (2 * shape.hidden + 4 * shape.q_width + 2 * shape.kv_width)
    attention = (
        Part("attention scores", scores, "3·B·h·T²·b, or B·h·T²·(b + 8)"),
        Part("attention masks", masks, "B·T²"),
        Part("attention states", states, "N·b·(2H + 4q + 2kv)"),
    )
    # The eager kernel returns its weights, and the layer holds them until the MLP is done.
    held = Part("attention weights held on", returned + masks, "B·h·T²·b, and masks")
    hidden = Part("hidden states", 2 * tokens * shape.hidden * act, "2·N·H·b")
    recorded = shape.layers * tokens * (12 * shape.top_k + 4) if spec.routing else 0
    recorded = recorded + 8 * tokens * shape.experts if shape.experts else 0
    routes = Part("recorded routes", recorded, "L·N·(12K + 4)")
    mlp, head = _mlp(shape, spec, tokens, act), _head(shape, spec, tokens, work)
    moments = (
        Moment.of("gathering a layer", *stays, unsharded, buffers),
        Moment.of("attention", *stays, unsharded, *attention),
        Moment.of(
            "experts" if shape.experts else "MLP", *stays, unsharded, held, hidden, mlp, routes
        ),
        Moment.of("logprobs", *stays, *head, hidden, routes),
    )
    return Prediction(name, moments)


def sharded(shape: ModelConfig, spec: TrainSpec, world: int) -> Part:
    """Parameters at rest, wherever. Experts are cut along E: more ranks share no further."""
    m = BYTES[shape.rests_in(spec.master_dtype)]
    per_rank = -(-shape.experts // world) / shape.experts if shape.experts else 1 / world
    experts = shape.layers * shape.expert_parameters
    count = (shape.parameters - experts) / world + experts * per_rank
    return Part("sharded parameters", int(count * m), "P·m/W")


def _stays(shape: ModelConfig, spec: TrainSpec, world: int, tokens: int) -> tuple[Part, ...]:
    """What is on the device during a whole pass; offloaded shards are not."""
    b, act, head = BYTES[spec.dtype], BYTES[spec.autocast or spec.dtype], spec.head_dtype
    kept = shape.layers * tokens * shape.hidden * act if spec.grad else 0
    copy = shape.vocab * shape.hidden * BYTES[head] if head not in (None, spec.dtype) else 0
    # FSDP2 keeps a block's all-gather result until the next block has been copied out.
    in_flight = shape.layer_parameters * b if world > 1 else 0
    return (
        *(() if spec.offload else (sharded(shape, spec, world),)),
        Part("unsharded embedding and head", shape.root_parameters * b, "(2·V·H + H)·b"),
        Part("all-gather result in flight", in_flight, "P_layer·b"),
        Part("head in its own dtype", copy, "V·H·b_head"),
        Part("kept for the backward pass", kept, "L·N·H·b, one input per layer"),
    )


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
        scores = square * shape.heads // spec.sequence_parallel
        return scores * copies, scores * b, square * b * (2 if shape.window else 1)
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


def _head(shape: ModelConfig, spec: TrainSpec, tokens: int, work: Workload) -> tuple[Part, Part]:
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


# ---------------------------------------------------------------- experts of one layer


def forward_bytes(
    shape: ModelConfig, implementation: str, tokens: int, b: int, rows: int | None = None
) -> int:
    """Bytes of a forward pass without gradients, above weights and hidden states, output included.

    Counted from the code: which tensors the function still refers to at its worst line.

    Args:
        b: bytes of the computation's dtype.
        rows: of the busiest expert; None: all tokens go there.
    """
    hidden, width, pairs = shape.hidden, shape.width, tokens * shape.top_k
    rows = tokens if rows is None else rows
    biased = shape.traits.biased_experts
    if implementation == "batched_mm":
        return pairs * (3 * hidden * width + hidden + 3 * width) * b
    # Gate, activation and biases of gpt-oss are separate tensors; the others' are fewer.
    gate = hidden + (9 if biased else 4) * width
    after = (5 if biased else 4) * hidden
    if implementation == "eager":
        return pairs * (shape.experts + 1) * 8 + (rows * max(gate, after) + tokens * hidden) * b
    if implementation == "bounded":
        rows = min(rows, EXPERT_ROWS)
        work = max(7 * width, 2 * hidden + 4 * width) if biased else 2 * (hidden + width)
        return 32 * pairs + (rows * max(work, 4 * width) + tokens * hidden) * b
    return pairs * max(gate, after) * b


def backward_bytes(
    shape: ModelConfig, implementation: str, tokens: int, b: int, rows: int | None = None
) -> int:
    """Bytes of a trainer's forward and backward pass, above weights, their gradient and the input.

    Where the highest moment comes before a gradient is there, that gradient's place is used.
    """
    hidden, width, pairs = shape.hidden, shape.width, tokens * shape.top_k
    matrix = hidden * width  # a third of an expert; matmul libraries rearrange two of them at most
    biased = shape.traits.biased_experts
    if implementation == "batched_mm":
        # Of the copies and their gradients the larger half; the gradient of all experts comes last.
        return max(2 * pairs, 4 * pairs - 2 * shape.experts) * matrix * b
    if implementation == "eager":
        # Every expert's gradient is a zero-filled one of all experts, added to the sum so far.
        zeros, saved = 2 * (shape.experts + 1) * matrix, 2 * hidden + (8 if biased else 4) * width
        return (zeros + pairs * saved + 2 * tokens * hidden) * b
    if implementation == "bounded":
        rows = min(tokens if rows is None else rows, EXPERT_ROWS)
        work = 4 * hidden + (14 if biased else 8) * width
        return 32 * pairs + (rows * work + 2 * tokens * hidden + 2 * matrix) * b
    return (pairs * (3 * hidden + 2 * width) + 2 * matrix) * b


# ---------------------------------------------------------------- engine


def predict_engine(
    shape: ModelConfig,
    spec: EngineSpec,
    work: Workload,
    device: str = "cuda",
    device_bytes: int | None = None,
) -> Prediction:
    """Peak bytes of the engine on one device, with the KV cache that ``work`` can use.

    vLLM fills whatever ``gpu_memory_utilization`` leaves with KV cache, so that more than this is
    resident; less than this makes it wait, and less than one sequence makes it refuse.

    Args:
        device_bytes: memory of one GPU, which sets vLLM's default batch sizes.
    """
    if spec.engine == "transformers":
        return _transformers(shape, spec, work)
    b, split, args = BYTES[spec.dtype], spec.tensor_parallel_size, dict(spec.args)
    batched, at_once = vllm_batch(spec, work.longest, device, device_bytes)
    running = min(at_once, len(work.lengths))
    kv_size = 1 if str(args.get("kv_cache_dtype", "auto")).startswith("fp8") else b
    # KV heads are never cut.
    share = max(1, shape.kv_heads // split) / shape.kv_heads
    each = int(shape.kv_elements(spec.max_model_len or work.longest) * kv_size * share)
    kv = CPU_KV_BYTES if device == "cpu" else running * each
    weights = Part("weights", weight_bytes(shape, spec, True), "P·b/TP, MXFP4 experts 4.25 bits")
    cache = Part("KV cache", kv, f"2·L·kv·d·b·tokens, {running} sequences at once")
    width = max(3 * shape.width, 2 * shape.hidden + shape.q_width)
    rows = batched * (shape.top_k or 1)
    # Compiled kernels keep two states of the residual stream beside the widest intermediate.
    states = (rows * width // split + 2 * batched * shape.hidden) * b
    logits = running * shape.vocab * (b + 8)
    adds = {
        "a full batch": Part("activations", states, "tokens·K·3I·b/TP"),
        "sampling": Part("logits", logits, "sequences·V·(b + 8), float32 twice"),
    }
    if spec.prefill:
        scored = min(work.longest, batched, batched if device == "cpu" else PROMPT_CHUNK)
        adds["prefill rescoring"] = _prefill_logits(shape, scored, b, f", {scored} tokens")
    moments = (Moment(name, (weights, cache, part)) for name, part in adds.items())
    return Prediction("engine", tuple(moments))


def weight_bytes(shape: ModelConfig, spec: EngineSpec, keeps_mxfp4: bool) -> int:
    """Weights on one device: in the spec's dtype, MXFP4 experts as they are where kept so."""
    packed = shape.layers * shape.expert_matrices if shape.quantised == "mxfp4" else 0
    packed = packed if keeps_mxfp4 else 0
    plain = (shape.parameters - packed) * BYTES[spec.dtype]
    return int((plain + packed * MXFP4_BITS / 8) / spec.tensor_parallel_size)


def batch_class(name: str, size: int) -> int:
    """The memory that vLLM's default batches go by: an A100's counts as small."""
    return min(size, LARGE_BYTES - 1) if "a100" in name.lower() else size


def vllm_batch(
    spec: EngineSpec, longest: int, device: str, device_bytes: int | None
) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) that vLLM's ``LLM`` takes."""
    args = dict(spec.args)
    if device == "cpu":  # mismatch switches chunked prefill off there
        tokens, sequences = max(8192, spec.max_model_len or longest), 256
    elif (device_bytes or 80 * GIB) >= LARGE_BYTES:
        tokens, sequences = 16384, 1024
    else:
        tokens, sequences = 8192, 256
    batched, at_once = args.get("max_num_batched_tokens"), args.get("max_num_seqs")
    return int(batched or tokens), int(at_once or sequences)


def _prefill_logits(shape: ModelConfig, tokens: int, b: int, note: str = "") -> Part:
    size = tokens * shape.vocab * (b + 8)
    return Part("logits of the prefill", size, f"tokens·V·(b + 8){note}")


def _transformers(shape: ModelConfig, spec: EngineSpec, work: Workload) -> Prediction:
    b, at_once = BYTES[spec.dtype], dict(spec.args).get("max_num_seqs", TRANSFORMERS_BATCH)
    running = min(int(at_once), len(work.lengths))
    weights = Part("weights", weight_bytes(shape, spec, False), "P·b")
    # Every layer keeps all tokens while the cache grows; growing copies one layer's at a time.
    elements = 2 * shape.kv_width * work.longest * running
    cache = Part("KV cache", elements * b * (shape.layers + 1), "2·(L + 1)·kv·d·b·tokens")
    logits = Part("logits", running * shape.vocab * (b + 12), "sequences·V·(b + 12)")
    rescoring = (weights, _prefill_logits(shape, work.longest, b))
    moments = Moment("sampling", (weights, cache, logits)), Moment("prefill rescoring", rescoring)
    return Prediction("engine", moments)
