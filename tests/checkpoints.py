"""Tiny checkpoints with random weights, and rollouts for them: what tests of both sides load.

``make("gpt_oss", directory)`` writes config, bf16 safetensors and a byte-level tokenizer. Weights
are scaled so that the models have opinions: peaked routers, non-trivial sinks, entropies well under
log(V). Nothing here is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mismatch.types import Rollout, Sampling

VOCABULARY = 320
FAMILIES = ("gpt_oss", "qwen3_moe", "qwen3", "llama")
FURTHER_NORMS = ("gemma2", "gemma3", "glm4")  # norms behind attention and MLP too
# Norms behind alone, other names, two mixers at once, one or the other, no norm before the MLP, and
# norms of names that no other family has.
OTHER_LAYERS = ("olmo2", "gpt2", "falcon_h1", "granitemoehybrid", "cohere", "apertus")
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2}
_GEMMA = {
    "intermediate_size": 128,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
_MAMBA = {
    "intermediate_size": 128,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOssConfig",
        {
            **_MOE,
            "num_local_experts": 8,
            "intermediate_size": 64,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_MOE,
            "num_experts": 8,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3": ("Qwen3Config", {"intermediate_size": 128}),
    "llama": ("LlamaConfig", {"intermediate_size": 128}),
    "gpt2": ("GPT2Config", {}),
    "gemma2": ("Gemma2Config", {**_GEMMA, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA, "query_pre_attn_scalar": 16}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_MOE,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "head_dim": 8,  # that rope turns
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "glm4": ("Glm4Config", {"intermediate_size": 128, "attention_bias": True}),
    "olmo2": ("Olmo2Config", {"intermediate_size": 128}),
    "falcon_h1": ("FalconH1Config", {**_MAMBA, "mamba_d_head": 32, "mamba_d_ssm": 128}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_MOE,
            **_MAMBA,
            "num_local_experts": 8,
            "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "cohere": ("CohereConfig", {"intermediate_size": 128}),
    "apertus": ("ApertusConfig", {"intermediate_size": 128}),
}


def configuration(family: str, **overrides: Any) -> Any:
    """transformers' configuration of one of ``FAMILIES``."""
    import transformers

    name, fields = _FAMILY[family]
    return getattr(transformers, name)(**{**_COMMON, **fields, **overrides})


def make(family: str, directory: Path | str, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny checkpoint and return its directory.

    Args:
        family: one of ``FAMILIES`` or ``FURTHER_NORMS``.
        overrides: fields of the family's configuration, e.g. ``tie_word_embeddings=True``.
    """
    import torch
    import transformers

    config = configuration(family, **overrides)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_draw(parameter_name, parameter, config, generator))
    directory = Path(directory)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def _draw(name: str, parameter: Any, config: Any, generator: Any) -> Any:
    import torch

    noise = torch.randn(parameter.shape, generator=generator)
    if "norm" in name or ".ln_" in name:
        return 1 + 0.1 * noise
    if "sinks" in name:
        return noise
    if "bias" in name:
        return 0.1 * noise
    if "embed" in name:
        return noise * (2.0 / config.hidden_size**0.5 if config.tie_word_embeddings else 1.0)
    if "lm_head" in name:
        return noise * 2.0 / config.hidden_size**0.5
    fan_in = parameter.shape[-2 if "experts" in name and "gpt_oss" in config.model_type else -1]
    return noise * 1.2 / fan_in**0.5


def make_mxfp4(directory: Path | str, plain: Path | str, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny gpt-oss in the released format, and the same model dequantised under ``plain``.

    As published, experts come as 4-bit values, two to a byte (``_blocks``), with one power of two
    per 32 of them (``_scales``), outputs before inputs. The plain checkpoint is float32 and holds
    exactly those numbers, computed here from the format's definition and by nobody's loader.
    """
    import json

    import torch
    from safetensors.torch import load_file, save_file

    directory, plain = make("gpt_oss", directory, seed, **overrides), Path(plain)
    plain.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        (plain / path.name).write_bytes(path.read_bytes())
    generator = torch.Generator().manual_seed(seed)
    packed, values = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name], values[name] = tensor, tensor.float()
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32, 16)
        # Powers of two around those that give each weight matrix its usual size.
        usual = 127 - round(float(np.log2(3 * inputs**0.5)))
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(usual - 1, usual + 2, shape[:3], generator=generator)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales.to(torch.uint8)
        values[name] = _dequantised(blocks, scales).transpose(1, 2).contiguous()
    save_file(packed, directory / "model.safetensors", {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _dequantised(blocks: Any, scales: Any) -> Any:
    """[E, out, in / 32, 16] bytes and [E, out, in / 32] exponents to [E, out, in] float32."""
    import torch

    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([sizes, -sizes])  # sign, two bits of exponent, one of mantissa
    nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # the low half comes first
    values = table[nibbles.long()] * torch.exp2(scales.float() - 127)[..., None]
    return values.flatten(2)


def tokenizer() -> Any:
    """A byte-level tokenizer without merges: ids 0-2 pad, bos, eos, then the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({token: index for index, token in enumerate(names)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def rollout(
    lengths: tuple[tuple[int, int], ...] = ((5, 12), (5, 30), (9, 7), (9, 40), (3, 21)),
    sampling: Sampling | None = None,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
) -> Rollout:
    """Random token ids: (prompt, response) lengths per sequence, neighbours share a prompt."""
    draw = np.random.default_rng(seed)
    sizes = [prompt + response for prompt, response in lengths]
    masks = [np.arange(prompt + response) >= prompt for prompt, response in lengths]
    mask = np.concatenate(masks)
    return Rollout(
        token_ids=draw.integers(3, vocabulary, sum(sizes)),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.arange(len(lengths)) // 2,
        finish_reason=("length",) * len(lengths),
        sampling=sampling or Sampling(),
        fingerprint={"engine": "none"},
    )


def tensors_of(directory: Path) -> dict[str, Any]:
    """All tensors of a checkpoint."""
    from safetensors.torch import load_file

    return {k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()}
