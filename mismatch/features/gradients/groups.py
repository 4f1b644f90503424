"""Groups of parameters, by their names in transformers."""

from __future__ import annotations

GROUPS = ("attention", "sinks", "router", "experts", "mlp", "embeddings", "norms", "head", "other")

# A name is cut at its dots; the first rule that holds one of the parts wins.
_BEFORE_ATTENTION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sinks", ("sinks", "sink", "attention_sink_bias")),
    ("head", ("lm_head", "embed_out")),
    (
        "embeddings",
        (
            *("embed_tokens", "embed_positions", "wte", "wpe", "embed_in", "word_embeddings"),
            *("embed_tokens_per_layer", "embeddings"),
        ),
    ),
    ("attention", ("q_proj", "k_proj", "v_proj", "o_proj")),  # Nemotron-H calls the layer "mixer"
)
_BEHIND_ATTENTION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("router", ("router", "gate", "shared_expert_gate", "e_score_correction_bias")),
    ("experts", ("experts", "shared_expert", "shared_experts", "shared_mlp")),
    ("mlp", ("mlp", "feed_forward", "ffn", "block_sparse_moe")),
)


def group_of(name: str) -> str:
    """Return the group of a parameter, one of :data:`GROUPS`.

    A head that is tied to the embeddings is one parameter with them, and counts there.

    >>> group_of("model.layers.0.self_attn.sinks"), group_of("model.layers.0.mlp.router.weight")
    ('sinks', 'router')
    >>> group_of("model.layers.0.mlp.gate_proj.weight"), group_of("model.norm.weight")
    ('mlp', 'norms')
    """
    parts = name.split(".")
    if any("norm" in part or part.startswith("ln_") for part in parts):
        return "norms"
    for group, words in _BEFORE_ATTENTION:
        if not set(parts).isdisjoint(words):
            return group
    if any(word in part for part in parts for word in ("attn", "attention")):
        return "attention"  # before the routers: some attention has a gate
    for group, words in _BEHIND_ATTENTION:
        if not set(parts).isdisjoint(words):
            return group
    return "other"
