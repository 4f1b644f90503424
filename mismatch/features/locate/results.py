"""Results of ``mismatch locate``; plain data, no torch.

A site is the output of one module. Its key is ``LAYER.site`` in a layer, the name alone outside of
one. Every side records its sites in the shape [tokens, features].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mismatch.types import NotTested

# In the order of a forward pass.
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
    "mixer": "state-space block or other mixer",
    "attention_norm": "norm behind attention",
    "attention_residual": "residual after attention",
    "post_norm": "norm before the MLP",
    "router": "router",
    "mlp": "experts or MLP",
    "shared_mlp": "shared MLP",
    "mlp_norm": "norm behind the MLP",
    "residual": "residual after the layer",
    "final_norm": "final norm",
    "head": "head",
}
# What a side does otherwise than the checkpoint or config.json says; free factors come last.
FORMS = {
    "no-qk-norm": "without the norm of queries and keys (q_norm, k_norm) in front of the rotation",
    "no-softcap": "without the cap on the scores (attn_logit_softcapping)",
    "no-sinks": "without the learned sinks",
    "gelu": "with the exact GELU in place of the activation of config.json",
    "gelu-tanh": "with the approximate GELU (tanh) in place of the activation of config.json",
    "silu": "with SiLU in place of the activation of config.json",
    "no-shared-gate": "without the gate of the shared expert (shared_expert_gate)",
    "no-shared-expert": "without the shared expert",
    "shared-gate": "with another gate of the shared expert (shared_expert_gate)",
    "routed-scale": "with another factor on the routed experts' sum",
}
LAYER_SITES = tuple(name for name in TITLES if name not in ("embedding", "final_norm", "head"))
SOME_FAMILIES = ("mixer", "attention_norm", "shared_mlp", "mlp_norm")


class Site(NamedTuple):
    """One place of a decoder; ``layer`` is None outside of the layers."""

    layer: int | None
    name: str

    @property
    def key(self) -> str:
        return self.name if self.layer is None else f"{self.layer}.{self.name}"

    @classmethod
    def of(cls, key: str) -> Site:
        """Return the site of a key.

        >>> Site.of("3.router"), Site.of("head").key
        (Site(layer=3, name='router'), 'head')
        """
        layer, dot, name = key.rpartition(".")
        return cls(int(layer) if dot else None, name)

    def order(self) -> tuple[float, int]:
        """Return a key that sorts sites as a forward pass meets them."""
        outside = -1.0 if self.name == "embedding" else math.inf
        return outside if self.layer is None else self.layer, list(TITLES).index(self.name)


Kind = Literal["weights", "function", "rounding"]
Role = Literal["source", "passed on"]


@dataclass(frozen=True, slots=True)
class SiteError:
    """One module of one side against the float32 reference, over all tokens that were recorded.

    All errors are relative: root mean square of the difference over that of the reference.

    Attributes:
        error: of its output.
        new: of its output to what the reference's module gives for this side's own input.
        cost: the same of a plain forward in the side's dtype; None where that was not recorded.
        excess: ``new`` over the larger of ``cost`` and the dtype's rounding.
        lowest_excess: the smallest ``excess`` when one sequence is left out.
        unlike: of its output to what a plain forward's module in the side's dtype gives for this
            side's own input, over the larger of that module's error and the dtype's rounding; the
            smallest when one sequence is left out. 0: alike, or not measured.
    """

    layer: int | None
    site: str
    error: float
    new: float
    cost: float | None
    excess: float
    lowest_excess: float
    role: Role
    unlike: float = 0.0

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
            error stays and this error is taken out.
        moves: root mean square of what its new error alone does to the end, over that of the
            side's distance. Rounding of all other modules can hide it from the other two.
        form: a name of ``FORMS`` that says what the side does here; "": none of them does.
        unlike: the largest over the layers, see :class:`SiteError`.
    """

    site: str
    layers: tuple[int, ...]
    excess: float
    explains: float
    removed: float
    moves: float = 0.0
    form: str = ""
    unlike: float = 0.0

    @property
    def place(self) -> str:
        """Module and layers.

        >>> Group("rope_q", (3,), 9.0, 0.9, 0.9).place
        'rope of layer 3'
        """
        title = TITLES[self.site]
        if not self.layers:
            return title
        low, high = self.layers[0], self.layers[-1]
        if low == high:
            return f"{title} of layer {low}"
        run = len(self.layers) == high - low + 1
        listed = f"{low} to {high}" if run else ", ".join(map(str, self.layers))
        return f"{title} of layers {listed}"


OTHER_NATS = 1e-3  # or the plain forward's distance: what ran here is not what the run recorded


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
        distances, plain_distances: of each sequence; () where there is no plain forward.
        kind: what differs at the first source; None: there is none, or the run's own float32 passes
            do not say (see :func:`mismatch.features.locate.kinds.kind_of`).
        fault: which side is wrong at the first source, likewise
            (see :func:`mismatch.features.locate.kinds.fault_of`).
    """

    name: str
    role: Literal["engine", "trainer"]
    dtype: str
    distance: float
    plain_distance: float | None
    held: float | None
    sites: tuple[SiteError, ...]
    groups: tuple[Group, ...] = ()
    first: int | None = None
    explained: float | None = None
    removed: float | None = None
    distances: tuple[float, ...] = ()
    plain_distances: tuple[float, ...] = ()
    kind: Kind | None = None
    fault: Literal["engine", "trainer", "either"] = "either"

    @property
    def source(self) -> Group | None:
        """The first source."""
        return None if self.first is None else self.groups[self.first]

    @property
    def is_other(self) -> bool:
        """Whether what was recorded is not what the run recorded of this side."""
        limit = max(self.plain_distance or 0.0, OTHER_NATS)
        return self.held is not None and not self.held <= limit  # NaN too


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
        broken: the run's report says BROKEN.
        fields: names of config.json that this model sets.
        impossible: causes that neither the model nor the run's settings can have.
        alike: modules were sources, too, that round otherwise than the plain forward's.
    """

    model: str
    reference: str
    sequences: tuple[Sequence, ...]
    tokens: int
    sides: tuple[SideLocation, ...]
    not_tested: tuple[NotTested, ...]
    broken: bool = False
    fields: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()
    alike: bool = False
