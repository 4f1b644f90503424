"""How much memory the engine needs on one GPU (or on a CPU); see mismatch.doctor.memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch.doctor.memory import BYTES, GIB, Moment, Part, Prediction
from mismatch.models.config import MXFP4_BITS, ModelConfig
from mismatch.specs import EngineSpec
from mismatch.types import Sampling

# vLLM 0.32/0.33: vllm/config/cache.py, and vllm/engine/arg_utils.py get_batch_defaults (LLM class).
UTILISATION = 0.92
LARGE_BYTES = 70 * GIB  # from here on larger batches, but on A100s: see batch_class
CPU_KV_BYTES = GIB  # VLLM_CPU_KVCACHE_SPACE as mismatch sets it
PROMPT_CHUNK = 1024  # tokens whose prompt logprobs the GPU model runner takes at a time
TRANSFORMERS_BATCH = 64  # max_num_seqs of mismatch's own engine


@dataclass(frozen=True, slots=True)
class Demand:
    """What the engine has to do: sequences to sample, tokens of the longest with its prompt."""

    sequences: int
    longest: int
    sampling: Sampling = field(default_factory=Sampling)


def predict_engine(
    shape: ModelConfig,
    spec: EngineSpec,
    demand: Demand,
    device: str = "cuda",
    device_bytes: int | None = None,
) -> Prediction:
    """Peak bytes of the engine on one device, with the KV cache that ``demand`` can use.

    vLLM fills whatever ``gpu_memory_utilization`` leaves with KV cache, so that more than this is
    resident; less than this makes it wait, and less than one sequence makes it refuse.

    Args:
        device_bytes: memory of one GPU, which sets vLLM's default batch sizes.
    """
    args: Mapping[str, Any] = dict(spec.args)
    if spec.engine == "transformers":
        return _transformers(shape, spec, demand, args)
    return _vllm(shape, spec, demand, args, device, device_bytes)


def kv_bytes_per_sequence(shape: ModelConfig, tokens: int, dtype_bytes: int, split: int = 1) -> int:
    """Keys and values of one sequence on one of ``split`` devices; KV heads are never cut."""
    share = max(1, shape.kv_heads // split) / shape.kv_heads
    return int(shape.kv_elements(tokens) * dtype_bytes * share)


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
    return (
        int(args.get("max_num_batched_tokens", tokens)),
        int(args.get("max_num_seqs", sequences)),
    )


def _vllm(
    shape: ModelConfig,
    spec: EngineSpec,
    demand: Demand,
    args: Mapping[str, Any],
    device: str,
    device_bytes: int | None,
) -> Prediction:
    b, split = BYTES[spec.dtype], spec.tensor_parallel_size
    batched, at_once = vllm_batch(spec, demand.longest, device, device_bytes)
    running = min(at_once, demand.sequences)
    kv_size = 1 if str(args.get("kv_cache_dtype", "auto")).startswith("fp8") else b
    each = kv_bytes_per_sequence(shape, spec.max_model_len or demand.longest, kv_size, split)
    kv = CPU_KV_BYTES if device == "cpu" else running * each
    weights = Part("weights", weight_bytes(shape, spec, True), "P·b/TP, MXFP4 experts 4.25 bits")
    cache = Part("KV cache", kv, f"2·L·kv·d·b·tokens, {running} sequences at once")
    width = max(3 * shape.width, 2 * shape.hidden + shape.q_width)
    rows = batched * (shape.top_k or 1)
    # Compiled kernels keep two states of the residual stream beside the widest intermediate.
    work = (rows * width // split + 2 * batched * shape.hidden) * b
    logits = running * shape.vocab * (b + 8)
    moments = [
        Moment("a full batch", (weights, cache, Part("activations", work, "tokens·K·3I·b/TP"))),
        Moment(
            "sampling",
            (weights, cache, Part("logits", logits, "sequences·V·(b + 8), float32 twice")),
        ),
    ]
    if spec.prefill:
        scored = min(demand.longest, batched, batched if device == "cpu" else PROMPT_CHUNK)
        size = scored * shape.vocab * (b + 8)
        part = Part("logits of the prefill", size, f"tokens·V·(b + 8), {scored} tokens")
        moments.append(Moment("prefill rescoring", (weights, cache, part)))
    return Prediction("engine", tuple(moments))


def _transformers(
    shape: ModelConfig, spec: EngineSpec, demand: Demand, args: Mapping[str, Any]
) -> Prediction:
    b = BYTES[spec.dtype]
    running = min(int(args.get("max_num_seqs", TRANSFORMERS_BATCH)), demand.sequences)
    weights = Part("weights", weight_bytes(shape, spec, False), "P·b")
    # Every layer keeps all tokens while the cache grows; growing copies one layer's at a time.
    elements = 2 * shape.kv_width * demand.longest * running
    cache = Part("KV cache", elements * b * (shape.layers + 1), "2·(L + 1)·kv·d·b·tokens")
    logits = running * shape.vocab * (b + 12)
    scored = demand.longest * shape.vocab * (b + 8)
    return Prediction(
        "engine",
        (
            Moment("sampling", (weights, cache, Part("logits", logits, "sequences·V·(b + 12)"))),
            Moment(
                "prefill rescoring",
                (weights, Part("logits of the prefill", scored, "tokens·V·(b + 8)")),
            ),
        ),
    )
