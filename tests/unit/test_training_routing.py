"""Captured experts are those that the router's own scores select, in every family alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from mismatch.errors import CorruptCapture
from mismatch.training.routing.capture import margin, moe_layers, recording
from tests import families
from tests.checkpoints import configuration

TOKENS, EXPERTS, TOP_K = 20, 8, 2


def _model(family: str, **overrides: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configuration(family, **overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(10)  # fresh weights are tiny: give the routers something to decide
    return model.eval()


def _capture(model: Any) -> tuple[list[Any], Any]:
    ids = torch.randint(3, 300, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    layers = moe_layers(model.get_decoder())
    with torch.no_grad(), recording(layers) as recorder:
        out = model(input_ids=ids, use_cache=False, output_router_logits=True)
    return recorder.finished(), out


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_capture_equals_the_top_k_of_the_router_logits(family: str) -> None:
    routes, out = _capture(_model(family))
    assert len(routes) == len(out.router_logits) == 2
    for layer, logits in zip(routes, out.router_logits, strict=True):
        scores = logits.float() if family == "gpt_oss" else logits.float().softmax(-1)
        best = scores.topk(TOP_K + 1, -1)
        assert torch.equal(layer.ids, best.indices[:, :TOP_K])
        chosen = best.values[:, :TOP_K]
        normal = chosen.softmax(-1) if family == "gpt_oss" else chosen / chosen.sum(-1, True)
        assert torch.allclose(layer.weights, normal, atol=1e-6)
        assert layer.margin is not None
        assert torch.allclose(layer.margin, best.values[:, 1] - best.values[:, 2], atol=1e-6)


def test_grouped_selection_is_read_from_its_last_top_k() -> None:
    # DeepSeek-V3 scores groups of experts first, adds a bias, and then selects: three top-k calls.
    config = transformers.DeepseekV3Config(
        vocab_size=320, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
        n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    layers = moe_layers(model.get_decoder())
    assert [layer.index for layer in layers] == [1]
    with torch.no_grad(), recording(layers) as recorder:
        model(input_ids=torch.arange(3, 13)[None], use_cache=False)
    (route,) = recorder.finished()
    assert route.ids.shape == (10, TOP_K)
    groups = route.ids // (EXPERTS // 2)
    assert (groups[:, 0] == groups[:, 1]).all()  # topk_group = 1: both experts from one group
    assert route.margin is not None
    assert (route.margin >= 0).all()


def test_a_router_that_never_calls_topk_gives_no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("gpt_oss")
    router = type(model.model.layers[0].mlp.router)

    def by_sorting(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        values, ids = logits.sort(-1, descending=True)
        return logits, values[:, :TOP_K].softmax(-1), ids[:, :TOP_K]

    usual, _ = _capture(model)
    monkeypatch.setattr(router, "forward", by_sorting)
    unusual, _ = _capture(model)
    for ours, theirs in zip(unusual, usual, strict=True):
        assert torch.equal(ours.ids, theirs.ids)
        assert ours.margin is None


def test_experts_that_show_no_ids_are_an_error() -> None:
    model = _model("gpt_oss")
    layers = moe_layers(model.get_decoder())
    with recording(layers) as recorder:
        pass  # no forward pass at all
    with pytest.raises(CorruptCapture, match="layer 0"):
        recorder.finished()


def test_recording_leaves_no_hook_behind() -> None:
    model = _model("gpt_oss")
    _capture(model)
    for layer in moe_layers(model.get_decoder()):
        assert not layer.experts._forward_pre_hooks


def test_a_dense_model_has_no_moe_layers() -> None:
    assert moe_layers(_model("llama").get_decoder()) == []


# ---------------------------------------------------------------- families of their own kind


@pytest.mark.parametrize("family", ["llama4_text", "jetmoe", "phimoe", "zaya"])
def test_weights_of_odd_families_are_those_of_the_gate(family: str) -> None:
    model, ids = families.tiny(family), families.token_ids()
    logits: dict[int, torch.Tensor] = {}
    sizes = (EXPERTS, EXPERTS + 1)

    def keep(index: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            logits[index] = next(
                t for t in output[::-1] if isinstance(t, torch.Tensor) and t.shape[-1] in sizes
            ).reshape(ids.numel(), -1)

        return hook

    layers, _ = families.captured(model, ids)
    for layer in layers:
        name = next(n for n, m in model.named_modules() if m is layer.experts)
        block = model.get_submodule(name.rpartition(".")[0])
        gate = block.gate if family == "zaya" else block.router
        gate.register_forward_hook(keep(layer.index))
    _, routes = families.captured(model, ids)
    for layer, route in zip(layers, routes, strict=True):
        scores = logits[layer.index] if family != "zaya" else logits[layer.index].softmax(-1)
        picked = scores.gather(-1, route.ids)
        if family == "llama4_text":
            assert torch.allclose(route.weights, picked.sigmoid(), atol=1e-6)
        elif family == "jetmoe":
            best = scores.topk(TOP_K, -1)  # slots come in ascending order of experts
            want = torch.zeros_like(scores).scatter(1, best.indices, best.values.softmax(-1))
            assert torch.allclose(route.weights, want.gather(-1, route.ids), atol=1e-6)
        elif family == "phimoe":
            rest = scores.scatter(-1, route.ids[:, :1], float("-inf"))
            assert torch.equal(route.ids[:, 0], scores.argmax(-1))
            assert torch.equal(route.ids[:, 1], rest.argmax(-1))
            ranked = scores.sort(-1, descending=True).values
            assert torch.allclose(route.margin, ranked[:, 1] - ranked[:, 2])
        else:
            skipped = route.ids == EXPERTS
            assert layer.num_experts == EXPERTS + 1
            assert (route.weights[skipped] == 0).all()
            assert torch.allclose(route.weights[~skipped], picked[~skipped], atol=1e-6)


def test_a_skipped_expert_is_told_from_the_first_one() -> None:
    # The block masks "skip" as expert 0 with weight 0; the capture keeps the router's choice.
    model, ids = families.tiny("zaya"), families.token_ids()
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.mlp.gate.balancing_biases if hasattr(layer.mlp, "gate") else None
            if bias is not None:
                bias[-1] = 10.0
    _, routes = families.captured(model, ids)
    assert (routes[0].ids == EXPERTS).all()


def test_experts_that_compute_nothing_count_after_the_others() -> None:
    layers, routes = families.captured(families.tiny("longcat_flash"), families.token_ids())
    assert layers[0].num_experts == 8  # six with weights, two without
    assert int(torch.cat([route.ids for route in routes]).max()) >= 6


def test_a_margin_against_excluded_experts_is_none() -> None:
    # As many experts per token as its group has: the next best is excluded, not worse.
    scores = torch.tensor([[0.9, 0.8, float("-inf"), float("-inf")]])
    assert margin(scores, 2) is None
    assert margin(scores[:, :2], 2) is None
    assert margin(scores, 1).item() == pytest.approx(0.1)


def test_counts_are_those_of_the_modules() -> None:
    from mismatch.models.config import ModelConfig

    differently = "dbrx ernie4_5_moe gemma4_text hunyuan_v1_moe kimi_linear llama4_text nemotron_h"
    for family in (*differently.split(), "longcat_flash", "zaya", "mixtral", "deepseek_v3"):
        config = families.configuration(family)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        counts = ModelConfig.of(config)
        layer = moe_layers(model.get_decoder())[0]
        experts = counts.experts + counts.extra_experts
        assert experts == layer.num_experts - layer.family.extra_choices, family
        assert counts.top_k in (1, TOP_K)
    assert ModelConfig.of(families.configuration("doge", is_moe=False)).experts == 0
