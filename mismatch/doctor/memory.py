"""How much memory each side needs, from a model's sizes and the specs: arithmetic, no torch.

A prediction is what stays (weights, KV cache) and the largest of a few *moments*: what a forward
pass adds at its worst line. ``benchmarks/memory.py`` compares the trainer with measured peaks
(within 13 % in 19 cases); the engine's side was never compared. torch's FSDPMemTracker under
FakeTensorMode cannot run 9 of these cases and is 22 % low to 35 % high in the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch.errors import MismatchError
from mismatch.models.sizes import SizedModel
from mismatch.specs import AS_STORED, EngineSpec, TrainSpec
from mismatch.training.packing import CHUNK_BYTES, EXPERT_ROWS, STRIP_BYTES
from mismatch.types import Sampling

GIB = 1 << 30
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PLAIN_BLOCK = 256  # queries at a time, as mismatch/training/attention has it; a test compares them
# vLLM 0.32/0.33: vllm/config/cache.py, and vllm/engine/arg_utils.py get_batch_defaults (LLM class).
UTILISATION = 0.92
LARGE_BYTES = 70 * GIB  # from here on larger batches (on an A100 vLLM keeps to the smaller)
CPU_KV_BYTES = GIB  # VLLM_CPU_KVCACHE_SPACE as mismatch sets it
PROMPT_CHUNK = 1024  # rows of a batch whose prompt logprobs the GPU model runner takes at a time
TRANSFORMERS_BATCH = 64  # max_num_seqs of mismatch's own engine

Parts = dict[str, int]  # what is allocated at one moment -> bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """Peak memory of one side on one device (GPU, or rank on a CPU).

    >>> Prediction({"sampling": {"weights": 8, "logits": 2}}).peak_bytes
    10

    Attributes:
        moments: every point in time that could be the highest; the highest one decides.
    """

    moments: dict[str, Parts]

    @property
    def moment(self) -> str:
        """The name of the highest moment."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def highest(self) -> Parts:
        return self.moments[self.moment]

    @property
    def peak_bytes(self) -> int:
        return sum(self.highest.values())


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sampled and scored: every sequence is taken to be as long as the longest.

    Attributes:
        longest: tokens, prompt included.
    """

    sequences: int
    longest: int
    sampling: Sampling = field(default_factory=Sampling)

    def largest_batch(self, spec: TrainSpec) -> tuple[int, int]:
        """(B, T) of the micro-batch that takes most."""
        rows = max(1, min(self.sequences, spec.micro_batch_tokens // self.longest))
        return (1, rows * self.longest) if spec.layout == "packing" else (rows, self.longest)


def predict_trainer(
    shape: SizedModel,
    spec: TrainSpec,
    world: int,
    work: Workload,
    device: str = "cuda",
    trains: bool = False,
) -> Prediction:
    """Return the peak bytes of one rank of the training world for one pass.

    Args:
        world: number of ranks the parameters are sharded over.
        device: "cuda", or "cpu" (whose gloo collectives copy once more).
        trains: gradients and AdamW's moments are allocated next to the parameters.
    """
    b, act = BYTES[spec.dtype], BYTES[spec.autocast or spec.dtype]
    head = spec.head_dtype or spec.dtype
    rows, longest = work.largest_batch(spec)
    # Ranks that share a sequence have a part of its positions; in attention, of its heads.
    tokens = rows * -(-longest // spec.sequence_parallel)
    heads = shape.heads // spec.sequence_parallel
    layer, hidden = shape.layer_parameters * b, tokens * shape.hidden * act
    shard = sharded(shape, spec, world)
    stays = {
        "sharded parameters": 0 if spec.offload else shard,
        "gradients and two moments": 3 * shard if trains else 0,
        "unsharded embedding and head": shape.root_parameters * b,
        # FSDP2 keeps a block's all-gather result until the next block has been copied out.
        "all-gather result in flight": layer if world > 1 else 0,
        "head in another dtype": (
            shape.vocab * shape.hidden * BYTES[head] if head != spec.dtype else 0
        ),
        # Gradient checkpointing keeps one input per layer.
        "kept for the backward pass": shape.layers * hidden if spec.grad else 0,
    }
    gathered = stays | {"unsharded layer": layer}
    gathers = 0 if world == 1 else 2 if device == "cpu" else 1

    # Attention. Fused kernels hold no scores, but without sinks a mask of packed rows.
    square = rows * longest**2
    scores = returned = masks = 0
    if spec.attention == "eager":
        # With sinks: scores, with the sink's column, and less their maximum. Without: scores, and
        # the softmax in float32 (twice, with its copy in the spec's dtype).
        copies = 3 * act if shape.sinks else act + 8 if act == 2 else 2 * act
        scores, returned = square * heads * copies, square * heads * act
        masks = square * act * (2 if shape.window else 1)
    elif spec.attention.startswith("plain"):  # a block of queries, in float32 and the model's dtype
        scores = rows * min(PLAIN_BLOCK, longest) * longest * heads * (8 + 2 * act)
    elif spec.attention in ("auto", "transformers", "sdpa") and not shape.sinks:
        masks = square if spec.layout == "packing" else 0
    kv = shape.kv_heads * (shape.head_dim + shape.value_dim)

    mlp, routes = {"MLP": 3 * tokens * shape.width * act}, 0  # gate, up and their product
    if shape.experts:
        part = "experts in parts" if spec.experts == "bounded" else "experts workspace"
        mlp = {part: forward_bytes(shape, spec.experts, tokens, act)}
        # Ids (8 bytes) and weights (4) of the chosen experts, and of each token its row.
        routes = shape.layers * tokens * (12 * shape.top_k + 4) if spec.routing else 0
        routes += 8 * tokens * shape.experts
    after = {"hidden states": 2 * hidden, "recorded routes": routes}
    moments = {
        "gathering a layer": gathered | {"all-gather buffers": gathers * layer},
        "attention": gathered
        | {
            "attention scores": scores,
            "attention masks": masks,
            # Rotary embeddings, or the kernel's copies of queries, keys and values.
            "attention states": tokens * act * (2 * shape.hidden + 4 * shape.q_width + kv),
        },
        # The eager kernel returns its weights, and the layer holds them until the MLP is done.
        "experts" if shape.experts else "MLP": gathered
        | {"attention weights held on": returned + masks}
        | mlp
        | after,
        "logprobs": stays | _head(shape, spec, tokens, work) | after,
    }
    return Prediction(
        {m: {part: size for part, size in parts.items() if size} for m, parts in moments.items()}
    )


def sharded(shape: SizedModel, spec: TrainSpec, world: int) -> int:
    """Return bytes of a rank's parameters at rest, on device or host.

    Experts are sharded along E; ranks beyond E save nothing.
    """
    per_rank = -(-shape.experts // world) / shape.experts if shape.experts else 1 / world
    dense = shape.parameters - shape.expert_parameters
    count = dense / world + shape.expert_parameters * per_rank
    return int(count * BYTES[shape.rests_in(spec.master_dtype)])


def _head(shape: SizedModel, spec: TrainSpec, tokens: int, work: Workload) -> Parts:
    """While the chunks of logits are turned into logprobs, see mismatch/training/logprobs.py."""
    b = BYTES[spec.head_dtype or spec.autocast or spec.dtype]
    rows = -(-tokens // -(-tokens // max(1, CHUNK_BYTES // (b * shape.vocab))))
    strip = max(1, min(STRIP_BYTES // (4 * shape.vocab), tokens))
    # Two float32 buffers serve all strips; with gradients every step is a new tensor. Truncation
    # needs them sorted, as mass, renormalised and summed up.
    each = (16 if spec.grad else 8) + (17 if work.sampling.truncates else 0)
    return {"logits chunk": b * rows * shape.vocab, "float32 strips": each * strip * shape.vocab}


def forward_bytes(
    shape: SizedModel, implementation: str, tokens: int, b: int, rows: int | None = None
) -> int:
    """Return bytes of one layer's experts in a forward pass, above weights and hidden states.

    Counted from the code: which tensors the function still refers to at its worst line.
    ``benchmarks/experts.py`` compares them with measured peaks. An implementation that is not
    named here, "auto" too, is taken for transformers' own choice, grouped_mm.

    Args:
        b: bytes of the computation's dtype.
        rows: of the busiest expert; None: all tokens go there.
    """
    hidden, width, pairs = shape.hidden, shape.width, tokens * shape.top_k
    rows = tokens if rows is None else rows
    biased = shape.biased_experts
    if implementation == "batched_mm":  # three matrices of every pair, and its activations
        return pairs * (3 * hidden * width + hidden + 3 * width) * b
    # Gate, activation and biases of gpt-oss are separate tensors; the others' are fewer.
    gate = hidden + (9 if biased else 4) * width
    after = (5 if biased else 4) * hidden
    if implementation == "eager":  # a one-hot mask of int64, and one expert at a time
        return pairs * (shape.experts + 1) * 8 + (rows * max(gate, after) + tokens * hidden) * b
    if implementation == "bounded":  # order of the pairs, one expert's rows, and the output
        rows = min(rows, EXPERT_ROWS)
        work = max(7 * width, 2 * hidden + 4 * width) if biased else 2 * (hidden + width)
        return 32 * pairs + (rows * max(work, 4 * width) + tokens * hidden) * b
    return pairs * max(gate, after) * b


def offload_gib(args: Mapping[str, Any]) -> float:
    """Return the GiB of a GPU's weights that vLLM keeps in the host's memory.

    Raises:
        MismatchError: a size that is no number.
    """
    given = args.get("cpu_offload_gb") or 0
    try:
        return float(given)
    except (TypeError, ValueError):
        fault = f"--engine-arg cpu_offload_gb={given}: not a number of GiB"
        raise MismatchError(fault, "e.g. --engine-arg cpu_offload_gb=8") from None


def predict_engine(
    shape: SizedModel, spec: EngineSpec, work: Workload, gpu_bytes: int = 80 * GIB
) -> Prediction:
    """Return the peak bytes of the engine on one device, with the KV cache that ``work`` can use.

    vLLM fills whatever ``gpu_memory_utilization`` leaves with KV cache, so that more than this is
    resident; less than this makes it wait, and less than one sequence makes it refuse. Other
    engines are taken to work alike.

    Weights that ``cpu_offload_gb`` keeps in the host's memory are not counted.

    Args:
        gpu_bytes: memory of one GPU, which sets vLLM's default batch sizes; 0: it runs on a CPU.
    """
    own = spec.engine == "transformers"  # one device, MXFP4 dequantised
    packed = not own and spec.weights in (AS_STORED, "mxfp4")
    b, args, split = BYTES[spec.dtype], dict(spec.args), 1 if own else spec.tensor_parallel_size
    batched, at_once = (16384, 1024) if gpu_bytes >= LARGE_BYTES else (8192, 256)
    if not gpu_bytes:  # mismatch switches chunked prefill off there
        batched = max(batched, spec.max_model_len or work.longest)
    batched = int(args.get("max_num_batched_tokens") or batched)
    at_once = int(args.get("max_num_seqs") or (TRANSFORMERS_BATCH if own else at_once))
    running = min(at_once, work.sequences)
    kv_size = 1 if str(args.get("kv_cache_dtype", "auto")).startswith("fp8") else b
    # A KV head is never cut, and MLA's shared vector is on every rank.
    share = 1 if shape.latent else max(1, shape.kv_heads // split) / max(1, shape.kv_heads)
    each = int(shape.kv_elements(spec.max_model_len or work.longest) * kv_size * share)
    if own:  # no window; while the cache grows, one layer's is copied at a time
        token = shape.kv_heads * (shape.head_dim + shape.value_dim) * b
        each = token * work.longest * (shape.layers + 1)
    weights = int(shape.stored_bytes(b, keeps_packed=packed) / split)
    weights -= int(offload_gib(args) * GIB) if gpu_bytes else 0
    stays = {
        "weights": max(0, weights),
        "KV cache": CPU_KV_BYTES if not gpu_bytes and not own else running * each,
    }
    # Compiled kernels keep two states of the residual stream next to the widest intermediate.
    width = max(3 * shape.width, 2 * shape.hidden + shape.q_width)
    rows = batched * (shape.top_k or 1)
    states = (rows * width // split + 2 * batched * shape.hidden) * b
    logit = shape.vocab * (b + 8)  # in the model's dtype, and in float32 twice
    moments = {
        "a full batch": stays | {"activations": states},
        "sampling": stays | {"logits": running * logit},
    }
    if spec.prefill:
        chunked = gpu_bytes and not own
        scored = min(batched, PROMPT_CHUNK if chunked else work.longest)
        moments["prefill rescoring"] = stays | {"logits of the prefill": scored * logit}
    return Prediction(moments)
