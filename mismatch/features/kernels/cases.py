"""Test cases of attention: inputs, which keys each query may attend to, and the right output.

A case turns one feature on and leaves the others without effect, so that each fault shows in one
column: sinks so low that they have no share; the same keys and values for all heads, so that any
grouping reads the same; the default scale. Shapes: B rows, H heads, T queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from mismatch.features.kernels.geometry import ModelGeometry
from mismatch.training.attention.trial import definition

LONGEST_WINDOW = 96  # a fault in a window does not need a long one
SHORTEST = 97  # tokens; no multiple of any kernel's tile
NO_SHARE = -1e4  # as a sink logit: exp() of it is 0, and float16 still holds it


class Inputs(NamedTuple):
    """The tensors that a layer passes to its kernel."""

    query: torch.Tensor
    """[B, H, T, D]."""
    key: torch.Tensor
    """[B, Hkv, S, D]."""
    value: torch.Tensor
    """[B, Hkv, S, Dv]."""
    sinks: torch.Tensor | None
    """[H]; None for a model without."""

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Those that are not None, by the names of ``results.Error``."""
        pairs = zip(("q", "k", "v", "sinks"), self, strict=True)
        return {name: x for name, x in pairs if x is not None}

    def leaves(self, dtype: torch.dtype | None = None) -> Inputs:
        """Return copies that require gradients, in another dtype if one is given."""
        named = {
            name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_()
            for name, x in self.named.items()
        }
        return Inputs(named["q"], named["k"], named["v"], named.get("sinks"))


@dataclass(frozen=True, slots=True)
class Case:
    """One case."""

    queries: int
    keys: int
    """Fewer queries than keys: the last positions, as with a cache."""
    scaling: float
    rows: int = 1
    window: int | None = None
    """Keys that a query sees, itself among them; None: all before it."""
    documents: tuple[int, ...] = ()
    """Lengths of the documents in the (one) row; (): one document."""
    lengths: tuple[int, ...] = ()
    """Real tokens of each row, the rest is padding at its end; (): no padding."""
    sinks: Literal["on", "off"] = "off"
    """Off: so low that they have no share."""
    grouped: bool = False
    """Whether each key head differs."""

    @property
    def label(self) -> str:
        """For messages."""
        cached = self.keys - self.queries
        parts = ["documents in one row"] if self.documents else []
        parts += [f"a window of {self.window}"] if self.window else []
        parts += [f"{self.queries} queries after {cached} cached keys"] if cached else []
        return " and ".join(parts) or "full attention"


def plain(geometry: ModelGeometry) -> Case:
    """Return one causal row without any feature, with the default scale of kernels."""
    tokens = max(SHORTEST, 2 * short_window(geometry) + 5)
    return Case(tokens, tokens, float(geometry.sizes.head_dim**-0.5))


def short_window(geometry: ModelGeometry) -> int:
    """Return the model's window, or a shorter one; for models without, any."""
    return min(geometry.sizes.window or LONGEST_WINDOW // 3, LONGEST_WINDOW)


def full(geometry: ModelGeometry) -> tuple[Case, ...]:
    """Return all features of the model at once, in each of its kinds of layers."""
    base = replace(plain(geometry), scaling=geometry.scaling, grouped=True, sinks="on")
    third = base.keys // 3
    documents = (third, 5, base.keys - third - 5)
    kinds: list[int | None] = [None]
    if geometry.sizes.window is not None:
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

    heads, groups = geometry.sizes.heads, geometry.sizes.kv_heads if case.grouped else 1
    query = normal(case.rows, heads, case.queries, geometry.sizes.head_dim)
    key = normal(case.rows, groups, case.keys, geometry.sizes.head_dim)
    value = normal(case.rows, groups, case.keys, geometry.sizes.value_dim)
    if not case.grouped:
        key, value = (x.repeat(1, geometry.sizes.kv_heads, 1, 1) for x in (key, value))
    # Scores are about normal: their log-sum-exp is near log(S) + 0.5. A sink there takes half.
    sinks = 4.0 + 0.7 * normal(heads) if case.sinks == "on" else torch.full((heads,), NO_SHARE)
    tensors = (query, key, value, sinks if geometry.sinks else None)
    return Inputs(*(None if x is None else x.to(device, dtype) for x in tensors))  # type: ignore[arg-type]


def attention(
    inputs: Inputs, mask: torch.Tensor, scaling: float, sinks: bool = True, neighbours: bool = True
) -> torch.Tensor:
    """[B, T, H, Dv] by :func:`definition`; without ``sinks`` as in a kernel that drops them."""
    given = list(inputs.named.values())[: 4 if sinks else 3]
    return definition(given, mask, scaling, neighbours=neighbours)


def rounded(inputs: Inputs, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the same in the inputs' dtype with a float32 softmax, as a trainer's plain attention.

    Its error is the floor: what rounding alone costs in this dtype. In float64 too the softmax is
    in float32, as in the families' own eager attention.
    """
    return definition(list(inputs.named.values()), mask, scaling, softmax=torch.float32)


def allowed(
    case: Case,
    device: str,
    *,
    window: int | Literal["case"] | None = "case",
    documents: bool = True,
    from_start: bool = False,
    causal: bool = True,
) -> torch.Tensor:
    """[T, S] True where a query may attend; the other arguments describe a faulty kernel.

    Args:
        documents: False: documents of one row are not separated.
        from_start: the first query is placed at the first key, despite cached keys.
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
