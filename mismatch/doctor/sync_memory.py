"""What a probe of the weight sync takes beside the engine, from config.json alone: arithmetic.

The plain trainer holds all weights; updates and digests go tensor by tensor, of which the largest
decides: its values in float32 and the noise of its update, twice four bytes an element.
"""

from __future__ import annotations

from mismatch.doctor.memory import BYTES, Moment, Part, Prediction
from mismatch.models.config import ModelConfig
from mismatch.specs import EngineSpec

UPDATE_BYTES = 8  # of an element: float32, and noise


def predict_sync_probe(shape: ModelConfig, spec: EngineSpec, trainer: bool = True) -> Prediction:
    """Peak bytes beside the engine.

    Args:
        trainer: whether a transformers model scores too.
    """
    dense = shape.hidden * max(shape.width, shape.q_width)
    largest = max(shape.vocab * shape.hidden, shape.expert_matrices * 2 // 3, dense)
    parts = (
        Part("trainer", trainer * shape.parameters * BYTES[spec.dtype], "P·b"),
        Part("largest tensor", largest * UPDATE_BYTES, "max(V·H, 2·E·H·I, H·I)·8"),
    )
    return Prediction("sync-probe", (Moment.of("a push", *parts),))


def disk_bytes(shape: ModelConfig, spec: EngineSpec) -> int:
    """Of one state of the checkpoint, which the path reload and a server need."""
    return shape.parameters * BYTES[spec.dtype]
