"""Checkpoints whose matrices are quantised, to numbers; and matrices, to what a format can hold.

Read are FP8 (per tensor, per channel, blocks; DeepSeek's and compressed-tensors'), GPTQ, AWQ, and
compressed-tensors' packed integers and NVFP4. A matrix is [..., out, in] here; groups lie along
``in``. Formats as of vLLM 0.32 and compressed-tensors 0.17, whose packing the tests take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mismatch.errors import MismatchError
from mismatch.models.mxfp4 import VALUES, nearest

# What a module holds in addition to its weight, or in place of it. Scales of activations and of
# the KV cache are not the weights'.
OF_WEIGHTS = {"scale_inv", "scale", "packed", "shape", "global_scale", "zero_point", "g_idx"}
PARTS = {f"weight_{part}" for part in OF_WEIGHTS} | {"qweight", "qzeros", "scales", "g_idx"}
PARTS |= {"input_scale", "input_global_scale", "activation_scale", "k_scale", "v_scale"}
FP8_MOST, NVFP4_MOST = 448.0, 6.0
BLOCK, INT4_GROUP, NVFP4_GROUP = 128, 128, 16
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the n-th of eight values of an int32 lies

Parts = dict[str, torch.Tensor]


def dequantise(parts: Parts, config: dict[str, Any]) -> torch.Tensor:
    """Return the matrix [out, in] of a module, in bf16.

    Args:
        parts: its tensors by the last part of their names.
        config: the checkpoint's ``quantization_config``.

    Raises:
        MismatchError: they are of no format that is read.
    """
    if "qweight" in parts and config.get("quant_method") == "awq":
        matrix = _awq(parts)
    elif "qweight" in parts:
        matrix = _gptq(parts, v1=config.get("checkpoint_format", "gptq") == "gptq")
    elif "weight_global_scale" in parts:
        matrix = _nvfp4(parts)
    elif "weight_packed" in parts:
        matrix = _packed(parts)
    elif "weight" in parts and parts["weight"].ndim == 2:
        matrix = _scaled(parts["weight"].float(), parts)
    else:
        fault = f"quantised weights of an unknown format: {', '.join(sorted(parts))}"
        raise MismatchError(fault, "give the unquantised checkpoint")
    return matrix.bfloat16()


def _scaled(values: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Multiply by scales: one, one a row, one a group of a row, or one a block."""
    square = "weight_scale_inv" in parts
    scale = parts["weight_scale_inv" if square else "weight_scale"].float()
    if scale.numel() == 1:
        return values * scale.reshape(())
    scale = scale[:, None] if scale.ndim == 1 else scale
    rows, columns = values.shape
    high, wide = -(-rows // scale.shape[0]), -(-columns // scale.shape[1])
    if square:
        high = wide = max(high, wide)  # square blocks, of which the last may be cut
    whole = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    return values * whole[:rows, :columns]


def _integers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 [..., n] to [..., n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    values = (packed[..., None].to(torch.int64) >> shifts) & (2**bits - 1)
    flat: torch.Tensor = values.flatten(-2)
    return flat


def _gptq(parts: Parts, v1: bool) -> torch.Tensor:
    """Unpack [in / 8, out] of 4-bit values; v1 stores each zero point less one."""
    scales, groups = parts["scales"].float(), parts["g_idx"].long()
    bits = 32 * parts["qweight"].shape[0] // len(groups)
    zeros = (_integers(parts["qzeros"], bits) + v1) & (2**bits - 1)
    values = _integers(parts["qweight"].t(), bits)[:, : len(groups)]  # [out, in]
    matrix: torch.Tensor = (values - zeros.t()[:, groups]) * scales.t()[:, groups]
    return matrix


def _awq(parts: Parts) -> torch.Tensor:
    """Unpack [in, out / 8] of 4-bit values in AWQ's order."""
    order = torch.tensor(AWQ_ORDER)

    def unpacked(packed: torch.Tensor) -> torch.Tensor:
        eights: torch.Tensor = _integers(packed, 4).reshape(*packed.shape, 8)
        return eights[..., order].flatten(-2)

    values, zeros, scales = unpacked(parts["qweight"]), unpacked(parts["qzeros"]), parts["scales"]
    per = len(values) // len(scales)
    zeros, scales = zeros.repeat_interleave(per, 0), scales.float().repeat_interleave(per, 0)
    matrix: torch.Tensor = ((values - zeros) * scales).t()
    return matrix


def _packed(parts: Parts) -> torch.Tensor:
    """Unpack compressed-tensors' integers, stored without a sign."""
    rows, columns = parts["weight_shape"].tolist()
    bits = 32 * parts["weight_packed"].shape[1] // columns
    values = _integers(parts["weight_packed"], bits)[:rows, :columns]
    zeros: torch.Tensor | int = 2 ** (bits - 1)
    if "weight_zero_point" in parts:
        zeros = _integers(parts["weight_zero_point"].t(), bits).t()[:rows]
        zeros = zeros.repeat_interleave(columns // zeros.shape[1], 1)
    return _scaled((values - zeros).float(), parts)


def _nvfp4(parts: Parts) -> torch.Tensor:
    """Unpack 4-bit floats, two to a byte; groups of 16 share an FP8 scale."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    packed = parts["weight_packed"].int()
    values = table[torch.stack([packed & 15, packed >> 4], -1).flatten(-2)]
    scale = parts["weight_scale"].float() / parts["weight_global_scale"].float()
    return _scaled(values, {"weight_scale": scale})


# ---------------------------------------------------------------- rounding


def fp8_rounded(matrix: torch.Tensor) -> torch.Tensor:
    """Round to FP8 (E4M3), a float32 scale for each 128 x 128 block, as DeepSeek-V3's."""
    rows, columns = matrix.shape[-2:]
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK)
    whole = torch.nn.functional.pad(matrix.float(), pad)
    high, wide = whole.shape[-2] // BLOCK, whole.shape[-1] // BLOCK
    blocks = whole.reshape(*whole.shape[:-2], high, BLOCK, wide, BLOCK)
    scale = (blocks.abs().amax((-3, -1), keepdim=True) / FP8_MOST).clamp(min=1e-30)
    held = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return held.reshape(whole.shape)[..., :rows, :columns].to(matrix.dtype)


def int4_rounded(matrix: torch.Tensor) -> torch.Tensor:
    """Round to 16 even steps from the least to the largest of each 128 inputs of a row.

    GPTQ and AWQ store values of this kind, and choose them better than by rounding to nearest.
    """
    parts = []
    for group in torch.split(matrix.float(), INT4_GROUP, -1):
        low = group.amin(-1, keepdim=True).clamp(max=0.0)
        high = group.amax(-1, keepdim=True).clamp(min=0.0)
        step = ((high - low) / 15).clamp(min=1e-30)
        zero = (-low / step).round()
        parts.append((((group / step).round() + zero).clamp(0, 15) - zero) * step)
    return torch.cat(parts, -1).to(matrix.dtype)


def nvfp4_rounded(matrix: torch.Tensor) -> torch.Tensor:
    """Round to NVFP4: E2M1 values, an E4M3 scale for each 16 inputs, a float32 for the matrix.

    Raises:
        MismatchError: 16 does not divide the inputs.
    """
    if matrix.shape[-1] % NVFP4_GROUP:
        fault = f"NVFP4: {matrix.shape[-1]} inputs are no multiple of {NVFP4_GROUP}"
        raise MismatchError(fault, "leave these weights as they are stored")
    groups = matrix.float().reshape(*matrix.shape[:-1], -1, NVFP4_GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    whole = FP8_MOST * NVFP4_MOST / largest.amax((-3, -2), keepdim=True).clamp(min=1e-30)
    scale = (largest * whole / NVFP4_MOST).to(torch.float8_e4m3fn).float() / whole
    held = groups / scale.clamp(min=1e-30)
    values = torch.tensor(VALUES)[nearest(held.abs().clamp(max=NVFP4_MOST)).long()]
    rounded: torch.Tensor = (values.copysign(held) * scale).reshape(matrix.shape)
    return rounded.to(matrix.dtype)


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8-rounded": fp8_rounded,
    "int4-rounded": int4_rounded,
    "nvfp4-rounded": nvfp4_rounded,
}
