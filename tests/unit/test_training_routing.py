"""Captured experts are those that the router's own scores select, in every family alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from mismatch.errors import CorruptCapture
from mismatch.training.routing import moe_layers, recording
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
