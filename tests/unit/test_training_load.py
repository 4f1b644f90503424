"""Loading says what is wrong with a model, and puts transformers back as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.specs import Pass, Sampling, TrainSpec
from mismatch.training import scorer as scorer_module
from mismatch.training.distributed import World
from mismatch.training.load import LoadedModel, load, resident_share
from mismatch.training.packing import collate
from mismatch.training.score import score_pass
from mismatch.training.scorer import ForwardOptions
from mismatch.types import NotTested
from tests.checkpoints import make, make_mxfp4, rollout
from tests.tensors import Largest


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def _load(world: World, model: Path | str, **fields: Any) -> LoadedModel:
    return load(TrainSpec(model=str(model), **fields), world.mesh, world.device)


def test_missing_directory(world: World, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="does not exist") as caught:
        _load(world, tmp_path / "nowhere")
    assert "config.json" in caught.value.fix


def test_missing_weights(world: World, broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    with pytest.raises(MismatchError, match="cannot load"):
        _load(world, broken)


@pytest.mark.parametrize("what", ["attn_implementation", "experts_implementation"])
def test_a_kernel_that_the_model_names_needs_trust(world: World, broken: Path, what: str) -> None:
    path = broken / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {what: "org/kernel"}))
    with pytest.raises(MismatchError, match="from a hub") as caught:
        _load(world, broken)
    assert "--trust-remote-code" in caught.value.fix


def test_missing_tokenizer(world: World, broken: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    with pytest.raises(MismatchError, match="no tokenizer"):
        _load(world, broken)


def test_missing_tensor(world: World, broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match=r"layers\.1\.mlp\.up_proj.*random"):
        _load(world, broken)


def test_wrong_shape(world: World, broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match="cannot load"):
        _load(world, broken)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "no_such_family"}, "no_such_family"),
        ({"model_type": "t5"}, "not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_configurations_that_cannot_run(
    world: World, broken: Path, changes: dict[str, Any], word: str
) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(MismatchError, match=word):
        _load(world, broken)


@pytest.mark.parametrize("master", ["bf16", "fp32"])
def test_mxfp4_checkpoints_are_dequantised(world: World, tmp_path: Path, master: str) -> None:
    released = make_mxfp4(tmp_path / "released", tmp_path / "plain")
    held = _load(world, released, master_dtype=master).scorer.model.state_dict()
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        assert torch.equal(held[name].full_tensor().float(), tensor), name
        assert held[name].dtype == (torch.float32 if master == "fp32" else torch.bfloat16)


def test_131072_positions_take_no_table(world: World, tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    model = make("gpt_oss", tmp_path, max_position_embeddings=131072, rope_parameters=rope)
    loaded = _load(world, model, dtype="fp32")
    buffers = dict(loaded.scorer.named_buffers())
    assert sum(buffer.numel() for buffer in buffers.values()) < 1000
    # Yarn as the config says, and not the plain frequencies.
    (frequencies,) = [b for name, b in buffers.items() if name.endswith("original_inv_freq")]
    plain = 150000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert frequencies[0] == pytest.approx(plain[0])
    assert frequencies[-1] == pytest.approx(plain[-1] / 32)


def test_long_rows_make_no_square_tensor(world: World, tmp_path: Path) -> None:
    scorer = _load(world, make("gpt_oss", tmp_path)).scorer.eval()
    for layout in ("padding", "packing"):
        sizes = []
        for tokens in (1024, 2048):
            batch = collate([np.arange(tokens) % 300], layout, world.device)
            with torch.no_grad(), Largest() as largest:
                scorer(scorer.hidden, batch)
            sizes.append(largest.numel)
        assert sizes[1] <= 2.1 * sizes[0], layout


def test_with_gradients_a_layer_keeps_its_input_and_no_more(world: World, tmp_path: Path) -> None:
    layers = ["sliding_attention", "full_attention"] * 2
    model = make("gpt_oss", tmp_path, num_hidden_layers=4, layer_types=layers)
    scorer = _load(world, model, dtype="bf16").scorer.train()
    batch = collate([np.arange(3, 303)] * 2, "padding", world.device)
    rows, wanted = torch.arange(100), batch.input_ids[0, 1:101]
    blocks = [m for m in scorer.modules() if hasattr(m, "gradient_checkpointing")]
    assert all(block.gradient_checkpointing for block in blocks)

    def run(frugal: bool) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        for block in blocks:
            block.gradient_checkpointing = frugal
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        scorer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            stats, _ = scorer(
                scorer.score, batch, rows, wanted, ForwardOptions(Sampling(), routing=True)
            )
        stats[0].sum().backward()
        slopes = [p.grad.full_tensor() for p in scorer.parameters() if p.grad is not None]
        return stats[0].detach(), slopes, sum(kept.values())

    frugal, slopes, few = run(True)
    plain, steep, many = run(False)
    assert torch.equal(frugal, plain)
    assert len(slopes) == len(list(scorer.parameters()))
    for ours, theirs in zip(slopes, steep, strict=True):
        assert torch.equal(ours, theirs)
    assert few < many / 5


def test_experts_of_a_dense_model(world: World, llama: Path) -> None:
    with pytest.raises(MismatchError, match="has no experts"):
        _load(world, llama, experts="grouped_mm")


def test_transformers_is_left_as_it_was(world: World, llama: Path) -> None:
    import transformers.modeling_utils as modeling

    def state() -> tuple[Any, ...]:
        cls = modeling.PreTrainedModel
        names = ("prepare_distribute_model", "maybe_distribute_model")
        functions = [getattr(cls, name).__func__ for name in names]
        return (*functions, modeling.caching_allocator_warmup)

    before = state()
    _load(world, llama)
    assert state() == before


def test_the_model_is_sharded_in_the_master_dtype(world: World, llama: Path) -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    loaded = _load(world, llama, master_dtype="fp32")
    wrapped = [m for m in loaded.scorer.modules() if isinstance(m, FSDPModule)]
    assert len(wrapped) == 3  # two decoder layers and the root, even at world size 1
    assert all(isinstance(p, DTensor) for p in loaded.scorer.parameters())
    assert {p.dtype for p in loaded.scorer.parameters()} == {torch.float32}
    assert resident_share(loaded.scorer) == 1.0


def test_a_head_that_does_more_is_refused(
    world: World, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = _load(world, llama)
    monkeypatch.setattr(scorer_module, "finish_logits", lambda logits, config: logits / 2)
    with pytest.raises(MismatchError, match=r"llama.*logits.*difference \d"):
        score_pass(world, loaded, rollout(), Pass("fsdp", loaded.spec))


def test_dropout_is_off_in_train_mode_and_said(world: World, tmp_path: Path) -> None:
    """GPT-2 drops in modules, llama in its attention's function; llama's config alone says more."""
    drops = {"resid_pdrop": 0.5, "attn_pdrop": 0.5, "summary_first_dropout": 0.5}
    gpt2 = make("gpt2", tmp_path / "gpt2", **drops)
    llama = make("llama", tmp_path / "llama", attention_dropout=0.5, classifier_dropout=0.5)
    found = {gpt2: {"attn_dropout", "resid_dropout"}, llama: {"attention_dropout"}}
    for model, names in found.items():
        spec = TrainSpec(str(model), grad=True)
        loaded = load(spec, world.mesh, world.device)
        scored = [
            score_pass(world, loaded, rollout(), Pass(name, replace(spec, grad=name != "fsdp")))
            for name in ("fsdp:grad", "fsdp:again", "fsdp")
        ]
        first, second, plain = filter(None, scored)
        assert np.array_equal(first.logprobs, second.logprobs)
        assert np.abs(first.logprobs - plain.logprobs).max() < 0.1
        assert loaded.dropout == dict.fromkeys(names, 0.5) | loaded.dropout
        assert "summary_first_dropout" not in loaded.dropout
        assert "classifier_dropout" not in loaded.dropout
        (entry,) = NotTested.of(first.fingerprint)
        assert entry.what == "dropout"
        assert all(f"{name} 0.5" in entry.reason for name in names)


def test_rollouts_that_cannot_be_scored(world: World, llama: Path) -> None:
    loaded = _load(world, llama)
    job = Pass("fsdp", loaded.spec)
    with pytest.raises(MismatchError, match="outside the vocabulary"):
        score_pass(world, loaded, rollout(vocabulary=5000), job)
    with pytest.raises(EmptyComparison):
        score_pass(world, loaded, rollout(((4, 0), (3, 0))), job)


def test_packed_documents_that_leak_are_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # gpt-oss without our masks: positions alone do not separate its documents.
    spec = TrainSpec(str(make("gpt_oss", tmp_path)), layout="packing", dtype="fp32")
    loaded = load(spec, world.mesh, world.device)
    assert score_pass(world, loaded, rollout(), Pass("packed", spec)) is not None
    monkeypatch.setattr(scorer_module.Scorer, "_packed_masks", lambda self, batch: None)
    loaded.probed.clear()  # a load is probed once
    with pytest.raises(MismatchError, match=r"gpt_oss: packed documents"):
        score_pass(world, loaded, rollout(), Pass("packed", spec))


@pytest.mark.parametrize("attention", ["eager", "sink-sdpa"])
def test_a_packed_document_does_not_see_its_neighbour(
    world: World, tmp_path: Path, attention: str
) -> None:
    spec = TrainSpec(
        str(make("gpt_oss", tmp_path)), attention=attention, experts="eager", dtype="fp32"
    )
    scorer = load(spec, world.mesh, world.device).scorer.eval()
    draw = np.random.default_rng(0)
    first, other, second = (draw.integers(3, 300, 40) for _ in range(3))  # beyond the window of 16

    def hidden(*documents: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            batch = collate(documents, "packing", world.device)
            return scorer(scorer.hidden, batch)[0, -40:]  # type: ignore[no-any-return]

    together = hidden(first, second)
    # Another neighbour gives the experts other rows, so sums may differ in their last bits.
    assert torch.allclose(together, hidden(other, second), atol=1e-5)
    assert torch.allclose(together, hidden(second), atol=1e-4)
