"""Do both sides hold the same weights? Digests of tensors as loaded, and of their files.

An engine fuses, transposes, shards and pads what a trainer keeps apart, so a digest must not care
about order or grouping. Ours is a sum over elements: fused tensors have the sum of the digests of
their parts, shards add up to the whole, and padding with +0.0 adds nothing.

Every value is first rounded to bfloat16 and then read as its bit pattern: exact for checkpoints in
bf16 however they are held (bf16 or fp32), and for fp32 checkpoints the same rounding on both sides.
A tensor held in fp16 has already lost bits that bf16 keeps: see :func:`comparable`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Digest = tuple[int, int, int]
ZERO: Digest = (0, 0, 0)
CHUNK = 1 << 22  # elements per step: bounds the extra memory to about 100 MB
PATTERNS = 1 << 16
SOURCE_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py")


def digest_tensor(tensor: torch.Tensor) -> Digest:
    """Digest of a tensor of any shape and floating dtype, on any device.

    Returns:
        Three sums over all elements x (bf16 bit patterns, 16 bits, signed), in wrapping int64:
        of x, of x², and of a nonlinear mix h(x) with h(0) = 0. Equal multisets of values have
        equal digests; a swapped, missing or altered value changes at least one of the sums.
    """
    import torch

    counts = torch.zeros(PATTERNS, dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        bits = flat[start : start + CHUNK].to(torch.bfloat16).view(torch.int16)
        counts += torch.bincount(bits.to(torch.int32) + PATTERNS // 2, minlength=PATTERNS)
    # At most 65,536 different values exist: counting them is cheaper than hashing every element.
    sums = [int((counts.cpu() * column).sum()) for column in _columns()]
    return sums[0], sums[1], sums[2]


@lru_cache(1)
def _columns() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    # vLLM loads weights under a default device: these are added up on the CPU, whatever that is.
    x = torch.arange(PATTERNS, dtype=torch.int64, device="cpu") - PATTERNS // 2
    mixed = (x & 0xFFFF) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * 0x3F58476D1CE4E5B9
    return x, x * x, mixed ^ ((mixed >> 32) & 0xFFFFFFFF)


def combine(digests: Iterable[Digest]) -> Digest:
    """Digest of the tensors together: the wrapping sums of their digests."""
    totals = [0, 0, 0]
    for digest in digests:
        totals = [_wrap(total + part) for total, part in zip(totals, digest, strict=True)]
    return totals[0], totals[1], totals[2]


def _wrap(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def comparable(held: str) -> bool:
    """Whether digests of tensors held in this dtype ("bf16", "fp16", "fp32") can be compared."""
    return held != "fp16"


def source_hashes(model_dir: str | Path) -> dict[str, str]:
    """sha256 of every file of a model directory that decides what is computed, by file name.

    Files in the hub's cache are links to blobs that are named by their sha256 where they are large;
    those names are taken as the hash. A checkpoint that was derived from another one here
    (mismatch/models/derived.py) has that one's hashes: it is where both sides began.
    """
    root = Path(model_dir)
    record = root / "derived.json"
    if record.is_file():
        recorded: dict[str, str] = json.loads(record.read_text("utf-8"))["source_files"]
        return recorded
    paths = {path for pattern in SOURCE_FILES for path in root.glob(pattern) if path.is_file()}
    return {path.name: _sha256(path) for path in sorted(paths)}


def _sha256(path: Path) -> str:
    blob = path.resolve()
    if path.is_symlink() and blob.parent.name == "blobs" and len(blob.name) == 64:
        return blob.name
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
