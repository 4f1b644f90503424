"""The shapes of one layer of a model, from its configuration; no weights are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig

from mismatch.errors import MismatchError
from mismatch.models.config import SHIPPED, ModelConfig, find_config
from mismatch.specs import TrainSpec
from mismatch.training.attention.resolve import has_sinks
from mismatch.training.attention.trial import scaling_of
from mismatch.training.source import read_config, skeleton


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Shapes of one layer of a model."""

    model: str
    """As the user named it."""
    model_type: str
    sizes: ModelConfig
    scaling: float
    """Factor of the scores."""
    sinks: bool
    """Whether heads learn attention sinks."""
    bare: Any = field(repr=False, compare=False)
    """The model on the meta device."""
    uneven: bool = False
    """Whether some layers have other shapes than the first."""

    def facts(self) -> dict[str, Any]:
        """Return what ``AuditReport.geometry`` holds; None where the model has none."""
        attention = ("heads", "kv_heads", "head_dim", "value_dim", "window", "layers", "hidden")
        return {name: getattr(self.sizes, name) for name in attention} | {
            "model_type": self.model_type,
            "sinks": self.sinks,
            "scaling": self.scaling,
            "experts": self.sizes.experts or None,
            "top_k": self.sizes.top_k or None,
            "intermediate": self.sizes.width if self.sizes.experts else None,
        }


def config_of(model: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, bool]:
    """Return a model's configuration, and whether it is the copy that ships with the package.

    The copy serves where the model is not on this machine: an audit needs only shapes.
    """
    try:
        config = find_config(model, revision)
    except MismatchError:  # perhaps the hub has it
        config = None
    if config is not None and config.source == SHIPPED:
        return AutoConfig.for_model(**config.values), True
    return read_config(TrainSpec(model, revision, trust_remote_code=trust_remote_code)), False


def geometry_of(config: Any, model: str = "", trust_remote_code: bool = False) -> ModelGeometry:
    """Read a model's shapes off its configuration and its modules, without weights."""
    bare = skeleton(config, trust_remote_code)
    text, sizes = config.get_text_config(), ModelConfig.of(config)
    return ModelGeometry(
        model=model or str(config._name_or_path),
        model_type=str(text.model_type),
        sizes=sizes,
        scaling=scaling_of(bare) or sizes.head_dim**-0.5,
        sinks=has_sinks(bare),
        bare=bare,
        uneven=bool(getattr(text, "is_heterogeneous", False)),
    )
