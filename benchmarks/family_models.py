"""Tiny checkpoints of the families that people train, whose distributions are not flat."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

PAD, EOS = 1, 6  # <|pad|> and <|return|> of the tokenizer of tiny-gpt-oss
VOCABULARY = 1024
STEPS, PEAK_LR = 400, 3e-3
NATS = "nats-per-token"  # a file in the checkpoint
_WINDOW = {"sliding_window": 32}
# The only sizes of latent attention that vLLM's CPU kernels take are those of the released models.
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
# model_type -> what it needs beyond tests/family_configs.py; released configs have the rest.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 256},
    "qwen2": {"intermediate_size": 256},
    "qwen3": {"intermediate_size": 256},
    "mistral": {"intermediate_size": 256, **_WINDOW},
    "gemma2": {
        "intermediate_size": 256,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
        **_WINDOW,
    },
    "gemma3_text": {"intermediate_size": 256, "query_pre_attn_scalar": 32, **_WINDOW},
    "phi3": {"intermediate_size": 256, "sliding_window": None},
    "olmo2": {"intermediate_size": 256},
    "glm4": {"intermediate_size": 256},
    "granite": {"intermediate_size": 256},
    "seed_oss": {"intermediate_size": 256},
    "gpt2": {"n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": 512},
    "qwen3_moe": {"mlp_only_layers": []},
    "mixtral": {"sliding_window": None},
    "olmoe": {},
    "glm4_moe": {},
    "ernie4_5_moe": {},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | {"index_topk": 32},
    "qwen3_next": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "falcon_h1": {
        "intermediate_size": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_ssm": 256,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "granitemoehybrid": {},
    "nemotron_h": {},
}

# vLLM's own latent attention is wrong in its build for CPUs, transformers' code in vLLM is not; and
# that build does not run the other two.
FLAGS = {
    "deepseek_v3": ("--engine-arg", "model_impl=transformers"),
    "deepseek_v32": ("--engine", "transformers"),
    "nemotron_h": ("--engine", "transformers"),
}


def trained(family: str, place: Path, seconds: float) -> float:
    """Return the nats per token of the last steps of a family's training.

    Its bf16 checkpoint is in ``place`` afterwards, with the tokenizer of tiny-gpt-oss.

    Args:
        seconds: training stops after them, or after STEPS steps.
    """
    if (place / NATS).is_file():
        return float((place / NATS).read_text())
    import torch
    from torch.nn import functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mismatch.models import EMBEDDED
    from tests.families import configuration
    from tools.train_tiny_gpt_oss import PLAIN, batches, documents

    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED["tiny-gpt-oss"])
    config = configuration(
        family,
        **{
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
            "pad_token_id": PAD,
            "bos_token_id": None,
            "eos_token_id": EOS,
            **FAMILIES[family],
        },
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98))
    data = batches(documents(PLAIN, tokenizer, seed=2), random.Random(2))
    start, losses = time.monotonic(), []
    for step in range(STEPS):
        done = max(step / STEPS, (time.monotonic() - start) / seconds)
        if done >= 1:
            break
        optimiser.param_groups[0]["lr"] = PEAK_LR * min(1.0, (step + 1) / 30) * (1 - 0.98 * done)
        ids, mask = next(data)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        wanted = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    model.to(torch.bfloat16).save_pretrained(place)
    tokenizer.save_pretrained(place)
    (place / NATS).write_text(f"{sum(losses[-10:]) / 10:.3f}\n")
    return trained(family, place, seconds)
