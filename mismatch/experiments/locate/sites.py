"""Canonical names of what flows between the modules of a decoder, the same for every side.

A site is the output of one module. Its key is ``LAYER.site`` in a layer, the name alone outside of
one. Every side records its sites in the shape [tokens, features].
"""

from __future__ import annotations

from typing import NamedTuple

# In the order of a forward pass.
LAYER_SITES = (
    "input_norm",
    "q",
    "k",
    "v",
    "rope_q",
    "rope_k",
    "attention",
    "attention_output",
    "attention_norm",
    "attention_residual",
    "post_norm",
    "router",
    "mlp",
    "mlp_norm",
    "residual",
)
SOME_FAMILIES = ("attention_norm", "mlp_norm")  # Gemma 2 and 3, GLM4: norms of what is added
OUTER_SITES = ("embedding", "final_norm", "head")
TITLES = {
    "embedding": "embedding",
    "input_norm": "input norm",
    "q": "query projection",
    "k": "key projection",
    "v": "value projection",
    "rope_q": "rope",
    "rope_k": "rope of keys",
    "attention": "attention",
    "attention_output": "attention's output projection",
    "attention_norm": "norm behind attention",
    "attention_residual": "residual after attention",
    "post_norm": "norm before the MLP",
    "router": "router",
    "mlp": "experts or MLP",
    "mlp_norm": "norm behind the MLP",
    "residual": "residual after the layer",
    "final_norm": "final norm",
    "head": "head",
}
# Sites whose outputs a module reads; those of another layer are written "-1.".
INPUTS: dict[str, tuple[str, ...]] = {
    "input_norm": ("before",),
    "q": ("input_norm",),
    "k": ("input_norm",),
    "v": ("input_norm",),
    "rope_q": ("q",),
    "rope_k": ("k",),
    "attention": ("rope_q", "rope_k", "v"),
    "attention_output": ("attention",),
    "attention_norm": ("attention_output",),
    "attention_residual": ("before", "attention_output", "attention_norm"),
    "post_norm": ("attention_residual",),
    "router": ("post_norm",),
    "mlp": ("post_norm", "router"),
    "mlp_norm": ("mlp",),
    "residual": ("attention_residual", "mlp", "mlp_norm"),
}


class Site(NamedTuple):
    """One place of a decoder.

    >>> Site(3, "router").key, Site(None, "head").key
    ('3.router', 'head')

    Attributes:
        layer: None outside of the layers.
    """

    layer: int | None
    name: str

    @property
    def key(self) -> str:
        return self.name if self.layer is None else f"{self.layer}.{self.name}"

    @property
    def title(self) -> str:
        """As a reader calls it."""
        return TITLES[self.name]

    @classmethod
    def of(cls, key: str) -> Site:
        """The inverse of ``key``.

        >>> Site.of("3.router")
        Site(layer=3, name='router')
        """
        layer, dot, name = key.rpartition(".")
        return cls(int(layer) if dot else None, name)

    def order(self) -> tuple[float, int]:
        """Sorts sites as a forward pass meets them."""
        if self.layer is None:
            place = -1.0 if self.name == "embedding" else float("inf")
            return place, OUTER_SITES.index(self.name)
        return float(self.layer), LAYER_SITES.index(self.name)

    def inputs(self, layers: int) -> tuple[Site, ...]:
        """The sites that its module reads, in a model of so many layers."""
        last = Site(layers - 1, "residual")
        if self.layer is None:
            return {"final_norm": (last,), "head": (Site(None, "final_norm"),)}.get(self.name, ())
        before = Site(None, "embedding") if self.layer == 0 else Site(self.layer - 1, "residual")
        names = INPUTS[self.name]
        return tuple(before if name == "before" else Site(self.layer, name) for name in names)
