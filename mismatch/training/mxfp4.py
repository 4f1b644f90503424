"""MXFP4, the format in which gpt-oss is published, back to numbers: one expert at a time.

OCP Microscaling Formats 1.0: 4-bit values (E2M1), two to a byte, the low half first; 32 of them
share an 8-bit exponent (E8M0). transformers reads it too, but works on a whole layer at once with
several copies in wider types, and in bfloat16 only, which a float32 trainer would cast again.
"""

from __future__ import annotations

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign, the fourth bit
BIAS = 127  # of E8M0


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[E, out, in / 32, 16] bytes and [E, out, in / 32] exponents to [E, in, out] in ``dtype``.

    Exact in bfloat16 and float32: three significant bits and a power of two. In float16, what lies
    outside its range becomes 0 or infinite, as in any cast.
    """
    experts, outputs, groups, half = blocks.shape
    inputs = groups * half * 2
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=blocks.device)
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], -1)  # of every byte
    out = blocks.new_empty(experts, inputs, outputs, dtype=dtype)
    for expert in range(experts):
        values = pairs[blocks[expert].int()].view(outputs, groups, 2 * half)
        values *= torch.exp2(scales[expert].float() - BIAS)[..., None]
        out[expert] = values.view(outputs, inputs).t()
    return out
