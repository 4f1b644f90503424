"""Which causes a run cannot have, by what its sides state of the model and of their settings.

What a side leaves open rules nothing out. A setting counts as absent where both sides resolve it to
nothing: one that a side alone ignores is there on the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mismatch.analysis.levels import NOT_QUANTISED
from mismatch.types import SideFacts

EXPERTS = ("experts-differ", "router-config", "router-precision", "double-load")
WIDE = ("bf16", "fp16", "fp32", "auto")


def impossible(engine: SideFacts, trainer: SideFacts) -> frozenset[str]:
    """Return the causes that neither the model nor the settings of these two sides can have.

    >>> sorted(impossible({"moe": False}, {"layout": "padding", "moe": False}))[:2]
    ['double-load', 'experts-differ']
    """
    return frozenset(_impossible(engine, trainer))


def _impossible(engine: SideFacts, trainer: SideFacts) -> Iterator[str]:
    sides = engine, trainer
    if any(side.get("moe") is False for side in sides):
        yield from EXPERTS
    if "honours_sinks" in trainer and trainer["honours_sinks"] is None:
        yield "attention-sinks"
    if _nothing(sides, "sliding_window", None):
        yield "sliding-window"
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    if all(_nothing(sides, name, 0.0) for name in caps):
        yield "logit-softcap"
    if _nothing(sides, "attention_factor", 1.0):
        yield "yarn-attention-factor"
    if _nothing(sides, "tie_word_embeddings", False):
        yield "tied-head-stale"
    if trainer.get("layout", "packing") != "packing":
        yield "packing-leak"
    if engine.get("kv_cache_dtype") in WIDE:
        yield "fp8-kv"
    forms = {side.get("weights_form", "") for side in sides}
    plain = str(engine.get("quantization") or "none").lower() in NOT_QUANTISED
    if "quantization" in engine and plain and len(forms) == 1:
        yield from ("quantised-rollout", "quantised-module-list")
    if all(side.get("source_files") and not side.get("adapter") for side in sides):
        yield "lora-scale"
    for fact, cause in (
        ("autocast", "trainer-autocast"),
        ("cast_forward_inputs", "fsdp-cast-inputs"),
    ):
        if fact in trainer and not dict(trainer)[fact]:
            yield cause
    if engine.get("prefix_caching") is False:
        yield "prefix-cache-stale"


def _nothing(sides: tuple[SideFacts, SideFacts], name: str, neutral: Any) -> bool:
    """Return whether both sides resolved this field, if they have it, to what changes nothing.

    A configuration leaves out what its model has not (mismatch/models/resolved.py).
    """
    configs = [side.get("config") for side in sides]
    if not all(configs):
        return False
    values = [config.get(name, neutral) for config in configs if config]
    listed = [value if isinstance(value, list) else [value] for value in values]
    return all(each in (neutral, None) for value in listed for each in value)
