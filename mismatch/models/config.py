"""The one reader of config.json: where it is, without a network, and what it says about a model.

Parameters are counted by ``mismatch.models.sizes``. Nothing here imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.models import find_alias
from mismatch.run.files import parse_json, read_regular
from mismatch.run.hub import cached_snapshot
from mismatch.run.manifest import WRONG
from mismatch.specs import AS_STORED, EngineSpec

SHIPPED = "shipped with mismatch"
MXFP4_BITS = 4.25  # 4 per value, and 8 for the scale that 32 values share

# Names that families give to the same number.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K = (
    *("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"),
    "num_experts_per_token",
)
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
EXTRA_EXPERTS = ("zero_expert_num",)  # what routers choose apart from experts, counted after them
MOE_SWITCHES = ("is_moe", "enable_moe_block")  # off: a dense model, whatever the numbers say
CONTEXT = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    *("max_sequence_length", "max_seq_length", "seq_len", "model_max_length"),
)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
UNCUT = ("hidden_size_per_layer_input", "num_kv_shared_layers")  # of whole models alone
ROPE_SWITCH = "original_max_position_embeddings"
NOT_BY_LAYER = ("token_id", "token_ids", "architectures")
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
# In names of layer types that keep no keys and values.
STATELESS = ("linear", "mamba", "conv", "recurrent", "moe", "mlp")
# Families of transformers 5 whose attention learns a sink per head.
SINK_FAMILIES = {
    *("gpt_oss", "deepseek_v4", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"),
    "openai_privacy_filter",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model as its config.json describes it; 0 where the file does not say.

    >>> ModelConfig("llama", layers=2, heads=2, kv_heads=1, head_dim=4, value_dim=4).kv_elements(10)
    160

    Attributes:
        family: ``model_type`` of the text model.
        head_dim: of queries and keys; ``value_dim`` of values.
        width: of the MLP, or of one expert.
        experts, top_k: 0 for a dense model; of the first layer where layers differ.
        extra_experts: what routers choose apart from experts, numbered after them.
        window: tokens that a sliding-window layer sees; None where all layers see everything.
        layer_types: as in the file, () where it has none.
        quantised: the method of the released weights ("mxfp4"), or "".
        dtype: of the released weights, or "".
        context: positions that the model was made for.
        rope_switch: tokens (LongRoPE), beyond which rotary factors are others; 0: none.
        latent: of a token in one layer's cache where keys and values share a vector (MLA); else 0.
        end_ids: tokens that end a response.
    """

    family: str
    vocab: int = 0
    hidden: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    width: int = 0
    value_dim: int = 0
    experts: int = 0
    top_k: int = 0
    extra_experts: int = 0
    tied: bool = False
    window: int | None = None
    layer_types: tuple[str, ...] = ()
    quantised: str = ""
    dtype: str = ""
    context: int | None = None
    rope_switch: int = 0
    latent: int = 0
    end_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Any) -> ModelConfig:
        """Read a parsed config.json, or a configuration of transformers."""
        text, parsed = _Fields(config), isinstance(config, Mapping)
        family, hidden = str(text["model_type"] or ""), text.number("hidden_size")
        heads = text.number("num_attention_heads")
        head_dim = text.number("qk_head_dim", "head_dim") or hidden // max(heads, 1)
        dense = any(text[name] is False for name in MOE_SWITCHES)
        rank = text.number("kv_lora_rank")
        experts = 0 if dense else text.number(*EXPERTS)
        experts = experts if experts > 1 else 0
        kinds = tuple(text["layer_types"] or ())
        quantised = text["quantization_config"] or {}
        quantised = quantised if isinstance(quantised, Mapping) else vars(quantised)
        end = text["eos_token_id"]
        return cls(
            family=family,
            vocab=text.number("vocab_size"),
            hidden=hidden,
            layers=text.number(*LAYERS),
            heads=heads,
            kv_heads=text.number("num_key_value_heads") or heads,
            head_dim=head_dim,
            width=text.number(*(EXPERT_WIDTH if experts else ("intermediate_size",))),
            value_dim=text.number("v_head_dim") or head_dim,
            experts=experts,
            top_k=text.number(*TOP_K) if experts else 0,
            extra_experts=text.number(*EXTRA_EXPERTS) if experts else 0,
            tied=bool(text["tie_word_embeddings"]),
            window=_window(text, kinds),
            layer_types=kinds,
            quantised=str(quantised.get("quant_method") or ""),
            dtype=str(text["dtype"] or (text["torch_dtype"] if parsed else None) or ""),
            context=text.number(*CONTEXT) or None,
            rope_switch=_rope_switch(text),
            latent=rank + text.number("qk_rope_head_dim") if rank else 0,
            end_ids=tuple(end) if isinstance(end, list) else () if end is None else (end,),
        )

    @property
    def sinks(self) -> bool:
        """Whether heads learn attention sinks."""
        return self.family in SINK_FAMILIES

    @property
    def stored_dtype(self) -> str:
        """How the released weights are stored: the quantisation method, or their dtype."""
        return self.quantised or self.dtype

    def rests_in(self, master: str) -> str:
        """Return the dtype of a trainer's parameters at rest, as config.json lets one expect it.

        What "auto" takes is decided by the files: mismatch/training/source.py.
        """
        if master != "auto":
            return master
        return "bf16" if self.quantised == "mxfp4" or self.dtype == "bfloat16" else "fp32"

    @property
    def q_width(self) -> int:
        """All heads' dimensions together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys and values in one layer."""
        return self.latent or self.kv_heads * (self.head_dim + self.value_dim)

    def kv_elements(self, tokens: int) -> int:
        """Return elements of keys and values that one sequence of ``tokens`` keeps, all layers.

        The states that other layers keep (recurrent, linear attention) are not counted.
        """
        default = "full_attention" if self.window is None else "sliding_attention"
        kinds = self.layer_types or (default,) * self.layers
        attending = [kind for kind in kinds if not any(name in kind for name in STATELESS)]
        windows = sum(kind == "sliding_attention" for kind in attending)
        seen = windows * min(tokens, self.window or tokens) + (len(attending) - windows) * tokens
        return self.kv_width * seen


