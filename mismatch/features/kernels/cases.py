"""Test cases of attention: inputs, and which keys each query may attend to.

A case turns one feature on and leaves the others without effect, so that each fault shows in one
column: sinks so low that they have no share; the same keys and values for all heads, so that any
grouping reads the same; the default scale. Shapes: B rows, H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from mismatch.errors import MismatchError
from mismatch.features.kernels.geometry import ModelGeometry
from mismatch.features.kernels.results import Origin

PLANTED = "no-sinks"  # audited only where it is named: nobody takes it by accident
PAGED = "serves continuous batching only, with a paged cache"
FLEX = "flex_attention"
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
    target = torch.device(device)
    chosen = resolve_for("auto", geometry.bare, target, torch.bfloat16).implementation
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
    if name == FLEX and not device.startswith("cuda"):
        return Candidate(name, origin, unavailable=NO_BACKWARD)
    if name.startswith("paged|"):
        return Candidate(name, origin, unavailable=PAGED)
    try:
        resolved = resolve_for(name, geometry.bare).implementation
    except MismatchError as error:
        measurable = name in (*OUR_KERNELS, *ALL_ATTENTION_FUNCTIONS.valid_keys(), "eager")
        if not measurable or "flash" in name:  # for want of a GPU
            return Candidate(name, origin, unavailable=error.message)
        return Candidate(name, origin, OUR_KERNELS.get(name, name), refused=error.message)
    if resolved != "eager" and resolved not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        reason = f"transformers takes {resolved} for it, which is not installed here"
        return Candidate(name, origin, unavailable=reason)
    return Candidate(name, origin, resolved, chosen=resolved == chosen)


def _user_kernel(text: str) -> Candidate:
    from mismatch.training.user_kernels import register_attention

    return Candidate(text, "yours", register_attention(text))


LONGEST_WINDOW = 96  # a fault in a window does not need a long one
SHORTEST = 97  # tokens; no multiple of any kernel's tile
NO_SHARE = -1e4  # as a sink logit: exp() of it is 0, and float16 still holds it
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Inputs(NamedTuple):
    """The tensors that a layer passes to its kernel.

    Attributes:
        query: [B, H, T, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        sinks: [H]; None for a model without.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Those that are not None, by the names of ``experiments.kernels.Error``."""
        pairs = zip(("q", "k", "v", "sinks"), self, strict=True)
        return {name: x for name, x in pairs if x is not None}

    def given(self, sinks: bool = True) -> list[torch.Tensor]:
        """Those that are not None, perhaps without the sinks."""
        return [x for x in self[: 4 if sinks else 3] if x is not None]

    def shifted(self, name: str, by: torch.Tensor) -> Inputs:
        """With ``by`` added to one of them."""
        named = {**self.named, name: self.named[name] + by}
        return Inputs(named["q"], named["k"], named["v"], named.get("sinks"))


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        queries, keys: lengths; fewer queries than keys: the last positions, as with a cache.
        scaling: of the scores.
        rows: of the batch.
        window: keys that a query sees, itself among them; None: all before it.
        documents: lengths of the documents in the (one) row; (): one document.
        lengths: real tokens of each row, the rest is padding at its end; (): no padding.
        sinks: "off": so low that they have no share.
        grouped: each key head differs; otherwise all are the same.
    """

    queries: int
    keys: int
    scaling: float
    rows: int = 1
    window: int | None = None
    documents: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    sinks: Literal["on", "off"] = "off"
    grouped: bool = False

    @property
    def label(self) -> str:
        """For messages."""
        parts = [
            "documents in one row" if self.documents else "",
            f"a window of {self.window}" if self.window else "",
            f"{self.queries} queries after {self.keys - self.queries} cached keys"
            if self.queries < self.keys
            else "",
        ]
        return " and ".join(part for part in parts if part) or "full attention"


def plain(geometry: ModelGeometry) -> Case:
    """One causal row without any feature."""
    tokens = max(SHORTEST, 2 * short_window(geometry) + 5)
    return Case(tokens, tokens, usual_scale(geometry))


def usual_scale(geometry: ModelGeometry) -> float:
    """The default scale of kernels: head_dim ** -0.5."""
    return float(geometry.head_dim**-0.5)


def short_window(geometry: ModelGeometry) -> int:
    """The model's window, or a shorter one; for models without, any."""
    return min(geometry.window or LONGEST_WINDOW // 3, LONGEST_WINDOW)


def full(geometry: ModelGeometry) -> tuple[Case, ...]:
    """All features of the model at once, in each of its kinds of layers."""
    base = replace(plain(geometry), scaling=geometry.scaling, grouped=True, sinks="on")
    third = base.keys // 3
    documents = (third, 5, base.keys - third - 5)
    kinds: list[int | None] = [None]
    if geometry.window is not None:
        kinds.append(short_window(geometry))
    return tuple(
        replace(base, window=window, documents=parts)
        for window in kinds
        for parts in ((), documents)
    )


def inputs_of(
    geometry: ModelGeometry, case: Case, device: str, dtype: torch.dtype, seed: int
) -> Inputs:
    """Random inputs, equal in all dtypes up to rounding; without requires_grad.

    Drawn on the CPU: other devices draw other numbers from the same seed.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    heads, groups = geometry.heads, geometry.kv_heads if case.grouped else 1
    query = normal(case.rows, heads, case.queries, geometry.head_dim)
    key = normal(case.rows, groups, case.keys, geometry.head_dim)
    value = normal(case.rows, groups, case.keys, geometry.value_dim)
    if not case.grouped:
        key, value = (x.repeat(1, geometry.kv_heads, 1, 1) for x in (key, value))
    # Scores are about normal: their log-sum-exp is near log(S) + 0.5. A sink there takes half.
    sinks = 4.0 + 0.7 * normal(heads) if case.sinks == "on" else torch.full((heads,), NO_SHARE)
    tensors = (query, key, value, sinks if geometry.sinks else None)
    return Inputs(*(None if x is None else x.to(device, dtype) for x in tensors))  # type: ignore[arg-type]


def allowed(
    case: Case,
    device: str,
    *,
    window: int | Literal["case"] | None = "case",
    documents: bool = True,
    from_start: bool = False,
    causal: bool = True,
) -> torch.Tensor:
    """[T, S] True where a query may attend; the arguments describe a faulty kernel.

    Args:
        window: instead of the case's.
        documents: False: documents of one row are not separated.
        from_start: the first query is placed at the first key, despite cached keys.
        causal: False: queries see the keys that come after them too.
    """
    offset = 0 if from_start else case.keys - case.queries
    rows = torch.arange(case.queries, device=device)[:, None] + offset
    columns = torch.arange(case.keys, device=device)
    mask = columns <= rows if causal else torch.ones_like(columns <= rows)
    width = case.window if window == "case" else window
    if width is not None:
        mask = mask & (columns > rows - width)
    if documents and case.documents:
        mask = mask & (document_of(case, device)[rows] == document_of(case, device)[columns])
    return mask


def document_of(case: Case, device: str) -> torch.Tensor:
    """[S] index of the document that a token belongs to."""
    lengths = torch.tensor(case.documents or (case.keys,), device=device)
    return torch.arange(len(lengths), device=device).repeat_interleave(lengths)


def positions_of(case: Case, device: str) -> torch.Tensor:
    """[B, T] position ids: every document starts at 0; queries after a cache go on from it."""
    positions = torch.arange(case.keys, device=device)
    if case.documents:
        starts = [sum(case.documents[:n]) for n in range(len(case.documents))]
        positions = positions - torch.tensor(starts, device=device)[document_of(case, device)]
    return positions[None, case.keys - case.queries :].expand(case.rows, -1)
