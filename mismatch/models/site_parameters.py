"""Which parameters of a checkpoint decide what a module gives on a given input."""

from __future__ import annotations

import re
from collections.abc import Collection

MLP = r"(?:mlp|block_sparse_moe|feed_forward)"
# Parameters that decide what a site gives on a given input, by their names in a checkpoint. Rope
# has none.
PARAMETERS = {
    "embedding": r"embed_tokens|w[tp]e",
    "input_norm": r"input_layernorm|ln_1",
    "q": r"att\w*\.(?:q_|qkv|c_attn)",
    "k": r"att\w*\.(?:k_|kv_|qkv|c_attn)",
    "v": r"att\w*\.(?:v_|kv_|qkv|c_attn)",
    "attention": r"sinks",
    "attention_output": r"att\w*\.(?:o_proj|dense|c_proj)",
    "mixer": r"\.(?:mamba|linear_attn|mixer)\.",
    "attention_norm": r"post_(?:self_attn|attention)_layernorm",
    "post_norm": r"post_attention_layernorm|pre_f\w+_layernorm|ln_2",
    "router": rf"{MLP}\.(?:router|gate)\.",
    "mlp": rf"{MLP}\.",
    "shared_mlp": r"shared_mlp\.",
    "mlp_norm": r"post_(?:feedforward|mlp)_layernorm",
    "final_norm": r"(?:^|\.)(?:final_layer)?norm\.|ln_f|norm_f",
    "head": r"lm_head|embed_tokens",  # tied heads have no separate parameter
}


def decides(parameter: str, site: str, layers: Collection[int]) -> bool:
    """Return whether a parameter decides what a site gives in one of these layers.

    Args:
        layers: empty for a site outside of the layers.

    >>> decides("model.layers.1.self_attn.k_proj.bias", "k", (1, 2))
    True
    >>> decides("model.layers.3.self_attn.k_proj.bias", "k", (1, 2))
    False
    """
    pattern = PARAMETERS.get(site)
    layer = re.search(r"(?:^|\.)(?:layers|h)\.(\d+)\.", parameter)
    inside = (int(layer[1]) in layers) if layer else not layers
    return pattern is not None and inside and re.search(pattern, parameter) is not None