class _Fields:
    """Fields of a text model's configuration, by name; None where there is none."""

    def __init__(self, config: Any) -> None:
        if isinstance(config, Mapping):
            parts: dict[str, Any] = dict(config)
            while nested := [parts[n] for n in TEXT_PARTS if isinstance(parts.get(n), dict)]:
                parts = {k: v for k, v in parts.items() if k not in TEXT_PARTS} | nested[0]
            self.get: Callable[[str], Any] = parts.get
        else:
            text = config.get_text_config()
            if getattr(text, "is_heterogeneous", False):
                text = text.per_layer_config[0]
            self.get = lambda name: getattr(text, name, None)
        feed_forward = self.get("ffn_config")  # DBRX keeps its experts there
        self.inner = _Fields(feed_forward) if feed_forward else None

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def number(self, *names: str) -> int:
        """Return the first of these fields that is a positive number, or 0.

        Where it differs by layer (Hunyuan allows that) the first stands for all.
        """
        for name in names:
            value = self.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return self.inner.number(*names) if self.inner else 0


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A parsed config.json and where it was found.

    Attributes:
        source: "its directory", "the hub's cache" or "shipped with mismatch".
        weights: a directory that holds the weights as well, or None: they are not here yet.
    """

    values: dict[str, Any]
    source: str
    weights: Path | None

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.of(self.values)


def first_layers(values: dict[str, Any], kept: int) -> dict[str, Any]:
    """Return the config.json of a model's first layers: lists with an entry per layer are cut.

    >>> first_layers({"n_layer": 3, "layer_types": ["a", "b", "a"], "dense_layers": [0, 2]}, 2)
    {'n_layer': 2, 'layer_types': ['a', 'b'], 'dense_layers': [0]}

    Raises:
        MismatchError: the model has no more layers than that, or cannot be cut.
    """
    if part := next((name for name in TEXT_PARTS if isinstance(values.get(name), dict)), None):
        return values | {part: first_layers(values[part], kept)}
    number = next((name for name in LAYERS if isinstance(values.get(name), int)), None)
    if number is None or any(values.get(name) for name in UNCUT):
        family = values.get("model_type")
        raise MismatchError(f"--layers: a {family} model cannot be cut", "drop --layers")
    whole, cut = values[number], {**values, number: kept}
    if kept >= whole:
        fix = f"give fewer than {whole}, or drop --layers to run all of them"
        raise MismatchError(f"--layers {kept}: the model has {whole} layers", fix)
    if isinstance(wide := values.get("max_window_layers"), int):
        cut["max_window_layers"] = min(wide, kept)  # vLLM wants all or none
    for name, value in values.items():
        by_layer = isinstance(value, list) or (isinstance(value, str) and "pattern" in name)
        if not by_layer or name.endswith(NOT_BY_LAYER):
            continue
        if len(value) == whole:
            cut[name] = value[:kept]
        elif isinstance(value, list) and "layer" in name:  # numbers of layers
            cut[name] = [n for n in value if not isinstance(n, int) or n < kept]
    return cut


def find_config(model: str, revision: str | None = None, layers: int | None = None) -> FoundConfig:
    """Return the config.json of a resolved model (a directory or a hub id), without a network.

    Raises:
        MismatchError: it is neither here nor shipped, cannot be read, or has no more ``layers``.
    """
    if layers is not None:
        found = find_config(model, revision)
        return replace(found, values=first_layers(found.values, layers))
    if Path(model).is_dir():
        return FoundConfig(read_config(Path(model)), "its directory", Path(model))
    cached = cached_snapshot(model, revision)
    if cached is not None:
        here = cached if any(cached.glob("*.safetensors")) else None
        return FoundConfig(read_config(cached), "the hub's cache", here)
    alias = find_alias(model)
    if alias is not None and revision is None:
        return FoundConfig(alias.config, SHIPPED, None)
    at = f" at revision {revision}" if revision else ""
    fault = f"the config.json of {model}{at} is not on this machine"
    fix = f"fetch it: hf download {model} config.json; or give a directory that holds it"
    raise MismatchError(fault, fix)


def is_moe(model: str, revision: str | None = None) -> bool | None:
    """Whether a model (directory or hub id) has experts; None where it is not on this machine."""
    shape = known_model(model, revision)
    return None if shape is None else shape.experts > 0


def known_model(model: str, revision: str | None = None) -> ModelConfig | None:
    """Return what a model's own config.json says of it; None where it is not on this machine."""
    try:
        config = find_config(model, revision)
    except MismatchError:
        return None
    return None if config.source == SHIPPED else config.model


