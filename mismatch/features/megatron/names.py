"""Where a Hugging Face checkpoint holds the weights of a Megatron-Core GPT model.

A small table of names for dense and MoE decoders, in plain Python: the check before a run and the
ranks that load read the same one. It holds what Megatron-Core's own ``GPTModel`` can hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mismatch.errors import MismatchError

Kind = Literal["copy", "qkv", "halves", "woven", "turned"]
"""How a parameter of Megatron's is made of tensors of the checkpoint:

- ``copy``: it is the tensor;
- ``qkv``: query, key and value rows, interleaved by query group;
- ``halves``: gate above up, each cut over the ranks by itself;
- ``woven``: one expert's gate and up as columns in turn (gpt-oss), made ``halves``;
- ``turned``: one expert's matrix, transposed (gpt-oss).
"""
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# One expert, in Megatron's sequence of MLPs and in TransformerEngine's grouped layers.
EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.)(weight|bias)"
    r"|(linear_fc[12]\.)(weight|bias)(\d+))"
)
TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
PARTS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "input_layernorm.weight": ("copy", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": (
        "qkv",
        tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    ),
    "self_attention.linear_qkv.bias": (
        "qkv",
        tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    ),
    "self_attention.linear_proj.weight": ("copy", ("self_attn.o_proj.weight",)),
    "self_attention.linear_proj.bias": ("copy", ("self_attn.o_proj.bias",)),
    "self_attention.q_layernorm.weight": ("copy", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("copy", ("self_attn.k_norm.weight",)),
    "self_attention.core_attention.softmax_offset": ("copy", ("self_attn.sinks",)),
    "pre_mlp_layernorm.weight": ("copy", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("halves", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("copy", ("mlp.down_proj.weight",)),
}
# TransformerEngine keeps a norm in the linear layer that follows it.
PARTS["self_attention.linear_qkv.layer_norm_weight"] = PARTS["input_layernorm.weight"]
PARTS["mlp.linear_fc1.layer_norm_weight"] = PARTS["pre_mlp_layernorm.weight"]


@dataclass(frozen=True)
class Family:
    """What a family has beyond a dense Llama."""

    router: str = ""
    """Name of a layer's router in the checkpoint; "": the family is dense."""
    expert: tuple[str, ...] = ()
    """Names of one expert's gate, up and down matrices, with ``{}`` for its number."""
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(
        "mlp.gate", tuple(f"mlp.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")),
        qk_norm=True,
    ),
    "mixtral": Family(
        "block_sparse_moe.gate",
        tuple(f"block_sparse_moe.experts.{{}}.{each}" for each in ("w1", "w3", "w2")),
    ),
    "gpt_oss": Family("mlp.router"),
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Of what one parameter of Megatron's is made."""

    kind: Kind
    tensors: tuple[str, ...]
    expert: int | None = None
    """Which entry of the tensors' first dimension; None: they hold one expert or none."""


