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
)


def active(model: SizedModel) -> int:
    """Parameters that one token uses: its experts instead of all."""
    if not model.experts:
        return model.parameters
    return (
        model.parameters - model.expert_parameters * (model.experts - model.top_k) // model.experts
    )


@pytest.mark.parametrize("name", ALIASES)
def test_the_shipped_config_has_the_published_parameter_count(name):
    """A wrong width, depth, vocabulary or expert count cannot give the published number."""
    alias = ALIASES[name]
    model = sized(FoundConfig(alias.config, "shipped", None))
    assert model.parameters == alias.parameters
    assert active(model) == (alias.active or alias.parameters)


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
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(ALIASES)


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
