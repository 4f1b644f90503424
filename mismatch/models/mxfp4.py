"""MXFP4, the format in which gpt-oss is published, to numbers and back: one expert at a time.

OCP Microscaling Formats 1.0: 4-bit values (E2M1), two to a byte, the low half first; 32 of them
share an 8-bit exponent (E8M0). transformers reads it too, but works on a whole layer at once with
several copies in wider types, and in bfloat16 only, which a float32 trainer would cast again.
"""

from __future__ import annotations

import torch

from mismatch.errors import MismatchError

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign, the fourth bit
BIAS = 127  # of E8M0
BLOCK = 32  # values that share an exponent
LARGEST_EXPONENT = 2  # of E2M1: its largest value is 1.5 * 2²


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[E, out, in / 32, 16] bytes and [E, out, in / 32] exponents to [E, in, out] in ``dtype``.

    Exact in bfloat16 and float32: three significant bits and a power of two. In float16, what lies
    outside its range becomes 0 or infinite, as in any cast.
    """
    experts, outputs, groups, half = blocks.shape
    exact = torch.float32 if dtype == torch.float16 else dtype
    table = torch.tensor(
        [*VALUES, *(-value for value in VALUES)], dtype=exact, device=blocks.device
    )
    low, high = table.repeat(16), table.repeat_interleave(16)  # of every byte
    out = blocks.new_empty(experts, groups, half, 2, outputs, dtype=dtype)
    for expert in range(experts):
        # Transposing bytes moves a quarter or an eighth of what transposing values would.
        bytes_ = blocks[expert].reshape(outputs, groups * half).t().flatten().int()
        factors = torch.exp2(scales[expert].float() - BIAS).to(exact).t().contiguous()[:, None]
        for place, values in enumerate((low, high)):
            chosen = values.index_select(0, bytes_).view(groups, half, outputs)
            torch.mul(chosen, factors, out=out[expert, :, :, place])
    return out.view(experts, groups * half * 2, outputs)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., in] to [..., in / 32, 16] bytes and [..., in / 32] exponents; the inverse's other way.

    The shared exponent is that of the block's largest magnitude, less the 2 of E2M1's own largest
    (section 6.3 of the specification); values round to nearest, ties to even, and saturate at 6.

    Raises:
        MismatchError: NaN or infinite values, or a last dimension that 32 does not divide.
    """
    if values.shape[-1] % BLOCK:
        fault = f"MXFP4: {values.shape[-1]} inputs are no multiple of {BLOCK}"
        raise MismatchError(fault, "leave these weights as they are stored")
    grouped = values.float().reshape(*values.shape[:-1], -1, BLOCK)
    largest = grouped.abs().amax(-1)
    if not torch.isfinite(largest).all():
        fault = "MXFP4: the weights hold NaN or infinite values"
        raise MismatchError(fault, "use an undamaged checkpoint")
    # frexp is exact where log2 is not: a power of two must give exactly that exponent.
    exponent = torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT
    exponent = torch.where(largest > 0, exponent, -BIAS).clamp(-BIAS, BIAS)
    scaled = torch.ldexp(grouped, -exponent[..., None])
    codes = nearest(scaled.abs()) | (torch.signbit(scaled).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponent + BIAS).to(torch.uint8)


def nearest(size: torch.Tensor) -> torch.Tensor:
    """Index into ``VALUES`` of the nearest; a tie goes to the even index, whose last bit is 0."""
    table = torch.tensor(VALUES, device=size.device)
    middle = (table[1:] + table[:-1]) / 2
    size = size.contiguous()
    above = torch.bucketize(size, middle, right=True)  # a tie goes up
    down = torch.bucketize(size, middle, right=False)  # a tie goes down
    return torch.where(above % 2 == 0, above, down).to(torch.uint8)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """[E, in, out] weights to the nearest that MXFP4 can hold, same shape and dtype."""
    out = torch.empty_like(values)
    for expert in range(values.shape[0]):
        blocks, scales = quantise(values[expert].t())
        out[expert] = dequantise(blocks[None], scales[None], values.dtype)[0]
    return out
