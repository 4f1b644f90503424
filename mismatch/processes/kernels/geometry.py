"""What the synthetic inputs of an audit take from a model, and how thoroughly it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mismatch.errors import MismatchError

# Names that families give to the same sizes.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "num_experts_per_token")
PER_LAYER = ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Shapes of one layer of a model.

    Attributes:
        model: as the user named it.
        heads, kv_heads: of queries, of keys and values.
        head_dim: of queries and keys; ``value_dim`` of values.
        window: keys that a query sees in a sliding layer, itself among them; None: no such layer.
        scaling: factor of the scores.
        sinks: whether heads learn attention sinks.
        experts, top_k, intermediate: None for a dense model.
        config: of transformers, as read.
        bare: the model on the meta device.
        unlike: layers of other shapes than these, in words; "": all layers are alike.
    """

    model: str
    model_type: str
    layers: int
    layer_types: tuple[str, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    scaling: float
    sinks: bool
    experts: int | None
    top_k: int | None
    intermediate: int | None
    config: Any = field(repr=False, compare=False)
    bare: Any = field(repr=False, compare=False)
    unlike: str = ""

    def facts(self) -> dict[str, Any]:
        """For ``AuditReport.geometry``; what the model lacks is None."""
        kept = ("heads", "kv_heads", "head_dim", "value_dim", "window", "sinks", "scaling")
        more = ("layers", "hidden", "experts", "top_k", "intermediate")
        return {"model_type": self.model_type} | {n: getattr(self, n) for n in (*kept, *more)}


@dataclass(frozen=True, slots=True)
class Options:
    """How an audit is done.

    >>> Options(device="cpu", dtypes=("fp64", "fp32")).repeats
    2

    Attributes:
        device: "cpu", "cuda", "cuda:1".
        dtypes: of "fp64", "fp32", "bf16", "fp16"; what a kernel does not take is left out.
        seed: of all inputs.
        repeats: runs on the same inputs, whose bits must agree; at least 2.
        tokens: lengths at which time and memory are taken; empty: none.
        harm: whether what is wrong is also run on the model as a whole.
        budget_s: no further length is measured once the costs of one kernel took this long.
        budget_bytes: a length that would take more memory is left out; None: what is free now.
    """

    device: str = "cpu"
    dtypes: tuple[str, ...] = ("fp64", "fp32", "bf16")
    seed: int = 0
    repeats: int = 2
    tokens: tuple[int, ...] = (1024, 4096)
    harm: bool = True
    budget_s: float = 60.0
    budget_bytes: int | None = None


def config_of(model: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, bool]:
    """A model's configuration, and whether it is the one that ships with the package.

    That one is taken where the model is not on this machine: shapes are all that an audit needs.

    Raises:
        MismatchError: there is none, or it is not supported.
    """
    from transformers import AutoConfig

    from mismatch.models.offline import SHIPPED, find_config
    from mismatch.specs import TrainSpec
    from mismatch.training.source import read_config

    try:
        found = find_config(model, revision)
    except MismatchError:  # perhaps the hub has it
        found = None
    if found is not None and found.source == SHIPPED:
        return AutoConfig.for_model(**found.values), True
    return read_config(TrainSpec(model, revision, trust_remote_code=trust_remote_code)), False


def geometry_of(config: Any, model: str = "", trust_remote_code: bool = False) -> ModelGeometry:
    """Read a model's shapes off its configuration and its modules, without weights.

    Raises:
        MismatchError: an architecture that transformers does not know.
    """
    from mismatch.training.attention.resolve import has_sinks
    from mismatch.training.source import skeleton

    bare = skeleton(config, trust_remote_code)
    text, unlike = _first_layer(config.get_text_config())
    heads = int(text.num_attention_heads)
    size = int(_first(text, ("qk_head_dim", "head_dim")) or text.hidden_size // heads)
    kinds = tuple(getattr(text, "layer_types", None) or ())
    experts = _first(text, EXPERTS)
    return ModelGeometry(
        model=model or str(config._name_or_path),
        model_type=str(text.model_type),
        layers=int(text.num_hidden_layers),
        layer_types=kinds,
        hidden=int(text.hidden_size),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=size,
        value_dim=int(_first(text, ("v_head_dim",)) or size),
        window=_window(text, kinds),
        scaling=_scaling(bare, size),
        sinks=has_sinks(bare),
        experts=experts,
        top_k=_first(text, TOP_K) if experts else None,
        intermediate=_first(text, INTERMEDIATE) if experts else None,
        config=config,
        bare=bare,
        unlike=unlike,
    )


def _first_layer(text: Any) -> tuple[Any, str]:
    """The configuration that the first layer has, and which layers have other shapes.

    Where layers differ, transformers refuses to read what differs off the model as a whole.
    """
    if not getattr(text, "is_heterogeneous", False):
        return text, ""
    first, *others = text.per_layer_config
    shapes = [tuple(getattr(one, name, None) for name in PER_LAYER) for one in (first, *others)]
    unlike = [shape for shape in shapes if shape != shapes[0]]
    if not unlike:
        return first, ""
    differs = ", ".join(
        f"{name} {', '.join(map(str, dict.fromkeys(values)))} and not {here}"
        for name, here, values in zip(PER_LAYER, shapes[0], zip(*unlike, strict=True), strict=True)
        if set(values) != {here}
    )
    return first, f"{len(unlike)} of {len(shapes)} layers, unlike the first: {differs}"


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of these that is a positive number."""
    values = (getattr(config, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and v > 0), None)


def _window(config: Any, kinds: tuple[str, ...]) -> int | None:
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or (kinds and "sliding_attention" not in kinds):
        return None
    return window if getattr(config, "use_sliding_window", True) else None


def _scaling(bare: Any, head_dim: int) -> float:
    """Of the first attention layer; families set it in many ways."""
    scales = (getattr(module, "scaling", None) for module in bare.modules())
    return float(next((s for s in scales if isinstance(s, float)), head_dim**-0.5))
