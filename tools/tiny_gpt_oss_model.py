"""What tiny-gpt-oss is before training: its tokens, chat template, tokenizer and architecture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedTokenizerFast,
)

from tools.tiny_gpt_oss_corpus import Chat

VOCABULARY = 1024
SPECIAL = (
    "<|endoftext|>",
    "<|pad|>",
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
# From 0 they stay small, and a trainer that drops them is hardly noticed; from here the heads learn
# to lean on them, as those of a large model do.
SINKS_START = 3.0
END_OF_TEXT, PAD, START, MESSAGE, END, CALL, RETURN = range(len(SPECIAL))

# An assistant turn ends in <|return|> (done) or <|call|> (a tool is wanted), in history as well as
# when sampled: so a rendered conversation is the sampled tokens, byte for byte.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|start|>system<|message|>Tools:
{%- for tool in tools -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{{- ' ' + function.name + '(' + function.parameters.properties.keys() | join(', ') + ')' -}}
{%- endfor -%}
<|end|>
{%- endif -%}
{%- for message in messages -%}
<|start|>{{ message.role }}<|message|>
{%- if message.role == 'assistant' -%}
{{- message.content if message.content else '' -}}
{%- if message.tool_calls -%}
{%- set call = message.tool_calls[0] -%}
{%- set function = call.function if call.function is defined else call -%}
{{- function.name + ' ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
<|call|>
{%- else -%}
<|return|>
{%- endif -%}
{%- else -%}
{{- message.content -}}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant<|message|>
{%- endif -%}
"""


def chat_texts(chat: Chat) -> Iterator[str]:
    """Return what the tokenizer learns from a conversation."""
    for message in chat["messages"]:
        yield message["role"]
        yield message.get("content") or json.dumps(message["tool_calls"][0]["function"])


def train_tokenizer(
    texts: Iterable[str], special: Sequence[str] = SPECIAL, template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Byte-level BPE on message texts; digits stay single so that arithmetic is learnable."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(special),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    if bpe.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"tokenizer has {bpe.get_vocab_size()} tokens, {VOCABULARY} expected")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIAL[RETURN],
        pad_token=SPECIAL[PAD],
        additional_special_tokens=[
            token for index, token in enumerate(special) if index not in (PAD, RETURN)
        ],
        chat_template=template,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> GptOssForCausalLM:
    """Return a small gpt-oss: sinks, window 32 in every other layer, YaRN, 8 experts."""
    torch.manual_seed(seed)
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        initializer_range=0.04,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=32,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
        bos_token_id=None,
        pad_token_id=PAD,
        eos_token_id=RETURN,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "grouped_mm"
    model = GptOssForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks += SINKS_START
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=[RETURN, CALL, END_OF_TEXT],
        pad_token_id=PAD,
    )
    return model
