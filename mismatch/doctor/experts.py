"""Memory of one layer's experts, by implementation (see mismatch.doctor.memory for the letters).

Counted from the code: which tensors the function still refers to at its worst line. r is the rows
of the busiest expert, N at most: what routing will do is not known beforehand.
"""

from __future__ import annotations

from mismatch.doctor.shape import Shape
from mismatch.training.limits import EXPERT_ROWS

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm", "bounded")


def forward_bytes(
    shape: Shape, implementation: str, tokens: int, b: int, rows: int | None = None
) -> int:
    """Bytes of a forward pass without gradients, above weights and hidden states, output included.

    Args:
        b: bytes of the computation's dtype.
        rows: of the busiest expert; None: all tokens go there.
    """
    hidden, width, pairs = shape.hidden, shape.width, tokens * shape.top_k
    rows = tokens if rows is None else rows
    biased = shape.traits.expert_bias
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
    shape: Shape, implementation: str, tokens: int, b: int, rows: int | None = None
) -> int:
    """Bytes of a forward and a backward pass, above weights, their gradient and hidden states."""
    return forward_bytes(shape, implementation, tokens, b, rows)
