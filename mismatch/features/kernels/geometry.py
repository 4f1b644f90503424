"""The geometry of a model for synthetic inputs, and the options of an audit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mismatch.errors import MismatchError

PER_LAYER = ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Shapes of one layer of a model.

    Attributes:
        model: as the user named it.
        heads, kv_heads: of queries, of keys and values.
        head_dim: of queries and keys; ``value_dim`` of values.
        window: number of keys in a sliding layer, the query's own included; None: no such layer.
        scaling: factor of the scores.
        sinks: whether heads learn attention sinks.
        experts, top_k, intermediate: None for a dense model.
        bare: the model on the meta device.
        unlike: a sentence on layers of other shapes; "": all layers are alike.
    """

    model: str
    model_type: str
    layers: int
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
    bare: Any = field(repr=False, compare=False)
    unlike: str = ""

    def facts(self) -> dict[str, Any]:
        """For ``AuditReport.geometry``; None where the model has none."""
        attention = ("heads", "kv_heads", "head_dim", "value_dim", "window", "sinks", "scaling")
        more = ("layers", "hidden", "experts", "top_k", "intermediate")
        return {"model_type": self.model_type} | {n: getattr(self, n) for n in (*attention, *more)}


@dataclass(frozen=True, slots=True)
class Options:
    """How an audit is done.

    >>> Options(device="cpu", dtypes=("fp64", "fp32")).repeats
    2

    Attributes:
        device: "cpu", "cuda", "cuda:1".
        dtypes: of "fp64", "fp32", "bf16", "fp16"; those that a kernel refuses are left out.
        seed: of all inputs.
        repeats: runs on the same inputs that must agree bit for bit; at least 2.
    """

    device: str = "cpu"
    dtypes: tuple[str, ...] = ("fp64", "fp32", "bf16")
    seed: int = 0
    repeats: int = 2


def config_of(model: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, bool]:
    """A model's configuration, and whether it is the one that ships with the package.

    The packaged one is used where the model is not on this machine: an audit needs only shapes.

    Raises:
        MismatchError: there is none, or it is not supported.
    """
    from transformers import AutoConfig

    from mismatch.models.config import SHIPPED, find_config
    from mismatch.specs import TrainSpec
    from mismatch.training.source import read_config

    try:
        config = find_config(model, revision)
    except MismatchError:  # perhaps the hub has it
        config = None
    if config is not None and config.source == SHIPPED:
        return AutoConfig.for_model(**config.values), True
    return read_config(TrainSpec(model, revision, trust_remote_code=trust_remote_code)), False


def geometry_of(config: Any, model: str = "", trust_remote_code: bool = False) -> ModelGeometry:
    """Read a model's shapes off its configuration and its modules, without weights.

    Raises:
        MismatchError: an architecture that transformers does not know.
    """
    from mismatch.models.config import ModelConfig
    from mismatch.training.attention.resolve import has_sinks
    from mismatch.training.attention.trial import scaling_of
    from mismatch.training.source import skeleton

    bare = skeleton(config, trust_remote_code)
    text, sizes = config.get_text_config(), ModelConfig.of(config)
    return ModelGeometry(
        model=model or str(config._name_or_path),
        model_type=str(text.model_type),
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        window=sizes.window,
        scaling=scaling_of(bare) or sizes.head_dim**-0.5,
        sinks=has_sinks(bare),
        experts=sizes.experts or None,
        top_k=sizes.top_k or None,
        intermediate=sizes.width if sizes.experts else None,
        bare=bare,
        unlike=_unlike(text),
    )


def _unlike(text: Any) -> str:
    """Which layers have other shapes than the first, in words; "": none."""
    if not getattr(text, "is_heterogeneous", False):
        return ""
    layers = text.per_layer_config
    shapes = [tuple(getattr(layer, name, None) for name in PER_LAYER) for layer in layers]
    unlike = [shape for shape in shapes if shape != shapes[0]]
    if not unlike:
        return ""
    differs = ", ".join(
        f"{name} {', '.join(map(str, dict.fromkeys(values)))} and not {first}"
        for name, first, values in zip(PER_LAYER, shapes[0], zip(*unlike, strict=True), strict=True)
        if set(values) != {first}
    )
    return f"{len(unlike)} of {len(shapes)} layers, unlike the first: {differs}"
