"""The sizes of a model, from its config.json alone: parameters by part, without torch.

The counts are exact for the families below (tests compare them with transformers' own modules).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch.errors import MismatchError

MXFP4_BITS = 4.25  # 4 per value, and 8 for the scale that 32 values share


@dataclass(frozen=True, slots=True)
class Traits:
    """What the parameters of a family have beyond the plain decoder layer.

    Attributes:
        qkv_bias, o_bias: None: as ``attention_bias`` in config.json says.
        qk_norm: "" none, "head" over a head's dimensions, "all" over all heads'.
        expert_width: the field with the width of an expert; "" for a dense family.
        expert_bias: experts and router have biases.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: str = ""
    expert_width: str = ""
    expert_bias: bool = False
    sinks: bool = False


FAMILIES = {
    "gpt_oss": Traits(expert_width="intermediate_size", expert_bias=True, sinks=True),
    "llama": Traits(),
    "mistral": Traits(qkv_bias=False, o_bias=False),
    "mixtral": Traits(qkv_bias=False, o_bias=False, expert_width="intermediate_size"),
    "olmoe": Traits(qk_norm="all", expert_width="intermediate_size"),
    "qwen2": Traits(qkv_bias=True, o_bias=False),
    "qwen3": Traits(qk_norm="head"),
    "qwen3_moe": Traits(qk_norm="head", expert_width="moe_intermediate_size"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder-only model.

    >>> Shape("llama", 32, 8, 2, 2, 1, 4, 16).layer_parameters
    592

    Attributes:
        width: of the MLP, or of one expert.
        experts, top_k: 0 for a dense model; every layer of an MoE model has experts.
        window: tokens that a sliding-window layer sees; None where all layers see everything.
        full_layers: layers without a window.
        quantised: the method of the released weights ("mxfp4"), or None.
        context: positions that the model was made for.
    """

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    experts: int = 0
    top_k: int = 0
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    window: int | None = None
    full_layers: int | None = None
    quantised: str | None = None
    context: int | None = None

    @property
    def traits(self) -> Traits:
        return FAMILIES[self.family]

    @property
    def q_width(self) -> int:
        """All heads' dimensions together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def expert_parameters(self) -> int:
        """Of all experts of one layer; 0 for a dense model."""
        biases = 2 * self.width + self.hidden if self.traits.expert_bias else 0
        return self.experts * (3 * self.hidden * self.width + biases)

    @property
    def expert_matrices(self) -> int:
        """The part of :attr:`expert_parameters` that MXFP4 packs: all but the biases."""
        return self.experts * 3 * self.hidden * self.width

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer."""
        traits = self.traits
        q, kv, hidden = self.q_width, self.kv_width, self.hidden
        count = hidden * (q + 2 * kv) + q * hidden + 2 * hidden
        if self.attention_bias if traits.qkv_bias is None else traits.qkv_bias:
            count += q + 2 * kv
        if self.attention_bias if traits.o_bias is None else traits.o_bias:
            count += hidden
        count += {"": 0, "head": 2 * self.head_dim, "all": q + kv}[traits.qk_norm]
        count += self.heads if traits.sinks else 0
        if not self.experts:
            bias = 2 * self.width + hidden if self.mlp_bias else 0
            return count + 3 * hidden * self.width + bias
        router = self.experts * (hidden + (1 if traits.expert_bias else 0))
        return count + router + self.expert_parameters

    @property
    def root_parameters(self) -> int:
        """Embedding, head and last norm: what FSDP2 wraps at the root."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def active_parameters(self) -> int:
        """That one token uses: its experts instead of all."""
        if not self.experts:
            return self.parameters
        idle = self.expert_parameters * (self.experts - self.top_k) // self.experts
        return self.parameters - self.layers * idle

    def kv_elements(self, tokens: int) -> int:
        """Elements of keys and values that one sequence of ``tokens`` keeps, all layers."""
        full = self.layers if self.full_layers is None else self.full_layers
        seen = min(tokens, self.window or tokens)
        return 2 * self.kv_width * (full * tokens + (self.layers - full) * seen)


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The shape that a parsed config.json describes.

    Raises:
        MismatchError: a family whose parameters this page does not know, or a field missing.
    """
    text = {**config, **(config.get("text_config") or {})}
    family = str(text.get("model_type"))
    if family not in FAMILIES:
        raise MismatchError(
            f"the memory of the family {family!r} cannot be predicted",
            f"known families: {', '.join(FAMILIES)}; try with few prompts: --num-prompts 2",
        )
    traits = FAMILIES[family]
    try:
        layers, hidden = int(text["num_hidden_layers"]), int(text["hidden_size"])
        heads = int(text["num_attention_heads"])
        experts = int(text.get("num_local_experts") or text.get("num_experts") or 0)
        return Shape(
            family=family,
            vocab=int(text["vocab_size"]),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            width=int(text[traits.expert_width or "intermediate_size"]),
            experts=experts if traits.expert_width else 0,
            top_k=int(text["num_experts_per_tok"]) if traits.expert_width else 0,
            tied=bool(text.get("tie_word_embeddings", False)),
            attention_bias=bool(text.get("attention_bias", family == "gpt_oss")),
            mlp_bias=bool(text.get("mlp_bias", False)),
            quantised=_quantised(text),
            context=text.get("max_position_embeddings"),
            **_windows(text, layers),
        )
    except KeyError as error:
        raise MismatchError(
            f"config.json of family {family!r} lacks {error}", "complete config.json"
        ) from error


def _windows(text: Mapping[str, Any], layers: int) -> dict[str, int | None]:
    types = text.get("layer_types")
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return {}
    full = types.count("full_attention") if types else 0
    return {"window": int(window), "full_layers": full}


def _quantised(text: Mapping[str, Any]) -> str | None:
    found = text.get("quantization_config") or {}
    return found.get("quant_method")
