"""Compare what two sides recorded by their bits; in the worker, which has torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from mismatch.features.locate.exact import (
    HEAD,
    LOGPROBS,
    Compared,
    Phase,
    SiteBits,
    operation_of,
    order,
)
from mismatch.features.locate.plan import side_folder
from mismatch.features.locate.results import TITLES, Site
from mismatch.specs import DTYPES, TORCH_NAMES

HEAD_BYTES = 64 << 20  # of the logits of one sequence; behind them rows are not compared
SHORT = {getattr(torch, TORCH_NAMES[name]): name for name in DTYPES}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Logits:
    """Keeps the logits of one sequence."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def __call__(self, rows: torch.Tensor) -> None:
        self.parts.append(rows.detach().reshape(-1, rows.shape[-1]).to("cpu", copy=True))

    def whole(self) -> torch.Tensor:
        """Return the rows of all passes, in their order."""
        return torch.cat(self.parts)

    def joined(self) -> dict[str, torch.Tensor]:
        """Return as many rows as are compared, under their key; {} where none were shown."""
        return {HEAD: fitting(self.whole())} if self.parts else {}


def fitting(rows: torch.Tensor) -> torch.Tensor:
    """Return the first rows, as many as ``HEAD_BYTES`` hold."""
    most = max(1, HEAD_BYTES // max(1, rows.shape[-1] * rows.element_size()))
    return rows[:most].contiguous()


@contextmanager
def logits_of(scorer: Any) -> Iterator[Logits]:
    """Keep what a trainer's head gives within the block, as its log-softmax takes it."""
    kept = Logits()
    scorer.show_logits = kept
    try:
        yield kept
    finally:
        scorer.show_logits = None


@dataclass
class Count:
    """What was seen of one site so far, see :class:`SiteBits`."""

    tokens: int = 0
    unequal_tokens: int = 0
    values: int = 0
    unequal_values: int = 0
    ulps: int = 0
    dtypes: tuple[str, str] = ("", "")
    first: tuple[int | None, int | None] = field(default=(None, None))

    def add(self, sequence: int, starts: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Count one sequence, [tokens, features] of both sides, the common tokens alone.

        Equal are values, exact in the wider dtype; two that are no numbers are equal.

        Args:
            starts: position of the first token.
        """
        rows = min(len(left), len(right))
        self.dtypes = _short(left.dtype), _short(right.dtype)
        wide = torch.promote_types(left.dtype, right.dtype)
        a, b = left[:rows].to(wide).contiguous(), right[:rows].to(wide).contiguous()
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        off = unequal.any(-1)
        self.tokens += rows
        self.values += a.numel()
        self.unequal_tokens += int(off.sum())
        self.unequal_values += int(unequal.sum())
        if not off.any():
            return
        if self.first[0] is None:
            self.first = sequence, starts + int(off.nonzero()[0])
        apart = (_ordered(a) - _ordered(b)).abs()[unequal & a.isfinite() & b.isfinite()]
        self.ulps = max(self.ulps, int(apart.max()) if len(apart) else 0)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Return whole numbers that are ordered as the floats are, neighbours 1 apart."""
    width = values.element_size()
    bits = values.view(INTEGERS[width]).long()
    return torch.where(bits < 0, -(2 ** (8 * width - 1)) - bits, bits)


def _short(dtype: torch.dtype) -> str:
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def compare(
    directory: Path, phase: Phase, engine: str, trainer: str, starts: list[int]
) -> Compared:
    """Compare two sides' recordings of the same sequences.

    Args:
        starts: position of the first action token of each sequence.
    """
    counts: dict[Site, Count] = {}
    seen: set[Site] = set()
    folders = [side_folder(directory, name) for name in (engine, trainer)]
    tokens = 0
    for number, start in enumerate(starts):
        left, right = (load_file(folder / f"{number}.safetensors") for folder in folders)
        ends = [np.load(folder / f"{number}.npy").astype(np.float32) for folder in folders]
        tokens += len(ends[0])
        for side, end in zip((left, right), ends, strict=True):
            side[LOGPROBS] = torch.from_numpy(end)[:, None]
        seen |= {Site.of(key) for key in (*left, *right)}
        for key in left.keys() & right.keys():
            a, b = left[key], right[key]
            if a.shape[-1] == b.shape[-1]:
                at = start if key in (HEAD, LOGPROBS) else 0
                counts.setdefault(Site.of(key), Count()).add(number, at, a, b)
    routers = {site.layer for site in seen if site.name == "router"}
    sites = tuple(
        SiteBits(
            site.layer, site.name, operation_of(site, routers), count.tokens, count.unequal_tokens,
            count.values, count.unequal_values, count.ulps, count.dtypes, *count.first,
        )
        for site, count in sorted(counts.items(), key=lambda pair: order(pair[0]))
    )  # fmt: skip
    hidden = dict.fromkeys(
        TITLES.get(site.name, site.name) for site in sorted(seen - counts.keys(), key=order)
    )
    return Compared(phase, engine, trainer, sites, tuple(hidden), tokens)
