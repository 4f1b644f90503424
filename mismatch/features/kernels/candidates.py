"""The attention implementations of this machine for a model, and why some cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mismatch.errors import MismatchError
from mismatch.features.kernels.geometry import ModelGeometry
from mismatch.features.kernels.results import Origin
from mismatch.training.attention.resolve import OUR_KERNELS, register_kernels, resolve_for
from mismatch.training.user_kernels import register_attention

PLANTED = "no-sinks"  # audited only where it is named: nobody takes it by accident
PAGED = "serves continuous batching only, with a paged cache"
FLEX = "flex_attention"
NO_BACKWARD = "flex attention has no backward pass on a CPU"
OUR_PREFIX = "mismatch_"  # of the names that we registered


@dataclass(frozen=True, slots=True)
class Candidate:
    """One attention implementation."""

    name: str
    """As in ``--attention NAME``."""
    origin: Origin
    registered: str = ""
    """Its name in transformers' registry; "" where it cannot run."""
    unavailable: str = ""
    """Why it cannot run on this machine; "" where it can."""
    refused: str = ""
    """Why the model does not take it; it can be measured by itself."""
    chosen: bool = False
    """Whether ``--attention auto`` resolves to it."""


def names_here(
    geometry: ModelGeometry, users: Sequence[str] = (), device: str = "cpu"
) -> list[Candidate]:
    """Return every attention implementation, then the user's ``package.module:function[@MASK]``."""
    register_kernels()
    others = [n for n in ALL_ATTENTION_FUNCTIONS.valid_keys() if not n.startswith(OUR_PREFIX)]
    names = dict.fromkeys(["eager", "sdpa", *(OUR_KERNELS if geometry.sinks else ()), *others])
    chosen = resolve_for("auto", geometry.bare, torch.device(device), torch.bfloat16)
    candidates = [_candidate(geometry, name, chosen.implementation, device) for name in names]
    return candidates + [Candidate(text, "yours", register_attention(text)) for text in users]


def _candidate(geometry: ModelGeometry, name: str, chosen: str, device: str) -> Candidate:
    origin: Origin = "ours" if name in OUR_KERNELS else "transformers"
    if name == FLEX and not device.startswith("cuda"):
        return Candidate(name, origin, unavailable=NO_BACKWARD)
    if name.startswith("paged|"):
        return Candidate(name, origin, unavailable=PAGED)
    try:
        resolved = resolve_for(name, geometry.bare).implementation
    except MismatchError as error:
        if "flash" in name:  # for want of a GPU
            return Candidate(name, origin, unavailable=error.message)
        return Candidate(name, origin, OUR_KERNELS.get(name, name), refused=error.message)
    if resolved != "eager" and resolved not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        reason = f"transformers takes {resolved} for it, which is not installed here"
        return Candidate(name, origin, unavailable=reason)
    return Candidate(name, origin, resolved, chosen=resolved == chosen)
