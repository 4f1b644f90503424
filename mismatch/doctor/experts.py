"""Memory of one layer's experts by implementation, and what each would need in a run.

Counted from the code: which tensors the function still refers to at its worst line. r is the rows
of the busiest expert, N at most: what routing will do is not known beforehand.
"""

from __future__ import annotations

from mismatch.models.config import ModelConfig
from mismatch.training.packing import EXPERT_ROWS

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm", "bounded")


def forward_bytes(
    shape: ModelConfig, implementation: str, tokens: int, b: int, rows: int | None = None
) -> int:
    """Bytes of a forward pass without gradients, above weights and hidden states, output included.

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
    saved = 2 * hidden + (8 if biased else 4) * width
    if implementation == "batched_mm":
        # Of the copies and their gradients the larger half; the gradient of all experts comes last.
        return max(2 * pairs, 4 * pairs - 2 * shape.experts) * matrix * b
    if implementation == "eager":
        # Every expert's gradient is a zero-filled one of all experts, added to the sum so far.
        zeros = 2 * (shape.experts + 1) * matrix
        return (zeros + pairs * saved + 2 * tokens * hidden) * b
    if implementation == "bounded":
        rows = min(tokens if rows is None else rows, EXPERT_ROWS)
        work = 4 * hidden + (14 if biased else 8) * width
        return 32 * pairs + (rows * work + 2 * tokens * hidden + 2 * matrix) * b
    return (pairs * (3 * hidden + 2 * width) + 2 * matrix) * b
