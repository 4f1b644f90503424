"""The transformers engine and the FSDP2 trainer on one rank, equal but for one planted change.

``python -m tests.exact_pair FOLDER DTYPE`` records both sides of a random gpt-oss on the same
tokens as ``mismatch locate --exact`` does, as they are, then once for each change on each side, and
prints what is the first unequal module in prefill: a JSON object {"SIDE CHANGE": [module, layer,
operation]}, null where every module is equal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatch.engines.transformers.engine import TransformersEngine
from mismatch.features.locate.bits import compare
from mismatch.features.locate.engine_side import record_transformers
from mismatch.features.locate.plan import passes_of, side_folder
from mismatch.features.locate.reference import Forward
from mismatch.specs import EngineSpec, Sampling, TrainSpec
from mismatch.training.distributed import World
from tests.checkpoints import make, rollout

ENGINE, TRAINER = "transformers:prefill", "fsdp"
Plant = Callable[[Any], AbstractContextManager[None]]


@contextmanager
def swapped(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute within the block."""
    own = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, own)


def norm_in_bf16(model: Any) -> AbstractContextManager[None]:
    """The second layer's input norm computes in bf16 throughout."""
    norm = model.model.layers[1].input_layernorm

    def forward(x: torch.Tensor) -> torch.Tensor:
        low = x.bfloat16()
        scale = torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return (norm.weight.bfloat16() * (low * scale)).to(x.dtype)

    return swapped(norm, "forward", forward)


def rotary_in_bf16(model: Any) -> AbstractContextManager[None]:
    """The table of rotations is made of frequencies in bf16."""
    rope = model.model.rotary_emb
    return swapped(rope, "inv_freq", rope.inv_freq.bfloat16().float())


def other_attention(model: Any) -> AbstractContextManager[None]:
    """Attention is computed eagerly."""
    return swapped(model.config, "_attn_implementation_internal", "eager")


def expert_order(model: Any) -> AbstractContextManager[None]:
    """The second layer adds its experts in the opposite order."""
    experts = model.model.layers[1].mlp.experts

    def forward(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert in range(experts.num_experts - 1, -1, -1):
            rows, place = torch.where(indices == expert)
            if not len(rows):
                continue
            up = x[rows] @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
            out = experts._apply_gate(up) @ experts.down_proj[expert]
            out = (out + experts.down_proj_bias[expert]) * weights[rows, place, None]
            total.index_add_(0, rows, out.to(x.dtype))
        return total

    return swapped(experts, "forward", forward)


@contextmanager
def split_log_softmax(model: Any) -> Iterator[None]:
    """The sum below the log-probabilities is made of sums over pieces of the vocabulary."""

    def split(logits: torch.Tensor, dim: int = -1, out: Any = None) -> torch.Tensor:
        pieces = torch.stack([part.logsumexp(-1) for part in logits.split(37, dim=-1)])
        result = logits - pieces.logsumexp(0)[..., None]
        return result if out is None else out.copy_(result)

    with swapped(torch, "log_softmax", split), swapped(torch.Tensor, "log_softmax", split):
        yield


PLANTS: dict[str, Plant] = {
    "norm": norm_in_bf16,
    "rotary": rotary_in_bf16,
    "attention": other_attention,
    "experts": expert_order,
    "log-softmax": split_log_softmax,
}
EXPECTED = {
    "nothing": None,
    "norm": ["input_norm", 1, "norm"],
    "rotary": ["rope_q", 0, "rotary"],
    "attention": ["attention", 0, "attention"],
    "experts": ["mlp", 1, "experts"],
    "log-softmax": ["logprobs", None, "log-softmax"],
}


def found(folder: Path, dtype: Any) -> dict[str, Any]:
    """Record every case and return its first unequal module."""
    path = str(make("gpt_oss", folder / "model", num_experts_per_tok=4))
    tokens = rollout(((5, 12), (5, 30), (6, 9)))
    sequences = [ids.tolist() for ids in tokens.sequences()]
    masks = np.split(tokens.action_mask, tokens.offsets[1:-1])
    starts = [int(np.flatnonzero(mask)[0]) for mask in masks]
    args = (("attention", "sink-sdpa"), ("experts_implementation", "eager"))
    engine_spec = EngineSpec(engine="transformers", model=path, dtype=dtype, args=args)
    train = TrainSpec(model=path, dtype=dtype, attention="sink-sdpa", experts="eager")
    world, answers = World.start(), {}
    with TransformersEngine(engine_spec, Sampling(), 64) as engine:
        forward = Forward(world, passes_of(train, set())[0], tokens)
        trained = forward.loaded.scorer.model

        def record_engine(plant: AbstractContextManager[None]) -> None:
            place = side_folder(folder, ENGINE)
            with plant:
                scores = record_transformers(engine, sequences, starts, 1.0, place, head=True)
            for number, (values, mask, start) in enumerate(zip(scores, masks, starts, strict=True)):
                np.save(place / f"{number}.npy", np.asarray(values)[mask[start:]])

        def record_trainer(plant: AbstractContextManager[None]) -> None:
            with plant:
                for number in range(tokens.n_sequences):
                    forward.record(side_folder(folder, TRAINER), number, head=True)

        def first() -> Any:
            unequal = compare(folder, "prefill", ENGINE, TRAINER, starts).first
            return unequal and [unequal.site, unequal.layer, unequal.operation]

        record_engine(nullcontext())
        record_trainer(nullcontext())
        answers["both nothing"] = first()
        for name, plant in PLANTS.items():
            record_engine(plant(engine.model))
            answers[f"engine {name}"] = first()
        record_engine(nullcontext())
        for name, plant in PLANTS.items():
            record_trainer(plant(trained))
            answers[f"trainer {name}"] = first()
    world.close()
    return answers


if __name__ == "__main__":
    print(json.dumps(found(Path(sys.argv[1]), sys.argv[2])))
