"""Routers in float32: their logits are not rounded, and nothing else of the forward changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from mismatch.errors import MismatchError
from mismatch.specs import TrainSpec
from mismatch.training.routing.capture import moe_layers, recording
from mismatch.training.routing.interventions import RouterDtype, intervening
from mismatch.training.routing.replay import require_interventions_possible
from tests.checkpoints import configuration

ROWS = 64


def _model(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configuration(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(10)
    return model.to(dtype).eval()


def _routes(model: Any, *changes: Any) -> tuple[list[Any], torch.Tensor, list[torch.Tensor]]:
    """Routes, last hidden states, and what the first block was given."""
    ids = torch.randint(3, 300, (2, ROWS // 2), generator=torch.Generator().manual_seed(1))
    decoder, layers = model.get_decoder(), moe_layers(model.get_decoder())
    seen: list[torch.Tensor] = []
    handle = decoder.layers[0].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        with torch.no_grad(), intervening(decoder, layers, changes), recording(layers) as recorder:
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        handle.remove()
    return recorder.finished(), hidden, seen


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_the_first_router_gives_what_float32_gives_on_the_same_states(family: str) -> None:
    model = _model(family, torch.bfloat16)
    (first, *_), _, (states,) = _routes(model, RouterDtype(torch.float32))
    router = dict(model.get_decoder().layers[0].mlp.named_children())
    gate = router.get("router", router.get("gate"))
    bias = getattr(gate, "bias", None)
    logits = torch.nn.functional.linear(
        states.reshape(ROWS, -1).float(),
        gate.weight.float(),
        None if bias is None else bias.float(),
    )
    scores = logits if family == "gpt_oss" else logits.softmax(-1)
    ids = scores.topk(2).indices
    assert torch.equal(first.ids.sort().values, ids.sort().values)
    weights = scores.topk(2).values
    weights = (
        weights.softmax(-1) if family == "gpt_oss" else weights / weights.sum(-1, keepdim=True)
    )
    assert torch.allclose(first.weights.sort().values, weights.sort().values, atol=1e-6)
    plain = _routes(model)[0][0]
    assert not torch.allclose(plain.weights.sort().values, weights.sort().values, atol=1e-6)


def test_in_float32_nothing_changes() -> None:
    model = _model("gpt_oss", torch.float32)
    assert torch.equal(_routes(model)[1], _routes(model, RouterDtype(torch.float32))[1])


def test_hidden_states_keep_their_dtype() -> None:
    assert _routes(_model("gpt_oss", torch.bfloat16), RouterDtype(torch.float32))[1].dtype == (
        torch.bfloat16
    )


def test_autocast_does_not_undo_it() -> None:
    model = _model("gpt_oss", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain, wide = _routes(model)[0][0], _routes(model, RouterDtype(torch.float32))[0][0]
    assert wide.weights.dtype == torch.float32
    assert not torch.equal(plain.weights, wide.weights)


def test_a_router_that_is_not_found_is_an_error() -> None:
    model = _model("gpt_oss", torch.bfloat16)
    layers = moe_layers(model.get_decoder())
    object.__setattr__(layers[1], "num_experts", 5)
    ids = torch.arange(8)[None]
    change = RouterDtype(torch.float32)
    with (
        pytest.raises(MismatchError, match=r"router.*layer 1\b"),
        torch.no_grad(),
        intervening(model.get_decoder(), layers, [change]),
    ):
        model.get_decoder()(input_ids=ids, use_cache=False)


def test_a_dense_model_is_refused_by_its_flag() -> None:
    with torch.device("meta"):
        bare = transformers.AutoModelForCausalLM.from_config(configuration("llama"))
    spec = TrainSpec("x", router_dtype="fp32")
    with pytest.raises(MismatchError, match="--router-dtype: llama"):
        require_interventions_possible(spec, bare)
