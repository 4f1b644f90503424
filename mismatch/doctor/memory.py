"""How much memory a run needs, from config.json and specs alone: arithmetic, no torch, no weights.

A prediction is a list of *moments* (points of a forward pass that can be the highest), each a list
of named parts with its formula. The formulas follow what the code really keeps alive: FSDP2's
buffers, transformers' own forward, and our chunked logprobs. ``benchmarks/memory.py`` compares the
training side with measured peaks.

Letters in formulas: B rows, T tokens of the longest row, N = B·T tokens of the largest micro-batch,
H hidden, I width of an MLP or expert, h heads, d head dimension, E experts, K experts per token,
V vocabulary, L layers, P parameters, W ranks, b bytes of the computation's dtype, m of the sharded
parameters' dtype.
"""

from __future__ import annotations

from mismatch.doctor.forward import Forward
from mismatch.doctor.parts import BYTES, Moment, Part, Prediction, Work
from mismatch.models.config import ModelConfig
from mismatch.specs import TrainSpec

__all__ = ["Moment", "Part", "Prediction", "Work", "predict_trainer"]


def predict_trainer(
    shape: ModelConfig,
    spec: TrainSpec,
    world: int,
    work: Work,
    device: str = "cuda",
    name: str = "fsdp",
) -> Prediction:
    """Peak bytes of one rank of the training world for one pass.

    Args:
        world: number of ranks the parameters are sharded over.
        device: "cuda", or "cpu" (whose gloo collectives copy once more).
    """
    b, m = BYTES[spec.dtype], BYTES[spec.master_dtype]
    forward = Forward(shape, spec, *work.largest_batch(spec), device)
    shard = _shard(shape, world, m)
    root = Part("unsharded embedding and head", shape.root_parameters * b, "(2·V·H + H)·b")
    block = shape.layer_parameters * b
    # FSDP2 keeps a block's all-gather result until the next block has been copied out.
    gathered = Part("all-gather result in flight", block if world > 1 else 0, "P_layer·b")
    unsharded = Part("unsharded layer", block, "P_layer·b")
    head_copy = _head_copy(shape, spec)
    alive = (shard, root, unsharded, gathered, *head_copy)
    saved = forward.saved(shape.layers)
    moments = [
        Moment("gathering the root", (shard, *_gather(shape.root_parameters, root, world, device))),
        Moment(
            "gathering a layer",
            (shard, root, gathered, *_gather(shape.layer_parameters, unsharded, world, device)),
        ),
        Moment("attention", (*alive, *saved, *forward.attention())),
        Moment("experts" if shape.experts else "MLP", (*alive, *saved, *forward.mlp())),
        Moment("logprobs", (shard, root, gathered, *head_copy, *saved, *forward.head(work))),
    ]
    return Prediction(
        name, tuple(Moment(x.name, tuple(p for p in x.parts if p.bytes)) for x in moments)
    )


def _shard(shape: ModelConfig, world: int, m: int) -> Part:
    """Parameters at rest. Experts are cut along E: more ranks than experts share no further."""
    per_rank = -(-shape.experts // world) / shape.experts if shape.experts else 1 / world
    experts = shape.layers * shape.expert_parameters
    count = (shape.parameters - experts) / world + experts * per_rank
    return Part("sharded parameters", int(count * m), "P·m/W")


def _gather(parameters: int, full: Part, world: int, device: str) -> list[Part]:
    """What gathering adds: the result is copied out of one buffer, on gloo through a second one."""
    if world == 1:
        return [full]
    copies = 3 if device == "cpu" else 2
    extra = (copies - 1) * full.bytes
    return [full, Part("all-gather buffers", extra, f"{copies - 1}·(its bytes)")]


def _head_copy(shape: ModelConfig, spec: TrainSpec) -> tuple[Part, ...]:
    if spec.head_dtype is None or spec.head_dtype == spec.dtype:
        return ()
    size = BYTES[spec.head_dtype]
    return (Part("head in its own dtype", shape.vocab * shape.hidden * size, "V·H·b_head"),)
