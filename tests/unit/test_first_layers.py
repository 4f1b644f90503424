"""``--layers N``: checkpoints of a model's first layers, their configuration, and the verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from mismatch.analysis.diagnosis.declared import whole_model
from mismatch.analysis.levels import verdict
from mismatch.errors import MismatchError
from mismatch.models import derived, resolve_model
from mismatch.models.config import find_config, first_layers
from mismatch.models.digests import source_hashes
from mismatch.models.sizes import sized
from mismatch.pipeline.preflight import require_engine_names, require_trainer_names
from mismatch.specs import AS_STORED, EngineSpec, TrainSpec, spec_hash, weights_key
from tests.checkpoints import VOCABULARY, make, make_mxfp4, tensors_of
from tests.texts import numbers

ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
FOUR = {"num_hidden_layers": 4}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))


def _model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}),
        ("gpt_oss", ALTERNATING),
        ("gemma2", ALTERNATING),
        ("deepseek_v3", {}),
        ("gpt2", {}),
    ],
)
def test_logits_are_those_of_the_whole_model_without_its_later_layers(
    tmp_path: Path, family: str, fields: dict[str, Any], layers: int
) -> None:
    source = make(family, tmp_path / "model", **FOUR, **fields)
    whole = _model(source)
    before = _logits(whole)
    decoder = whole.get_decoder()
    name = "h" if family == "gpt2" else "layers"
    setattr(decoder, name, getattr(decoder, name)[:layers])
    decoder.config.num_hidden_layers = layers
    wanted = _logits(whole)
    cut = _model(derived.derive(source, AS_STORED, layers))
    assert torch.equal(_logits(cut), wanted)
    assert not torch.allclose(wanted, before, atol=0.1)


def test_a_cut_checkpoint_is_made_once_and_knows_its_origin(tmp_path: Path) -> None:
    source = make("llama", tmp_path / "model", **FOUR)
    spec = EngineSpec(model=str(source), layers=2)
    cut = Path(derived.in_form(spec).model)
    stamp = (cut / "config.json").stat().st_mtime_ns
    assert derived.in_form(TrainSpec(model=str(source), layers=2)).model == str(cut)
    assert (cut / "config.json").stat().st_mtime_ns == stamp
    assert source_hashes(cut) == source_hashes(source)
    assert derived.layers_held(cut) == {"layers": [2, 4]}
    assert derived.layers_held(source) == derived.layers_held(None) == {}
    assert Path(derived.in_form(replace(spec, layers=3)).model) != cut
    assert (cut / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_mxfp4_stays_packed_or_is_unpacked_as_asked(tmp_path: Path) -> None:
    released = make_mxfp4(tmp_path / "released", tmp_path / "plain", **FOUR, **ALTERNATING)
    packed, plain = (derived.derive(released, form, 2) for form in (AS_STORED, "bf16"))
    assert derived.derive(released, "mxfp4", 2) == packed != plain
    assert derived.is_mxfp4(packed)
    assert not derived.is_mxfp4(plain)
    first = {n for n in tensors_of(released) if ".layers.2." not in n and ".layers.3." not in n}
    assert tensors_of(packed).keys() == first
    numbers, ours = tensors_of(tmp_path / "plain"), tensors_of(plain)
    assert all(torch.equal(tensor.float(), numbers[name]) for name, tensor in ours.items())
    assert derived.layers_held(plain) == {"layers": [2, 4]}
    assert derived.derive(released, "bf16") != plain


def _sharded(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    source = make("qwen3_moe", tmp_path / "model", **FOUR)
    tensors = tensors_of(source)
    (source / "model.safetensors").unlink()
    places = {}
    for name in tensors:
        layer = derived.IN_LAYER.match(name)
        places[name] = f"model-{layer['number'] if layer else 'rest'}.safetensors"
    for file in set(places.values()):
        part = {name: tensors[name] for name, place in places.items() if place == file}
        save_file(part, source / file, {"format": "pt"})
    (source / derived.INDEX).write_text(json.dumps({"weight_map": places}))
    return source, places


def test_shards_of_later_layers_need_not_be_here_and_of_earlier_ones_must(tmp_path: Path) -> None:
    source, places = _sharded(tmp_path)
    (source / "model-2.safetensors").unlink()
    cut = derived.derive(source, AS_STORED, 2)
    kept = {name for name, place in places.items() if place[6] in "01r"}
    assert tensors_of(cut).keys() == kept
    (source / "model-1.safetensors").unlink()
    with pytest.raises(MismatchError, match=r"lacks \d+ tensors.*model\.layers\.1\."):
        derived.derive(source, AS_STORED, 2)


def test_layers_of_multi_token_prediction_and_of_towers_are_told_apart(tmp_path: Path) -> None:
    source = make("deepseek_v3", tmp_path / "model", **FOUR, num_nextn_predict_layers=1)
    tensors = tensors_of(source)
    more = ("model.layers.4.eh_proj.weight", "vision_tower.layers.3.q.weight", "mtp.layers.0.w")
    save_file(tensors | {name: torch.ones(2) for name in more}, source / "model.safetensors")
    tower = {f"vision_tower.layers.{n}.w": torch.ones(2) for n in range(4)}
    save_file(tower, source / "tower.safetensors")
    names = set(tensors_of(derived.derive(source, AS_STORED, 3)))
    assert names == {n for n in tensors if ".layers.3." not in n} | {*more[1:], *tower}
    two = {f"talker.layers.{n}.w": torch.ones(2) for n in range(4)}
    save_file(two, source / "second.safetensors")
    with pytest.raises(MismatchError, match=r"model\.layers and talker\.layers"):
        derived.derive(source, AS_STORED, 3)


def test_files_without_layers_are_refused(tmp_path: Path) -> None:
    source = make("llama", tmp_path / "model", **FOUR)
    (source / "model.safetensors").unlink()
    torch.save({}, source / "pytorch_model.bin")
    with pytest.raises(MismatchError, match="none for"):
        derived.derive(source, AS_STORED, 2)


# ---------------------------------------------------------------- config.json


def test_what_a_config_lists_by_layer_is_cut_and_nothing_else() -> None:
    text = {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "a"],
        "no_rope_layers": [1, 1, 0],
        "mlp_only_layers": [0, 2],
        "attn_layer_indices": [2],
        "hybrid_override_pattern": "M*-",
        "model_type": "abc",
        "first_k_dense_replace": 1,
        "max_window_layers": 3,
        "eos_token_id": [1, 2, 3],
        "architectures": ["x", "y", "z"],
        "rope_parameters": {"mrope_section": [1, 2, 3]},
    }
    outer = {"text_config": text, "vision_config": {"num_hidden_layers": 3}}
    cut = first_layers(outer, 2)
    assert cut["vision_config"] == outer["vision_config"]
    assert cut["text_config"] == text | {
        "num_hidden_layers": 2,
        "layer_types": ["a", "b"],
        "no_rope_layers": [1, 1],
        "mlp_only_layers": [0],
        "attn_layer_indices": [],
        "hybrid_override_pattern": "M*",
        "max_window_layers": 2,
    }


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 2}, "--layers 2: the model has 2 layers"),
        ({"model_type": "odd"}, "odd model cannot be cut"),
        ({"num_hidden_layers": 9, "hidden_size_per_layer_input": 4}, "cannot be cut"),
        ({"num_hidden_layers": 9, "num_kv_shared_layers": 2}, "cannot be cut"),
    ],
)
def test_a_model_that_cannot_be_cut_there_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(MismatchError, match=said):
        first_layers(config, 2)


def test_either_side_refuses_too_many_layers_before_it_starts() -> None:
    model = resolve_model("tiny-gpt-oss")
    require_engine_names(EngineSpec(model=model, layers=3))
    require_engine_names(EngineSpec(model="nobody/nothing", layers=99))  # found out later
    for refuse in (
        lambda: require_engine_names(EngineSpec(model=model, layers=4)),
        lambda: require_trainer_names(TrainSpec(model=model, layers=4)),
    ):
        with pytest.raises(MismatchError, match="has 4 layers"):
            refuse()
    with pytest.raises(MismatchError, match="--scorer verl"):
        require_trainer_names(TrainSpec(model=model, layers=2, scorer="verl"))


def test_a_plan_counts_the_layers_that_run() -> None:
    model = resolve_model("tiny-gpt-oss")
    whole, half = (sized(find_config(model, None, layers)) for layers in (None, 2))
    assert half.layers == len(half.layer_types) == 2
    assert half.parameters == (whole.parameters + whole.root_parameters) // 2
    assert half.kv_elements(9) == whole.kv_elements(9) // 2


# ---------------------------------------------------------------- spec and verdict


def test_layers_change_a_specs_hash_and_its_weights_but_their_absence_does_not() -> None:
    spec = TrainSpec(model="m")
    assert spec_hash(spec) != spec_hash(replace(spec, layers=2))
    assert weights_key(spec) != weights_key(replace(spec, layers=2))
    engine = EngineSpec(model="m")
    assert spec_hash(engine) != spec_hash(replace(engine, layers=2))


def test_the_first_layers_alone_are_tolerable_at_best() -> None:
    assert whole_model({}) == []
    checks = whole_model({"layers": [2, 4]})
    correctness = verdict((), checks, None).correctness
    assert correctness is not None
    assert correctness.status == "tolerable"
    assert numbers(correctness.reason) == [2, 4]
