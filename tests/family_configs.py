"""Fields of the tiny configurations of every MoE family: 4 layers, 8 experts, 2 per token.

Sizes are those that vLLM's CPU kernels take; what a family needs beyond the common fields, and what
released configs have that transformers' class does not (vLLM reads it), is in ``EXTRA``.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "num_shared_experts": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "sliding_window": 16,
    "first_k_dense_replace": 1,
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MLA = {"num_key_value_heads": 4}
_BIASED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # as released
_ALTERNATING = ["linear_attention", "full_attention"] * 2
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
EXTRA: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True},
    "axk1": _MLA | _BIASED,
    "axk2": _MLA | _BIASED,
    "deepseek_v2": _MLA | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _MLA | _BIASED,
    "deepseek_v32": _MLA | _BIASED,
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": _MLA | _BIASED,
    "glm_moe_dsa": _MLA | _BIASED,
    "dbrx": {
        "d_model": 128,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 32,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "ffn_act_fn": {"name": "silu"},
        },
    },
    "doge": {"is_moe": True, "num_experts": 16},
    "ernie4_5_moe": {"moe_k": 2},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "shared_intermediate_size": 32,
    },
    "gpt_oss": {"rope_parameters": _YARN},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "kimi_linear": {
        **_MLA,
        "q_lora_rank": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "n_group": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": _ALTERNATING,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4_text": {
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
    },
    "longcat_flash": {
        **_MLA,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "ffn_hidden_size": 64,
        "head_dim": 8,
        "moe_topk": 2,
        "n_routed_experts": 6,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32,
    },
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["full_attention"] * 4,
    },
    "minimax_m2": {"rotary_dim": 32, "head_dim": 32, "scoring_func": "sigmoid"},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
        "chunk_size": 16,
    },
    "qwen2_moe": {"decoder_sparse_step": 2},
    "mellum": {"num_experts": 8},
    "qwen3_moe": {"num_experts": 8, "mlp_only_layers": [0, 2]},
    "qwen4_exp_text": {
        "ngram_vocab_size_base": 100,
        "make_ngram_vocab_size_divisible_by": 8,
        "hc_lowrank": 8,
        "split_ngram_parts": 2,
        "layer_types": _ALTERNATING,
        "ple_embed_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"router_hidden_size": 16, "num_experts_per_tok": 1},
}
# Read through the text model inside them: nothing of their own to route.
COMPOSITES = {
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
