"""``--adapter``: merging against the closed form, what is refused, and what a spec says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mismatch.analysis.diagnosis.declared import source_files
from mismatch.codec import from_json, to_json
from mismatch.engines.registry import model_facts, with_adapter_way
from mismatch.errors import MismatchError
from mismatch.models import derived, resolve_model
from mismatch.models.adapters import (
    apply_apart,
    changes,
    find_adapter,
    is_of_linear_layers,
    layer_of,
    merged,
    require_adapter,
)
from mismatch.models.derived import in_form
from mismatch.models.digests import source_hashes
from mismatch.models.weight_states import write_adapter
from mismatch.pipeline.preflight import require_engine_names, require_trainer_names
from mismatch.specs import EngineSpec, TrainSpec, spec_hash, weights_key
from tests.checkpoints import make, make_mxfp4

Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.1.self_attn.k_proj"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("base") / "llama")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def matrices(base: Path, modules: dict[str, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """A and B of these modules, by their rank."""
    held = tensors(base)
    found = {}
    for place, (module, rank) in enumerate(modules.items()):
        rows, columns = held[f"{module}.weight"].shape
        found[f"{module}.lora_A.weight"] = drawn(rank, columns, seed=seed + 2 * place)
        found[f"{module}.lora_B.weight"] = drawn(rows, rank, seed=seed + 2 * place + 1)
    return found


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        held |= load_file(path)
    return held


def applied(base: Path, adapter: Path, **fields: Any) -> dict[str, torch.Tensor]:
    spec = TrainSpec(model=str(base), adapter=find_adapter(str(adapter)), **fields)
    require_adapter(spec)
    return tensors(Path(derived.in_form(spec).model))


def closed_form(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> Any:
    wide = [each.double().numpy() for each in (weight, a, b)]
    return wide[0] + scale * wide[2] @ wide[1]


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (16 / 8**0.5, 16 / 8**0.5)),
        ({"lora_alpha": 4}, (0.5, 0.5)),
        ({"rank_pattern": {"k_proj": 4}}, (2.0, 4.0)),
        ({"alpha_pattern": {"layers.1.self_attn.k_proj": 32}}, (2.0, 4.0)),
        ({"rank_pattern": {"k_proj": 4}, "use_rslora": True}, (16 / 8**0.5, 8.0)),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_merged_weights_are_base_plus_scaled_product(
    base: Path, tmp_path: Path, config: dict[str, Any], scales: tuple[float, float], dtype: Any
) -> None:
    ranks = {Q: 8, K: 4 if "rank_pattern" in config else 8}
    held = matrices(base, ranks)
    found = applied(base, write_adapter(held, tmp_path / "a", **config), dtype=dtype)
    plain = tensors(base)
    assert found.keys() == plain.keys()
    for module, scale in zip(ranks, scales, strict=True):
        weight = f"{module}.weight"
        wanted = closed_form(
            plain[weight], held[f"{module}.lora_A.weight"], held[f"{module}.lora_B.weight"], scale
        )
        # In bf16 half a unit in the last place of 8 bits; in float32 nothing is rounded away.
        room = 2**-8 * np.abs(wanted) if dtype == "bf16" else 1e-6
        assert found[weight].dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
        assert (np.abs(found[weight].double().numpy() - wanted) <= room).all()
        assert np.abs(wanted - plain[weight].double().numpy()).max() > 0.01
    others = plain.keys() - {f"{Q}.weight", f"{K}.weight"}
    assert all(torch.equal(found[name], plain[name]) for name in others)


def test_conv1d_embeddings_and_fused_experts_have_their_layouts() -> None:
    a, b = drawn(4, 6), drawn(5, 4, seed=1)
    held = {"x.lora_A.weight": a, "x.lora_B.weight": b}
    delta = (b.double() @ a.double()).numpy()
    turned = changes_in(held, {"x.weight": (6, 5)}, fan_in_fan_out=True)
    found = merged(turned["x.weight"], torch.zeros(6, 5), held.__getitem__)
    np.testing.assert_allclose(found.numpy(), 2 * delta.T, atol=1e-6)
    words = {"e.lora_embedding_A": a, "e.lora_embedding_B": b}
    change = changes_in(words, {"e.weight": (6, 5)})["e.weight"]
    found = merged(change, torch.zeros(6, 5), words.__getitem__)
    np.testing.assert_allclose(found.numpy(), 2 * delta.T, atol=1e-6)
    # Three experts, rank 4: A stacks the experts' rows, B interleaves their columns.
    a, b = drawn(12, 6), drawn(5, 12, seed=1)
    for key, leaf in (("experts.base_layer", "gate_up_proj"), ("experts", "down_proj")):
        experts = {f"m.{key}.lora_A.weight": a, f"m.{key}.lora_B.weight": b}
        parameter = f"m.experts.{leaf}"
        wanted = [
            2 * (b[:, expert::3].double() @ a[4 * expert : 4 * expert + 4].double()).numpy().T
            for expert in range(3)
        ]
        change = changes_in(experts, {parameter: (3, 6, 5)})[parameter]
        found = merged(change, torch.zeros(3, 6, 5), experts.__getitem__)
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6)


APPLIED = {
    "attention": {Q: 4, K: 2},
    "head": {Q: 4, "lm_head": 4},
    "embeddings": {"model.embed_tokens": 4, "model.layers.1.mlp.down_proj": 2},
}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("targets", APPLIED)
def test_an_adapter_apart_from_its_base_is_the_merged_models_function(
    base: Path, tmp_path: Path, targets: str, rslora: bool
) -> None:
    """The yardstick of an engine that applies its adapter itself differs by rounding alone."""
    held = matrices(base, APPLIED[targets])
    if targets == "embeddings":
        name = "model.embed_tokens.lora_"
        held[f"{name}embedding_A"] = held.pop(f"{name}B.weight").T.contiguous()
        held[f"{name}embedding_B"] = held.pop(f"{name}A.weight").T.contiguous()
    where = write_adapter(held, tmp_path / "one", r=4, rank_pattern={"k_proj|down_proj": 2},
                          use_rslora=rslora)  # fmt: skip
    adapter, ids = find_adapter(str(where)), torch.arange(3, 40)[None]
    assert is_of_linear_layers(adapter)
    merged_at = in_form(TrainSpec(model=str(base), adapter=adapter, dtype="fp32")).model
    assert in_form(TrainSpec(model=str(base), adapter=adapter, adapter_as="own")).model == str(base)
    models = [AutoModelForCausalLM.from_pretrained(m, dtype="float32") for m in (base, merged_at)]
    with torch.no_grad():
        plain = models[0](ids).logits
        apply_apart(models[0], adapter, base, torch.float32, torch.device("cpu"))
        apart, whole = (model(ids).logits for model in models)
    torch.testing.assert_close(apart, whole, rtol=1e-4, atol=1e-4)
    assert float((apart - plain).abs().max()) > 0.01


@pytest.mark.parametrize(
    ("held", "found"),
    [
        (("model.layers.0.q", "vision.layers.0.k"), "model.layers.0.q"),
        (
            ("model.language_model.layers.0.q", "vision.layers.0.k"),
            "model.language_model.layers.0.q",
        ),
        (("a.layers.0.q", "b.layers.0.q"), None),  # two towers
        (("model.layers.0.k",), None),
    ],
)
def test_a_layer_is_found_under_another_prefix_where_one_alone_ends_so(
    held: tuple[str, ...], found: str | None
) -> None:
    assert layer_of({name: name for name in held}, "model.layers.0.q") == found


def changes_in(held: dict[str, torch.Tensor], shapes: Any, **config: Any) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        config = {"r": 4, "lora_alpha": 8, **config}
        save_file(held, Path(folder) / "adapter_model.safetensors")
        facts = json.dumps({"peft_type": "LORA", **config})
        (Path(folder) / "adapter_config.json").write_text(facts)
        return changes(folder, shapes)


def test_whole_parameters_replace_those_of_the_base(base: Path, tmp_path: Path) -> None:
    head = drawn(320, 64)
    found = applied(base, write_adapter({"lm_head.weight": head}, tmp_path / "a"))
    assert torch.equal(found["lm_head.weight"], head.bfloat16())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "LOHA"}, "LOHA, not LORA"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "bias: lora_only"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changes the base"),
        ({"layer_replication": [[0, 1]]}, "repeated layers"),
    ],
)
def test_more_than_lora_is_refused_by_name_with_the_command_that_merges(
    base: Path, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    path = write_adapter(matrices(base, {Q: 8}), tmp_path / "a", **config)
    with pytest.raises(MismatchError, match=words) as refused:
        find_adapter(str(path))
    assert "merge_and_unload" in refused.value.fix


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.layers.7.self_attn.q_proj.lora_A.weight", (8, 64), "has no model.layers.7"),
        (f"{K}.lora_A.weight", (8, 63), "not \\[32, 63\\]"),
        (f"{K}.lora_A.weight", (4, 64), "no rank of 8"),
        (f"{K}.lora_magnitude_vector", (32,), "lora_magnitude_vector"),
    ],
)
def test_a_tensor_without_counterpart_is_named(
    base: Path, tmp_path: Path, name: str, shape: tuple[int, ...], words: str
) -> None:
    held = matrices(base, {Q: 8}) | {name: drawn(*shape)}
    if name.endswith("lora_A.weight"):
        held[name.replace("lora_A", "lora_B")] = drawn(32, shape[0])
    spec = EngineSpec(
        model=str(base), adapter=find_adapter(str(write_adapter(held, tmp_path / "a")))
    )
    with pytest.raises(MismatchError, match=words) as refused:
        require_engine_names(spec)
    assert name in str(refused.value)


def test_a_lone_matrix_is_refused(base: Path, tmp_path: Path) -> None:
    held = matrices(base, {Q: 8})
    for lone in sorted(held):
        path = write_adapter({lone: held[lone]}, tmp_path / lone)
        with pytest.raises(MismatchError, match="there is no "):
            require_adapter(TrainSpec(model=str(base), adapter=find_adapter(str(path))))


def test_quantised_bases_tied_heads_other_forms_and_other_trainers_are_refused(
    base: Path, tmp_path: Path
) -> None:
    packed = make_mxfp4(tmp_path / "packed", tmp_path / "plain")
    adapter = find_adapter(str(write_adapter(matrices(base, {Q: 8}), tmp_path / "a")))
    with pytest.raises(MismatchError, match="is quantised"):
        require_adapter(TrainSpec(model=str(packed), adapter=adapter))
    with pytest.raises(MismatchError, match="as mxfp4-rounded"):
        require_adapter(EngineSpec(model=str(base), adapter=adapter, weights="mxfp4-rounded"))
    with pytest.raises(MismatchError, match="loads whole models") as refused:
        require_trainer_names(TrainSpec(model=str(base), adapter=adapter, scorer="trl"))
    assert "merge_and_unload" in refused.value.fix
    tied = make("llama", tmp_path / "tied", tie_word_embeddings=True)
    words = write_adapter({"model.embed_tokens.weight": drawn(320, 64)}, tmp_path / "words")
    with pytest.raises(MismatchError, match="one parameter"):
        require_adapter(TrainSpec(model=str(tied), adapter=find_adapter(str(words))))


def test_an_adapter_given_as_the_model_names_its_base(base: Path, tmp_path: Path) -> None:
    held = matrices(base, {Q: 8})
    named = write_adapter(held, tmp_path / "a", base_model_name_or_path="org/base")
    with pytest.raises(MismatchError) as refused:
        resolve_model(str(named))
    assert refused.value.fix == f"--model org/base --adapter {named}"
    with pytest.raises(MismatchError) as refused:
        resolve_model(str(write_adapter(held, tmp_path / "b")))
    assert refused.value.fix.startswith("--model BASE --adapter ")


def test_the_cache_depends_on_the_files_and_first_layers_go_with_it(
    base: Path, tmp_path: Path
) -> None:
    held, folder = matrices(base, {Q: 8, K: 8}), tmp_path / "a"
    first = find_adapter(str(write_adapter(held, folder)))
    spec = TrainSpec(model=str(base), adapter=first)
    place = derived.in_form(spec).model
    assert place == derived.in_form(spec).model
    assert f"{K}.weight" not in tensors(Path(derived.in_form(replace(spec, layers=1)).model))
    second = find_adapter(str(write_adapter(held, folder, lora_alpha=32)))
    assert first.digest != second.digest
    assert derived.in_form(replace(spec, adapter=second)).model != place
    with pytest.raises(MismatchError, match="no longer the"):
        require_adapter(spec)
    assert weights_key(spec) != weights_key(replace(spec, adapter=second))


def test_specs_and_facts_say_which_adapter_a_side_has(base: Path, tmp_path: Path) -> None:
    held = matrices(base, {Q: 8})
    one, two = (
        find_adapter(str(write_adapter(held, tmp_path / name, lora_alpha=alpha)))
        for name, alpha in (("one", 16), ("two", 32))
    )
    engine = with_adapter_way(EngineSpec("transformers", str(base), adapter=one))
    assert engine.adapter_as == "merged"
    facts = model_facts(derived.in_form(engine))
    assert facts["adapter"] == {"name": "one", "digest": one.digest, "as": "merged"}
    train = derived.in_form(TrainSpec(model=str(base), adapter=two))
    other = {"source_files": source_hashes(train.model)}
    check = source_files(facts, other)
    assert check.status == "failed"
    assert "adapter/adapter_config.json" in check.detail
    assert "one adapter" in check.fix
    own = replace(engine, adapter_as="own")
    assert derived.in_form(own) == own
    assert source_files(model_facts(own), facts).status == "passed"
    assert from_json(EngineSpec, to_json(own)) == own
    plain = EngineSpec("transformers", str(base))
    assert len({spec_hash(spec) for spec in (plain, engine, own)}) == 3
    with pytest.raises(MismatchError, match="merged weights alone") as refused:
        require_engine_names(replace(engine, adapter_as="own"))
    assert refused.value.fix == "--adapter-as merged"
