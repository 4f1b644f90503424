"""Layouts, names and refusals of --scorer megatron, which need neither torch nor Megatron-Core."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch.errors import MismatchError
from mismatch.features.megatron.layout import Layout, read_layout, require, require_fit
from mismatch.features.megatron.names import EXPERT, FAMILIES, shape_of
from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.config_file import ConfigFile
from mismatch.plugins import scorers
from mismatch.run.yaml_file import parsed
from mismatch.specs import CheckSpec, TrainSpec
from mismatch.trainers.worker import place_of
from tests.checkpoints import configuration, make

VERL = """
actor_rollout_ref:
  actor:
    strategy: megatron
    megatron:
      tensor_model_parallel_size: 2
      expert_model_parallel_size: 4
      expert_tensor_parallel_size: null
      pipeline_model_parallel_size: 1
      context_parallel_size: 1
      sequence_parallel: true
      override_transformer_config: {moe_router_dtype: fp32, moe_token_dispatcher_type: allgather}
"""
NEMO_RL = """
policy:
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, expert_model_parallel_size: 4,
                 sequence_parallel: true, moe_router_dtype: fp32,
                 moe_token_dispatcher_type: allgather}
"""
SLIME = """
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --expert-model-parallel-size 4
   # --context-parallel-size 8
   --moe-token-dispatcher-type allgather --moe-router-dtype=fp32
)
"""


@pytest.mark.parametrize(("name", "text"), [("v.yaml", VERL), ("n.yaml", NEMO_RL), ("s.sh", SLIME)])
def test_a_frameworks_file_and_words_give_the_same_layout(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    wanted = Layout(tp=2, ep=4, sp=True, dispatcher="allgather", router="fp32")
    assert read_layout(str(tmp_path / name)) == wanted
    assert read_layout("tp=2,ep=4,sp=true,dispatcher=allgather,router=fp32") == wanted
    changed = "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1"
    again = read_layout(str(tmp_path / name), (changed,))
    assert again == (replace(wanted, etp=1) if name != "s.sh" else wanted)


@pytest.mark.parametrize(
    "given",
    ["tq=2", "tp=two", "tp=0", "dispatcher=pigeon", "no-such.yaml", "other.yaml", "torn.yaml"],
)
def test_what_is_no_layout_is_refused(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text("trainer: {epochs: 3}\n")
    Path("torn.yaml").write_text("policy: {megatron_cfg: {tensor_model_")
    with pytest.raises(MismatchError) as refused:
        read_layout(given)
    assert refused.value.fix


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_parameter_of_the_table_is_of_tensors_that_the_checkpoint_has(family: str) -> None:
    """Megatron's parameters of a tiny model, by Megatron's names, use every tensor and no other."""
    shape = shape_of({**tiny(family), "model_type": family})
    expected = set(shape.tensors())
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    names += [] if shape.config.get("tie_word_embeddings") else ["output_layer.weight"]
    for layer in range(shape.number("num_hidden_layers")):
        parts = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        parts += [f"self_attention.linear_{part}.weight" for part in ("qkv", "proj")]
        parts += ["self_attention.linear_qkv.bias"] if shape.biased else []
        gpt_oss = family == "gpt_oss"
        parts += ["self_attention.linear_proj.bias"] if gpt_oss else []
        parts += ["self_attention.core_attention.softmax_offset"] if gpt_oss else []
        normed = shape.family.qk_norm
        parts += [f"self_attention.{part}_layernorm.weight" for part in "qk"] if normed else []
        kinds = ("weight", "bias") if gpt_oss else ("weight",)
        if shape.is_moe(layer):
            parts += [f"mlp.router.{kind}" for kind in kinds]
            for number in range(shape.experts):
                for fc in ("linear_fc1", "linear_fc2"):
                    for kind in kinds:
                        ours = f"mlp.experts.local_experts.{number}.{fc}.{kind}"
                        engines = f"mlp.experts.{fc}.{kind}{number}"
                        assert EXPERT.fullmatch(ours)
                        at = f"decoder.layers.{layer}."
                        assert shape.source(at + ours) == shape.source(at + engines)
                        parts.append(ours)
        else:
            parts += [f"mlp.linear_{fc}.weight" for fc in ("fc1", "fc2")]
        names += [f"decoder.layers.{layer}.{part}" for part in parts]
    assert {tensor for name in names for tensor in shape.source(name).tensors} == expected


def tiny(family: str) -> dict[str, Any]:
    """Return a small configuration of a family, as transformers writes it."""
    like = {"mistral": "llama", "qwen2": "llama", "mixtral": "qwen3_moe"}.get(family, family)
    found: dict[str, Any] = configuration(like).to_dict()
    return found


def test_the_expected_tensors_are_those_that_transformers_writes(tmp_path: Path) -> None:
    for family in ("qwen3_moe", "gpt_oss"):
        folder = make(family, tmp_path / family)
        require(TrainSpec(model=str(folder), scorer="megatron", scorer_config="ep=2"), 2)


def test_misfits_are_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = make("qwen3_moe", tmp_path / "model")
    spec = TrainSpec(model=str(folder), scorer="megatron")
    for layout, ranks, number in (
        ("ep=3", 3, 8), ("tp=4", 4, 2), ("ep=2", 3, 3), ("pp=3", 3, 2), ("ep=2,tp=2,etp=2", 2, 2),
    ):  # fmt: skip
        with pytest.raises(MismatchError) as refused:
            require(replace(spec, scorer_config=layout), ranks)
        assert f" {number} " in refused.value.message
    config = json.loads((folder / "config.json").read_text())
    for change in ({"hidden_size": 128}, {"num_experts": 4, "num_local_experts": 4}):
        other = tmp_path / "other"
        shutil.copytree(folder, other, dirs_exist_ok=True)
        (other / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(MismatchError, match=r"config\.json"):
            require(replace(spec, model=str(other)), 1)
    with pytest.raises(MismatchError, match="deepseek_v3"):
        shape_of({"model_type": "deepseek_v3"})
    with pytest.raises(MismatchError, match="quantised"):
        shape_of({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}})
    dense = shape_of({**tiny("llama"), "model_type": "llama"})
    with pytest.raises(MismatchError, match="dense"):
        require_fit(Layout(ep=2), dense, 2)
    with pytest.raises(MismatchError, match="biases"):
        require_fit(Layout(tp=2), shape_of({**tiny("gpt_oss"), "model_type": "gpt_oss"}), 2)


def test_the_feature_adds_its_name_to_scorer() -> None:
    assert place_of("megatron")[1] == "Megatron"
    assert scorers()["megatron"].require
    with pytest.raises(MismatchError) as refused:
        place_of("megatrn")
    assert "megatron" in (refused.value.fix or "")


def test_a_verl_file_sets_the_sampling_and_the_layout(tmp_path: Path) -> None:
    """Keys that the scorer reads are not told as not followed; others of Megatron's are."""
    text = VERL + "      recompute_x: 1\n"
    source = ConfigFile("v.yaml", parsed(text))
    spec = CheckSpec(train=TrainSpec(scorer="megatron"))
    work = FollowedFile(spec, (), source=source, framework="verl")
    work.finish()
    assert work.spec.preset.startswith("Megatron-Core")
    told = " ".join(work.not_reproduced)
    assert "recompute_x" in told
    assert not any(word in told for word in ("tensor_model", "expert_", "FSDP", "moe_router"))
