"""Which module of a decoder layer is what, in transformers and in engines, by the names it has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

LAYERS = ("layers", "h")
ATTENTIONS = ("self_attn", "attn")
MIXERS = ("mamba", "linear_attn", "mixer")  # next to attention, or in its place
MLPS = ("mlp", "block_sparse_moe", "feed_forward", "shared_mlp")  # the last next to experts too
NORM = re.compile(r"norm(?:_f)?$|^ln_")
# Norms at the layer's input, before the MLP, behind the attention and behind the MLP; "-": none.
PLACES = (
    "input_layernorm post_attention_layernorm - -",
    "input_layernorm pre_ff_layernorm - -",
    "input_layernorm - - -",
    "ln_1 ln_2 - -",
    "norm - - -",
    "- - post_attention_layernorm post_feedforward_layernorm",
    "input_layernorm pre_feedforward_layernorm post_attention_layernorm post_feedforward_layernorm",
    "input_layernorm post_attention_layernorm post_self_attn_layernorm post_mlp_layernorm",
)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The modules of a decoder layer; None where it has none, or none of a known name.

    Attributes:
        before_mlp: norm of the residual stream.
        behind_attention, behind_mlp: norms of what is added to it.
        middle: what is given the residual stream after attention; None: not known.
    """

    attention: Any
    mixer: Any
    mlp: Any
    shared_mlp: Any
    input_norm: Any = None
    before_mlp: Any = None
    behind_attention: Any = None
    behind_mlp: Any = None

    @property
    def middle(self) -> Any:
        only_behind = self.input_norm is None and self.behind_mlp is not None
        return self.mlp if only_behind else self.before_mlp


def child(module: Any, names: tuple[str, ...]) -> Any:
    """Return the first part of these names; None where there is none."""
    parts = (getattr(module, name, None) for name in names)
    return next((part for part in parts if part is not None), None)


def parts_of(layer: Any) -> LayerParts:
    """Return which module of a layer is what; norms in an order of no known family are left out."""
    norms = {name for name, _ in layer.named_children() if NORM.search(name)}
    known = [names for names in map(str.split, PLACES) if norms == {*names} - {"-"}]
    mlp, shared = child(layer, MLPS), child(layer, MLPS[-1:])
    return LayerParts(
        child(layer, ATTENTIONS),
        child(layer, MIXERS),
        mlp,
        None if shared is mlp else shared,
        *(getattr(layer, name, None) for names in known for name in names),
    )


def has_rope(model: Any) -> bool:
    """Return whether anything of a model turns queries and keys."""
    return any("rotary" in name for name, _ in model.named_modules())


def final_norm(decoder: Any) -> Any:
    """Return the norm behind the last layer: the last of the decoder's own; None: it has none."""
    own = [module for name, module in decoder.named_children() if NORM.search(name)]
    return own[-1] if own else None