@dataclass(frozen=True)
class Shape:
    """A decoder as its config.json describes it, with the names of Megatron's configuration."""

    config: Mapping[str, Any]

    @property
    def family(self) -> Family:
        return FAMILIES[self.config["model_type"]]

    def number(self, name: str) -> int:
        """Return a count of the configuration.

        Raises:
            MismatchError: it has none.
        """
        value = self.config.get(name)
        if not isinstance(value, int):
            raise MismatchError(f"config.json has no {name}", "use a complete checkpoint")
        return value

    @property
    def heads(self) -> int:
        return self.number("num_attention_heads")

    @property
    def groups(self) -> int:
        """Return the query groups: key and value heads."""
        return self.config.get("num_key_value_heads") or self.heads

    @property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or self.number("hidden_size") // self.heads

    @property
    def experts(self) -> int:
        """Return how many experts a MoE layer has; 0: the model is dense."""
        if not self.family.router:
            return 0
        # Released Qwen3-MoE has the first name, and transformers 5 writes the second.
        return self.number("num_experts" if "num_experts" in self.config else "num_local_experts")

    @property
    def expert_width(self) -> int:
        return self.config.get("moe_intermediate_size") or self.number("intermediate_size")

    @property
    def biased(self) -> bool:
        """Return whether queries, keys and values have a bias."""
        return self.family.qkv_bias or bool(self.config.get("attention_bias"))

    def is_moe(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        if not self.experts or layer in (self.config.get("mlp_only_layers") or ()):
            return False
        return (layer + 1) % (self.config.get("decoder_sparse_step") or 1) == 0

    def source(self, name: str) -> Source:
        """Return of what a parameter is made.

        Args:
            name: Megatron's, with the numbers of layer and expert in the whole model.

        Raises:
            MismatchError: the table has no such parameter.
        """
        if name in TOP:
            tied = name == "output_layer.weight" and self.config.get("tie_word_embeddings")
            return Source("copy", (TOP["embedding.word_embeddings.weight"] if tied else TOP[name],))
        found = LAYER.fullmatch(name)
        if not found:
            raise _unknown(name, self.config["model_type"])
        prefix, part = f"model.layers.{found[1]}.", found[2]
        router = re.fullmatch(r"mlp\.router\.(weight|bias)", part)
        expert = EXPERT.fullmatch(part)
        if router:
            return Source("copy", (f"{prefix}{self.family.router}.{router[1]}",))
        if expert:
            number = int(expert[1] or expert[6])
            first = "fc1" in (expert[2] or expert[4])
            kind = expert[3] or expert[5]
            if self.config["model_type"] == "gpt_oss":
                stack = "gate_up_proj" if first else "down_proj"
                stack += "_bias" if kind == "bias" else ""
                how: Kind = "woven" if first else "copy" if kind == "bias" else "turned"
                return Source(how, (f"{prefix}mlp.experts.{stack}",), number)
            names = [f"{prefix}{each.format(number)}.{kind}" for each in self.family.expert]
            return Source("halves", tuple(names[:2])) if first else Source("copy", (names[2],))
        if part not in PARTS:
            raise _unknown(name, self.config["model_type"])
        how, tensors = PARTS[part]
        return Source(how, tuple(prefix + each for each in tensors))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors that a checkpoint of this configuration has, with their shapes."""
        return dict(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        config, family = self.config, self.family
        hidden, vocab = self.number("hidden_size"), self.number("vocab_size")
        gpt_oss = config["model_type"] == "gpt_oss"
        rows = {"q": self.heads * self.head_dim, "k": self.groups * self.head_dim}
        rows["v"] = rows["k"]
        yield "model.embed_tokens.weight", (vocab, hidden)
        yield "model.norm.weight", (hidden,)
        if not config.get("tie_word_embeddings"):
            yield "lm_head.weight", (vocab, hidden)
        for layer in range(self.number("num_hidden_layers")):
            at = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{at}{norm}.weight", (hidden,)
            for part, size in rows.items():
                yield f"{at}self_attn.{part}_proj.weight", (size, hidden)
                if self.biased:
                    yield f"{at}self_attn.{part}_proj.bias", (size,)
            yield f"{at}self_attn.o_proj.weight", (hidden, rows["q"])
            if gpt_oss:
                yield f"{at}self_attn.o_proj.bias", (hidden,)
                yield f"{at}self_attn.sinks", (self.heads,)
            if family.qk_norm:
                for part in "qk":
                    yield f"{at}self_attn.{part}_norm.weight", (self.head_dim,)
            if not self.is_moe(layer):
                width = self.number("intermediate_size")
                yield f"{at}mlp.gate_proj.weight", (width, hidden)
                yield f"{at}mlp.up_proj.weight", (width, hidden)
                yield f"{at}mlp.down_proj.weight", (hidden, width)
                continue
            experts, width = self.experts, self.expert_width
            yield f"{at}{family.router}.weight", (experts, hidden)
            if gpt_oss:
                yield f"{at}{family.router}.bias", (experts,)
                yield f"{at}mlp.experts.gate_up_proj", (experts, hidden, 2 * width)
                yield f"{at}mlp.experts.gate_up_proj_bias", (experts, 2 * width)
                yield f"{at}mlp.experts.down_proj", (experts, width, hidden)
                yield f"{at}mlp.experts.down_proj_bias", (experts, hidden)
                continue
            for number in range(experts):
                gate, up, down = (each.format(number) for each in family.expert)
                yield f"{at}{gate}.weight", (width, hidden)
                yield f"{at}{up}.weight", (width, hidden)
                yield f"{at}{down}.weight", (hidden, width)


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return a decoder that the table has.

    Raises:
        MismatchError: another family, or a form of one that Megatron's spec cannot hold.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise MismatchError(
            f"--scorer megatron has no table of names for the family {family}",
            f"it has {', '.join(FAMILIES)}; else your own loader: --scorer package.module:Class",
        )
    if "quantization_config" in config:
        raise MismatchError(
            "--scorer megatron loads bf16, fp16 or fp32 weights, and this checkpoint is quantised",
            "name the checkpoint that the trainer starts from",
        )
    if config.get("hidden_act", "silu") != "silu":
        raise MismatchError(
            f"--scorer megatron: {family} with hidden_act {config['hidden_act']}",
            "its table has silu alone",
        )
    return Shape(config)


def _unknown(name: str, family: str) -> MismatchError:
    return MismatchError(
        f"Megatron-Core's model has the parameter {name}, which the table of {family} lacks",
        "use megatron-core 0.16, or your own loader as --scorer package.module:Class",
    )
