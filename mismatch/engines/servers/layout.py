"""Which decoder layers hold experts: the servers' answers have a column for every layer."""

from __future__ import annotations

from typing import Any

from mismatch.engines.base import ExpertLayout
from mismatch.engines.model_info import ModelInfo
from mismatch.specs import EngineSpec


def expert_layout(spec: EngineSpec, info: ModelInfo) -> ExpertLayout | None:
    """The experts of a model, from transformers' own modules without any weight; None: dense."""
    if not info.moe:
        return None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mismatch.training.routing.capture import moe_layers

    config = AutoConfig.from_pretrained(
        spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code
    )
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(config, trust_remote_code=spec.trust_remote_code)
    layers = tuple(layer.index for layer in moe_layers(model.get_decoder()))
    return ExpertLayout(layers, info.num_experts, info.top_k) if layers else None
