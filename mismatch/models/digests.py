"""Do both sides hold the same weights? Digests of tensors as loaded, and of their files.

An engine fuses, shards and pads what a trainer keeps apart, so digests add up: shards to the whole,
and padding with +0.0 adds nothing. Three sums ignore order; one more for each axis weighs every
element by its index there, so that swapped experts, permuted rows or a transposed matrix show. Who
does not know the order of an axis (a rank's slice, experts that were packed) leaves these out.

Every value is first rounded to bfloat16 and then read as its bit pattern: exact for checkpoints in
bf16 however they are held (bf16 or fp32), and for fp32 checkpoints the same rounding on both sides.
A tensor held in fp16 has already lost bits that bf16 keeps: see :func:`comparable`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch.codec import from_json
from mismatch.errors import MismatchError
from mismatch.run.files import parse_json, read_regular
from mismatch.run.manifest import WRONG

if TYPE_CHECKING:
    import torch

Digest = tuple[int, ...]  # three sums, then up to three of axes
ZERO: Digest = (0, 0, 0, 0, 0, 0)
UNORDERED, OF_EXPERTS = 3, 4  # sums of those that know no order, or that of the first axis alone
CHUNK = 1 << 20  # elements per step: what is made of them stays in the cache
PATTERNS = 1 << 16
RECORD = "derived.json"
SOURCE_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py")


def digest_tensor(tensor: torch.Tensor, start: Sequence[int] = ()) -> Digest:
    """Digest of a tensor of any shape and floating dtype, on any device.

    Args:
        start: index in the whole tensor of this part's first element, per axis; 0 by default.

    Returns:
        Six sums over all elements x (bf16 bit patterns, 16 bits, signed), in wrapping int64: of x,
        of x², of a nonlinear mix h(x) with h(0) = 0, and of h(x) times a mix of the index on the
        first, the second and all further axes (0 where there is none). Equal multisets of values
        have the same first three; a swapped, missing or altered value changes at least one of
        these, and a moved one changes the others.
    """
    import torch

    whole = tensor.detach()
    whole = whole.flatten(2) if whole.dim() > 3 else whole
    axes = whole.dim()
    whole = whole.reshape(*whole.shape, *(1,) * (3 - axes))
    offset = [*start[:3], 0, 0, 0][:3]
    table = _table().to(whole.device)
    sums = torch.zeros(6, dtype=torch.int64, device=whole.device)
    for rows, columns in _tiles(whole.shape):
        bits = whole[rows, columns].to(torch.bfloat16).contiguous().view(torch.int16)
        x = bits.to(torch.int32)
        mixed = table.index_select(0, (x + PATTERNS // 2).flatten()).view(x.shape)
        lines = mixed.sum(2)  # [rows, columns]: two axes and the whole are sums of it
        along = lines.sum(1), lines.sum(0), mixed.sum((0, 1)) if axes > 2 else None
        sums[:3] += torch.stack((bits.sum(), (x * x).sum(), along[0].sum()))
        first = offset[0] + (rows.start or 0), offset[1] + (columns.start or 0), offset[2]
        for axis, values in enumerate(along[:axes]):
            if values is not None:
                sums[3 + axis] += (values * _of_index(values, axis, first[axis])).sum()
    return tuple(int(value) for value in sums.cpu())


def _tiles(shape: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Slices of the first two axes of about CHUNK elements."""
    if 0 in shape:
        return
    wide = min(max(CHUNK // shape[2], 1), shape[1])
    high = max(CHUNK // (wide * shape[2]), 1)
    for row in range(0, shape[0], high):
        for column in range(0, shape[1], wide):
            yield slice(row, row + high), slice(column, column + wide)


def _of_index(values: torch.Tensor, axis: int, first: int) -> torch.Tensor:
    """Return a mix of the indices of values along an axis, from ``first``; each axis differs."""
    import torch

    index = torch.arange(first, first + len(values), dtype=torch.int64, device=values.device)
    return _scrambled((index + 1) * 8 + axis)


def _scrambled(x: torch.Tensor) -> torch.Tensor:
    """Return a nonlinear mix of int64 numbers; 0 stays 0."""
    mixed = x * 0x1E3779B97F4A7C15
    mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * 0x3F58476D1CE4E5B9
    return mixed ^ ((mixed >> 32) & 0xFFFFFFFF)


@lru_cache(1)
def _table() -> torch.Tensor:
    """h(x) of every bit pattern."""
    import torch

    # vLLM loads weights under a default device: this is made on the CPU, whatever that is.
    x = torch.arange(PATTERNS, dtype=torch.int64, device="cpu") - PATTERNS // 2
    return _scrambled(x & 0xFFFF)


def combine(digests: Iterable[Digest]) -> Digest:
    """Digest of the tensors together: the wrapping sums of their digests, as far as all go."""
    sums = (sum(column) for column in zip(*digests, strict=False))
    return tuple((total + (1 << 63)) % (1 << 64) - (1 << 63) for total in sums)


def comparable(held: str) -> bool:
    """Whether digests of tensors held in this dtype ("bf16", "fp16", "fp32") can be compared."""
    return held != "fp16"


@dataclass(frozen=True)
class Derived:
    """What a checkpoint was made of that was derived from another: its ``derived.json``.

    Attributes:
        source_files: sha256 of the other's files, by name.
        sizes: bytes of each file as it was written.
        layers: how many it holds, and of how many; None: all.
        of: how the other was quantised; None: not at all.
    """

    form: str
    source_files: dict[str, str]
    sizes: dict[str, int]
    layers: tuple[int, int] | None
    of: str | None


def record_of(directory: Path) -> Derived | None:
    """Return what a checkpoint was derived from; None: from no other.

    Raises:
        MismatchError: its record cannot be read.
    """
    path = directory / RECORD
    if not path.is_file():
        return None
    try:
        return from_json(Derived, parse_json(read_regular(path)))
    except (OSError, *WRONG) as error:
        fault = f"{path} cannot be read: {error}"
        raise MismatchError(fault, "fetch or make the checkpoint again") from error


def source_hashes(model_dir: str | Path) -> dict[str, str]:
    """sha256 of every file of a model directory that decides what is computed, by file name.

    Files in the hub's cache are links to blobs that are named by their sha256 where they are large;
    those names are taken as the hash. A checkpoint that was derived from another here
    (mismatch/models/derived.py) has that one's hashes: it is where both sides began.
    """
    root = Path(model_dir)
    if derived := record_of(root):
        return derived.source_files
    paths = {path for pattern in SOURCE_FILES for path in root.glob(pattern) if path.is_file()}
    return {path.name: file_sha256(path) for path in sorted(paths)}


def file_sha256(path: Path) -> str:
    """Return sha256 of a file, as hexadecimal digits; of the hub's cache by the blob's name."""
    blob = path.resolve()
    if path.is_symlink() and blob.parent.name == "blobs" and len(blob.name) == 64:
        return blob.name
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
