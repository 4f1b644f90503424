"""Results of ``mismatch locate`` and their document; plain data, no torch.

A site is the output of one module. Its key is ``LAYER.site`` in a layer, the name alone outside of
one. Every side records its sites in the shape [tokens, features].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from mismatch.types import NotTested

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
            layer = -1.0 if self.name == "embedding" else float("inf")
            return layer, OUTER_SITES.index(self.name)
        return float(self.layer), LAYER_SITES.index(self.name)

    def inputs(self, layers: int) -> tuple[Site, ...]:
        """The sites that its module reads, in a model of so many layers."""
        last = Site(layers - 1, "residual")
        if self.layer is None:
            return {"final_norm": (last,), "head": (Site(None, "final_norm"),)}.get(self.name, ())
        before = Site(None, "embedding") if self.layer == 0 else Site(self.layer - 1, "residual")
        names = INPUTS[self.name]
        return tuple(before if name == "before" else Site(self.layer, name) for name in names)


Role = Literal["source", "amplifier", "passed on"]
Status = Literal["none", "located", "unlocated"]


@dataclass(frozen=True, slots=True)
class SiteError:
    """One module of one side against the float32 reference, over all tokens that were recorded.

    All errors are relative: root mean square of the difference over that of the reference.

    Attributes:
        error: of its output.
        cosine: of its output to the reference's.
        new: of its output to what the reference's module gives for this side's own input.
        cost: the same of a plain forward in the side's dtype; None where that was not recorded.
        excess: ``new`` over the larger of ``cost`` and the dtype's rounding.
        lowest_excess: the smallest ``excess`` when one sequence is left out.
        gain: error of the reference's output on this side's input, over that input's own error;
            None where the input has no error to speak of.
        other_experts: of a router: share of tokens whose set of experts is another.
    """

    layer: int | None
    site: str
    error: float
    cosine: float
    new: float
    cost: float | None
    excess: float
    lowest_excess: float
    gain: float | None
    role: Role
    other_experts: float | None = None

    @property
    def location(self) -> Site:
        return Site(self.layer, self.site)


@dataclass(frozen=True, slots=True)
class Group:
    """A module that is a source, in one layer or several.

    Attributes:
        layers: empty outside of the layers.
        excess: the largest over the layers.
        explains: share of the side's squared distance at the end that its new error alone, put into
            the float32 reference, reproduces; below 0: it points elsewhere.
        removed: share of the side's mean |distance| at the end that goes where every other new
            error stays and this one is taken out.
        moves: root mean square of what its new error alone does to the end, over that of the
            side's distance. Rounding of all other modules can hide it from the other two.
    """

    site: str
    layers: tuple[int, ...]
    excess: float
    explains: float
    removed: float
    moves: float = 0.0


@dataclass(frozen=True, slots=True)
class PairEffect:
    """Two groups (by their place in the list) taken out together.

    Attributes:
        interaction: ``removed`` less that of each alone.
    """

    first: int
    second: int
    removed: float
    interaction: float


@dataclass(frozen=True, slots=True)
class SideLocation:
    """One side.

    Attributes:
        name: of the scoring, ``vllm:prefill`` or ``fsdp``.
        dtype: that it computes in.
        distance: mean |logprob - reference|, nats, over the action tokens.
        plain_distance: the same of the plain forward in its dtype; None: none was made.
        held: mean |logprob - the run's own| of this side, nats: whether what was recorded is what
            ran; None where the run has no such scoring.
        groups: sources in the order of the forward pass.
        first: place of the first one that explains anything; None: none does.
        explained, removed: of all groups together, as in :class:`Group`.
        reverted: share of its mean |distance| that goes where the side itself runs again with the
            reference's output in place of the first source's; None: no source, or an engine.
        distances, plain_distances: of each sequence; () where there is no plain forward.
    """

    name: str
    role: Literal["engine", "trainer"]
    dtype: str
    distance: float
    plain_distance: float | None
    held: float | None
    sites: tuple[SiteError, ...]
    groups: tuple[Group, ...] = ()
    pairs: tuple[PairEffect, ...] = ()
    first: int | None = None
    explained: float | None = None
    removed: float | None = None
    reverted: float | None = None
    distances: tuple[float, ...] = ()
    plain_distances: tuple[float, ...] = ()

    @property
    def source(self) -> Group | None:
        """The first source."""
        return None if self.first is None else self.groups[self.first]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence of the run that was recorded.

    Attributes:
        index: in the rollout.
        tokens: from its beginning; what follows was left out.
        why: it was taken.
    """

    index: int
    tokens: int
    why: Literal["worst", "random"]


@dataclass(frozen=True, slots=True)
class Location:
    """What ``mismatch locate`` found.

    Attributes:
        reference: whose weights the float32 reference holds.
        tokens: action tokens whose log-probabilities were compared.
        between: mean |train - rollout| on them, nats; None without an engine.
    """

    model: str
    reference: str
    sequences: tuple[Sequence, ...]
    tokens: int
    layers: int
    between: float | None
    sides: tuple[SideLocation, ...]
    not_tested: tuple[NotTested, ...]
    seconds: float = 0.0