def serves_mxfp4(engine: EngineSpec) -> bool:
    """Whether an engine gets experts in MXFP4, of a directory or a hub id alike."""
    if engine.weights != AS_STORED:
        return engine.weights == "mxfp4"
    try:
        return find_config(engine.model, engine.revision).model.quantised == "mxfp4"
    except MismatchError:  # not here: nothing is known of it
        return False


UNPACKING = ("vllm",)  # engines whose loader dequantises MXFP4 experts (engines/vllm/loader.py)


def unpacks_mxfp4(engine: EngineSpec) -> bool:
    """Whether an engine is to serve MXFP4 experts dequantised, and does it while it loads them.

    Another engine reads a copy of the checkpoint (mismatch/models/derived.py).
    """
    asked = engine.engine in UNPACKING and engine.weights == "bf16" and engine.adapter is None
    return asked and serves_mxfp4(replace(engine, weights=AS_STORED))


def read_config(directory: Path, name: str = "config.json") -> dict[str, Any]:
    """Return a JSON file of a checkpoint's directory.

    Raises:
        MismatchError: it cannot be read, or is no JSON object.
    """
    path = directory / name
    # transformers writes an infinite number as an object.
    number = lambda held: float(held["__float__"]) if held.keys() == {"__float__"} else held  # noqa: E731
    try:
        parsed = parse_json(read_regular(path), object_hook=number)
    except (OSError, *WRONG) as error:
        fault = f"{path} cannot be read: {error}"
        raise MismatchError(fault, f"give a model directory with a valid {name}") from error
    if not isinstance(parsed, dict):
        raise MismatchError(f"{path} is not a JSON object", f"give a valid {name}")
    if not isinstance(parsed.get("model_type", ""), str):
        raise MismatchError(f"{path}: model_type is not text", "give a valid config.json")
    return parsed


def _rope_switch(text: _Fields) -> int:
    """Return the length beyond which LongRoPE's long factors serve; 0: another rope, or none."""
    rope = text["rope_parameters"] or text["rope_scaling"]
    if not isinstance(rope, Mapping):
        return 0
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return 0
    return _Fields(dict(rope)).number(ROPE_SWITCH) or text.number(ROPE_SWITCH)


def _window(text: _Fields, kinds: tuple[str, ...]) -> int | None:
    window = text["sliding_window"]
    if not isinstance(window, int) or not window or text["use_sliding_window"] is False:
        return None
    return None if kinds and "sliding_attention" not in kinds else window
