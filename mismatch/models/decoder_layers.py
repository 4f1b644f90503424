"""Parts of a decoder layer, under the names that transformers, vLLM and SGLang all give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ATTENTIONS = ("self_attn", "attn")
MLPS = ("mlp", "block_sparse_moe", "feed_forward")
# Norms before the MLP, behind the attention and behind the MLP: two of the three ways have all.
PLAIN = ("post_attention_layernorm", None, None)
GEMMA = (
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)
GLM4 = ("post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The norms of a layer beside the one at its input.

    Attributes:
        before_mlp: of the residual stream.
        behind_attention, behind_mlp: of what is added to it; None in most families.
    """

    before_mlp: Any
    behind_attention: Any = None
    behind_mlp: Any = None


def child(module: Any, names: tuple[str, ...]) -> Any:
    """The first part of these names; None where there is none."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def norms_of(layer: Any) -> LayerNorms:
    """Which norm of a layer stands where.

    Raises:
        LookupError: norms in another order; its text names what is missing or further.
    """
    if not hasattr(layer, "input_layernorm"):
        raise LookupError("has no norm at its input")
    further = {name for name, _ in _named_norms(layer)} - {"input_layernorm"}
    for names in (PLAIN, GEMMA, GLM4):
        if further == {name for name in names if name is not None}:
            return LayerNorms(*(None if name is None else getattr(layer, name) for name in names))
    raise LookupError(f"has the norms {', '.join(sorted(further)) or 'of its input alone'}")


def _named_norms(layer: Any) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in layer.named_children() if name.endswith("layernorm")]
