"""The attention implementations of this machine, and the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mismatch.errors import MismatchError
from mismatch.experiments.kernels.types import Origin
from mismatch.processes.kernels.geometry import ModelGeometry

PLANTED = "no-sinks"  # audited only where it is named: nobody takes it by accident
PAGED = "serves continuous batching only, with a paged cache"
FLEX = ("flex_attention", "sink-flex")
NO_BACKWARD = "flex attention has no backward pass on a CPU"
OUR_PREFIX = "mismatch_"  # of the names that we registered


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation.

    Attributes:
        name: as in ``--attention NAME``.
        registered: its name in transformers' registry; "" where it cannot run.
        unavailable: why it cannot run on this machine; "" where it can.
        refused: why the model does not take it; it can be measured by itself.
        chosen: whether ``--attention auto`` resolves to it.
    """

    name: str
    origin: Origin
    registered: str = ""
    unavailable: str = ""
    refused: str = ""
    chosen: bool = False


def names_here(
    geometry: ModelGeometry,
    users: Sequence[str] = (),
    names: Sequence[str] = (),
    device: str = "cpu",
) -> list[Candidate]:
    """Every attention implementation, those that cannot run here too, with the reason.

    Args:
        users: ``package.module:function[@MASK]`` each.
        names: only these, beside the user's; empty: all.
        device: where they will run: ``auto`` may choose by it.

    Raises:
        MismatchError: an unknown name, or a user's function that cannot be imported.
    """
    import torch

    from mismatch.training.attention.resolve import register_kernels, resolve_for

    register_kernels()
    available = list(dict.fromkeys(_names(geometry)))
    unknown = [name for name in names if name not in (*available, PLANTED)]
    if unknown:
        raise MismatchError(
            f"there is no attention implementation {unknown[0]!r} here",
            f"one of {', '.join(available)}, {PLANTED}",
        )
    place = torch.device(device)
    chosen = resolve_for("auto", geometry.bare, place, torch.bfloat16).implementation
    candidates = [_candidate(geometry, name, chosen, device) for name in (names or available)]
    return candidates + [_user_kernel(text) for text in users]


def _names(geometry: ModelGeometry) -> Iterator[str]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from mismatch.training.attention.resolve import OUR_KERNELS

    yield from ("eager", "sdpa")
    if geometry.sinks:
        yield from (name for name in OUR_KERNELS if name != PLANTED)
    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        if not name.startswith(OUR_PREFIX):
            yield name


def _candidate(geometry: ModelGeometry, name: str, chosen: str, device: str) -> Candidate:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from mismatch.training.attention.resolve import OUR_KERNELS, resolve_for

    origin: Origin = "ours" if name in OUR_KERNELS else "transformers"
    if name in FLEX and not device.startswith("cuda"):
        return Candidate(name, origin, unavailable=NO_BACKWARD)
    if name.startswith("paged|"):
        return Candidate(name, origin, unavailable=PAGED)
    try:
        resolved = resolve_for(name, geometry.bare).implementation
    except MismatchError as error:
        measurable = name in (*OUR_KERNELS, *ALL_ATTENTION_FUNCTIONS.valid_keys(), "eager")
        if not measurable or "flash" in name or name == "sink-flex":  # for want of a GPU
            return Candidate(name, origin, unavailable=error.message)
        return Candidate(name, origin, OUR_KERNELS.get(name, name), refused=error.message)
    if resolved != "eager" and resolved not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        reason = f"transformers takes {resolved} for it, which is not installed here"
        return Candidate(name, origin, unavailable=reason)
    return Candidate(name, origin, resolved, chosen=resolved == chosen)


def _user_kernel(text: str) -> Candidate:
    from mismatch.training.user_kernels import register_attention

    return Candidate(text, "yours", register_attention(text))
