"""Aliases resolve, and the shipped configs have the sizes of the released models."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers.modeling_utils  # noqa: F401  sizes are then counted in this process
from huggingface_hub import constants

from mismatch.errors import MismatchError, did_you_mean
from mismatch.models import (
    ALIASES,
    CONFIGS,
    EMBEDDED,
    EMBEDDED_ACTIVE,
    EMBEDDED_PARAMETERS,
    find_alias,
    resolve_model,
)
from mismatch.models import config as config_module
from mismatch.models.config import FoundConfig, ModelConfig, find_config, read_config
from mismatch.models.sizes import SizedModel, sized

# One alias per family: building all of them only repeats the same formulas.
FAMILY_EXAMPLES = (
    "gpt-oss-20b",
    "qwen3-30b-a3b",
    "qwen3-4b",
    "qwen2.5-7b-instruct",
    "llama-3.1-8b-instruct",
    "mixtral-8x7b-instruct",
    "olmoe-1b-7b",
    "qwen3-next-80b-a3b-instruct",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
    "glm-4.5-air",
    "gemma-3-1b-it",
    "olmo-3-7b-instruct",
)
# Billions of parameters as the makers or the hub give them, not counted here: model cards and
# reports (Gemma 3: embeddings, layers and vision tower; Moonlight: 15.29 and 0.67 of embeddings;
# GLM-4.7 with its layer that predicts several tokens), else what GGUF files or loaded checkpoints
# of others hold (Qwen3.5 up to 9B without vision, Olmo 3).
PUBLISHED = {
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "qwen3-235b-a22b": 235,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "qwen3-14b": 14.8,
    "qwen3-8b": 8.2,
    "qwen3-4b": 4.0,
    "qwen3-1.7b": 1.7,
    "qwen3-0.6b": 0.6,
    "qwen2.5-7b-instruct": 7.61,
    "qwen2.5-1.5b-instruct": 1.54,
    "qwen2.5-0.5b-instruct": 0.49,
    "qwen2.5-0.5b": 0.49,
    "llama-3.1-8b-instruct": 8.03,
    "mixtral-8x7b-instruct": 46.7,
    "olmoe-1b-7b": 6.92,
    "qwen3-4b-instruct-2507": 4.0,
    "qwen3-30b-a3b-instruct-2507": 30.5,
    "qwen3-235b-a22b-instruct-2507": 235,
    "qwen3-next-80b-a3b-instruct": 80,
    "qwen3.5-0.8b": 0.752393024,
    "qwen3.5-2b": 1.88,
    "qwen3.5-4b": 4.205751296,
    "qwen3.5-9b": 8.953803264,
    "qwen3.5-27b": 27,
    "qwen3.5-35b-a3b": 35,
    "qwen3.5-122b-a10b": 122,
    "qwen3.5-397b-a17b": 397,
    "glm-4.5": 355,
    "glm-4.5-air": 106,
    "glm-4.7": 358,
    "glm-4.7-flash": 30,
    "deepseek-v2-lite": 16,
    "deepseek-v3": 671,
    "moonlight-16b-a3b-instruct": 15.29 + 0.67,
    "gpt-oss-20b-bf16": 20.9,
    "gpt-oss-120b-bf16": 116.8,
    "gemma-3-1b-it": 0.302 + 0.698,
    "gemma-3-4b-it": 4.3,
    "gemma-3-12b-it": 12.2,
    "gemma-3-27b-it": 27.4,
    "olmo-3-7b-instruct": 7.298011136,
    "olmo-3-32b-think": 32.233522176,
}


def active(model: SizedModel) -> int:
    """Parameters that one token uses: its experts instead of all."""
    if not model.experts:
        return model.parameters
    return (
        model.parameters - model.expert_parameters * (model.experts - model.top_k) // model.experts
    )


def off(model: SizedModel, name: str) -> float:
    """Share of the published count by which the counted one is off."""
    return abs(model.parameters / 1e9 / PUBLISHED[name] - 1)


@pytest.mark.parametrize("name", ALIASES)
def test_the_shipped_config_has_the_published_parameter_count(name):
    """A wrong width, depth, vocabulary or expert count cannot give the published number."""
    alias = ALIASES[name]
    model = sized(FoundConfig(alias.config, "shipped", None))
    assert model.parameters == alias.parameters
    assert active(model) == (alias.active or alias.parameters)
    assert off(model, name) < 0.02


def test_every_alias_has_a_published_count():
    assert set(PUBLISHED) == set(ALIASES)


@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [
        ("qwen3.5-9b", "vocab_size", 151936),
        ("qwen3.5-35b-a3b", "moe_intermediate_size", 768),
        ("glm-4.5-air", "num_hidden_layers", 48),
        ("glm-4.7-flash", "moe_intermediate_size", 1408),
        ("deepseek-v3", "num_hidden_layers", 63),
        ("moonlight-16b-a3b-instruct", "n_routed_experts", 72),
        ("gemma-3-4b-it", "intermediate_size", 9216),
        ("olmo-3-32b-think", "num_key_value_heads", 40),
    ],
)
def test_a_wrong_field_is_seen_in_the_published_count(name, field, wrong):
    values = ALIASES[name].config
    part = values.get("text_config", values)
    assert part[field] != wrong
    part[field] = wrong
    assert off(sized(FoundConfig(values, "shipped", None)), name) > 0.02


def test_a_model_that_is_stored_in_fp8_takes_a_byte_for_each_value_of_a_layer():
    model = sized(FoundConfig(ALIASES["deepseek-v3"].config, "shipped", None))
    stored, dequantised = (model.stored_bytes(2, keeps_packed=kept) for kept in (True, False))
    assert stored / 1e9 == pytest.approx(671 + 2 * 129280 * 7168 / 1e9, rel=0.01)
    assert dequantised == 2 * model.parameters


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_models_have_the_listed_sizes(name):
    model = sized(find_config(str(EMBEDDED[name])))
    assert model.parameters == EMBEDDED_PARAMETERS
    assert active(model) == EMBEDDED_ACTIVE


@pytest.mark.slow
def test_counting_in_a_process_of_its_own_gives_the_same():
    found = find_config(str(EMBEDDED["tiny-gpt-oss"]))
    code = (
        "from mismatch.models.config import find_config; from mismatch.models.sizes import sized; "
        f"import sys; print(sized(find_config({str(EMBEDDED['tiny-gpt-oss'])!r})).parameters, "
        "'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(sized(found).parameters), "False"]


def test_every_shipped_file_belongs_to_an_alias():
    names = {alias.of or alias.name for alias in ALIASES.values()}
    assert {path.stem for path in CONFIGS.glob("*.json")} == names


def test_gpt_oss_is_released_in_mxfp4_with_sinks_and_alternating_windows():
    shape = ModelConfig.of(ALIASES["gpt-oss-20b"].config)
    assert shape.quantised == "mxfp4"
    assert shape.sinks
    assert (shape.window, shape.layer_types.count("full_attention"), shape.layers) == (128, 12, 24)
    assert (shape.experts, shape.top_k) == (32, 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("openai/gpt-oss-20b", "openai/gpt-oss-20b"),
        ("someone/else", "someone/else"),
        ("tiny-gpt-oss", str(EMBEDDED["tiny-gpt-oss"])),
    ],
)
def test_resolve(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model(name) == expected


def test_a_directory_of_that_name_wins_over_the_alias(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "config.json").write_text("{}")
    assert resolve_model("qwen3-8b") == "qwen3-8b"


def test_a_near_miss_names_the_alias():
    with pytest.raises(MismatchError) as error:
        resolve_model("gpt-oss-20")
    assert error.value.fix.startswith(did_you_mean("gpt-oss-20", ["gpt-oss-20b"]).rstrip("? "))
    assert "docs/reference/models.md" in error.value.fix


def test_find_alias_by_hub_id():
    alias = find_alias("QWEN/qwen3-0.6b")
    assert alias is not None
    assert alias.name == "qwen3-0.6b"
    assert find_alias("qwen3-0.6") is None
    other = find_alias("Qwen/Qwen3-4B-Thinking-2507")
    assert other is not None
    assert other.name == "qwen3-4b-instruct-2507"


def test_a_config_of_another_differs_in_what_the_table_says():
    whole, bf16 = (ALIASES[name].config for name in ("gpt-oss-20b", "gpt-oss-20b-bf16"))
    changed = {k for k in whole.keys() | bf16.keys() if whole.get(k) != bf16.get(k)}
    assert changed == {"dtype", "quantization_config"}
    assert (ModelConfig.of(bf16).quantised, ModelConfig.of(bf16).rests_in("auto")) == ("", "bf16")


# ---------------------------------------------------------------- config.json without a network


def fill_cache(folder, model, commit, values, ref=None):
    snapshot = folder / f"models--{model.replace('/', '--')}" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(values))
    if ref is not None:
        pointer = snapshot.parent.parent / "refs" / ref
        pointer.parent.mkdir()
        pointer.write_text(commit)
    return snapshot


def test_the_hub_cache_comes_before_the_shipped_config(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert find_config("openai/gpt-oss-20b").source == "shipped with mismatch"
    snapshot = fill_cache(tmp_path, "openai/gpt-oss-20b", "abc", {"model_type": "x"}, "main")
    config = find_config("openai/gpt-oss-20b")
    assert (config.values, config.source, config.weights) == (
        {"model_type": "x"},
        "the hub's cache",
        None,
    )
    (snapshot / "model.safetensors").write_text("")
    assert find_config("openai/gpt-oss-20b").weights == snapshot


def test_a_revision_is_never_answered_by_another_ones_config(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    fill_cache(tmp_path, "openai/gpt-oss-20b", "abc", {"model_type": "x"}, "main")
    assert find_config("openai/gpt-oss-20b", "abc").values == {"model_type": "x"}
    with pytest.raises(MismatchError, match="at revision other"):
        find_config("openai/gpt-oss-20b", "other")


def test_an_unknown_model_says_how_to_fetch_its_config(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(MismatchError) as error:
        find_config("someone/else")
    assert "hf download someone/else" in error.value.fix


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{oops")
    with pytest.raises(MismatchError, match=r"config\.json.*line 1 column"):
        find_config(str(tmp_path))


# ---------------------------------------------------------------- what config.json says

MOE = {"model_type": "x", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("experts", config_module.EXPERTS)
@pytest.mark.parametrize("top_k", config_module.TOP_K)
def test_experts_under_every_familys_names(experts, top_k):
    model = ModelConfig.of({**MOE, experts: 8, top_k: 2})
    assert (model.experts, model.top_k, model.width) == (8, 2, 16)
    assert ModelConfig.of({**MOE, experts: 8, top_k: 2, "is_moe": False}).experts == 0


def test_the_text_part_of_a_config_is_what_counts():
    text = {**MOE, "num_experts": 4, "moe_intermediate_size": 3, "tie_word_embeddings": True}
    for nested in ({"text_config": text}, {"thinker_config": {"text_config": text}}):
        model = ModelConfig.of({"model_type": "outer", "dtype": "bfloat16", **nested})
        assert (model.family, model.experts, model.width, model.head_dim) == ("x", 4, 3, 4)
        assert (model.tied, model.stored_dtype) == (True, "bfloat16")
    assert ModelConfig.of({**MOE, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}).top_k == 4


@pytest.mark.parametrize("name", FAMILY_EXAMPLES)
def test_a_file_and_transformers_say_the_same(name):
    from transformers import AutoConfig

    values = ALIASES[name].config
    config = AutoConfig.for_model(**{k: v for k, v in values.items() if k != "quantization_config"})
    ours = replace(ModelConfig.of(values), quantised="", dtype="", layer_types=())
    assert ours == replace(ModelConfig.of(config), quantised="", dtype="", layer_types=())


@pytest.mark.parametrize(
    ("files", "given", "command"),
    [
        (["actor/model_world_size_2_rank_0.pt", "actor/huggingface/config.json"], "actor",
         "verl.model_merger"),
        (["actor/model_world_size_2_rank_0.pt", "actor/huggingface/config.json"],
         "actor/huggingface", "verl.model_merger"),
        (["actor/model_world_size_2_rank_0.pt"], ".", "verl.model_merger"),
        ([".metadata", "__0_0.distcp", "config.json"], ".", "dcp_to_torch"),
        (["adapter_config.json", "adapter_model.safetensors"], ".", "--model BASE --adapter"),
        (["model.gguf"], ".", "made from"),
        (["model.gguf"], "model.gguf", "made from"),
    ],
)  # fmt: skip
def test_a_checkpoint_as_a_trainer_leaves_it_is_answered_with_what_converts_it(
    tmp_path, files, given, command
):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(MismatchError) as caught:
        resolve_model(str(tmp_path / given))
    assert command in caught.value.fix


def test_a_model_directory_may_lie_next_to_shards_and_be_named_by_its_config(tmp_path):
    (tmp_path / "merged").mkdir()
    for name in ("model_world_size_2_rank_0.pt", "merged/config.json", "merged/model.safetensors"):
        (tmp_path / name).touch()
    merged = tmp_path / "merged"
    assert resolve_model(str(merged)) == resolve_model(str(merged / "config.json")) == str(merged)


def test_an_infinite_number_of_a_configuration_is_read(tmp_path: Path) -> None:
    text = '{"model_type": "falcon_h1", "time_step_limit": [0.0, {"__float__": "Infinity"}]}'
    (tmp_path / "config.json").write_text(text)  # as transformers writes Falcon-H1's
    assert read_config(tmp_path)["time_step_limit"] == [0.0, float("inf")]
