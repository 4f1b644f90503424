"""Router replay: what is given is what runs, and one's own choice given back changes no bit.

By transitivity: the experts that run are those that were given (seen by a hook of the test's own),
the weights are the family's own over these experts, and nothing else of the forward changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mismatch.errors import CorruptCapture, MismatchError
from mismatch.specs import TrainSpec
from mismatch.training.packing import Batch, collate
from mismatch.training.routing.capture import moe_layers, recording
from mismatch.training.routing.interventions import RouterNoise, checkpoint_contexts, intervening
from mismatch.training.routing.replay import Replay, ReplaySource, require_interventions_possible
from mismatch.types import Routing, Scoring
from tests.checkpoints import configuration, rollout

EXPERTS, TOP_K, TOKENS = 8, 2, 20
_SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
}


def _deepseek() -> Any:
    return transformers.DeepseekV3Config(
        **{**_SMALL, "num_key_value_heads": 4}, moe_intermediate_size=32, n_shared_experts=1,
        n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip


def _phimoe() -> Any:
    return transformers.PhimoeConfig(
        **_SMALL, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, router_jitter_noise=0.01
    )


CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "gpt_oss": lambda: configuration("gpt_oss"),
    "qwen3_moe": lambda: configuration("qwen3_moe"),
    "deepseek_v3": _deepseek,
    "phimoe": _phimoe,
}
ALL = list(CONFIGURATIONS)


def _model(family: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGURATIONS[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(8)  # fresh weights are tiny: give the routers something to decide
    return model.eval()


def _batch() -> Batch:
    ids = np.random.default_rng(1).integers(3, 320, TOKENS)
    return collate([ids[:12], ids[12:]], "padding", "cpu")  # one row is padded


def _run(model: Any, *changes: Any) -> tuple[torch.Tensor, list[Any]]:
    decoder = model.get_decoder()
    layers = moe_layers(decoder)
    batch = _batch()
    with recording(layers) as recorder, intervening(decoder, layers, changes):
        out = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    return out.logits, recorder.finished()


def _replay(
    model: Any, ids: torch.Tensor, mask: Any = None, weights: torch.Tensor | None = None
) -> Replay:
    """``ids`` [R, L, K]."""
    columns = {layer.index: c for c, layer in enumerate(moe_layers(model.get_decoder()))}
    rows = torch.ones(len(ids), dtype=torch.bool) if mask is None else mask
    return Replay("made up", columns, rows, ids, weights)


def _ids(routes: list[Any]) -> torch.Tensor:
    return torch.stack([layer.ids for layer in routes], 1)


@pytest.mark.parametrize("family", ALL)
def test_ones_own_routes_given_back_change_no_bit(family: str) -> None:
    model = _model(family)
    with torch.no_grad():
        logits, routes = _run(model)
        replay = _replay(model, _ids(routes))
        again, same = _run(model, replay)
    assert torch.equal(logits, again)
    assert replay.overruled == 0
    for route, other in zip(routes, same, strict=True):
        assert torch.equal(route.ids, other.ids)
        assert torch.equal(route.weights, other.weights)
        assert torch.equal(route.margin, other.margin)


@pytest.mark.parametrize("family", ALL)
def test_other_routes_run_as_given_in_their_slots(family: str) -> None:
    model = _model(family)
    with torch.no_grad():
        logits, routes = _run(model)
        other = (_ids(routes).flip(-1) + 3) % EXPERTS  # another order than any sorting gives
        ran: list[torch.Tensor] = []
        for layer in moe_layers(model.get_decoder()):
            block = layer.experts
            if layer.family.reads_output:  # the experts themselves, whatever is read elsewhere
                block = model.model.layers[layer.index].mlp.experts
            block.register_forward_pre_hook(lambda module, args: ran.append(args[1]))
        replay = _replay(model, other)
        changed, _ = _run(model, replay)
    assert torch.equal(torch.stack(ran, 1), other)
    assert not torch.allclose(changed, logits, atol=1e-3)
    assert replay.overruled > 0


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_weights_of_replayed_experts_are_the_familys_own_softmax(family: str) -> None:
    model = _model(family)
    decoder = model.get_decoder()
    given: list[torch.Tensor] = []
    router = next(m for n, m in decoder.named_modules() if n.endswith(("router", "mlp.gate")))
    router.register_forward_hook(lambda module, args, out: given.append(out[0]))
    with torch.no_grad():
        _, routes = _run(model)
        other = (_ids(routes) + 1) % EXPERTS
        given.clear()
        _, ran = _run(model, _replay(model, other))
    logits = given[0].float()
    chosen = logits.gather(-1, other[:, 0])
    # softmax over the chosen, which is also the renormalised softmax over all
    assert torch.allclose(ran[0].weights, chosen.softmax(-1), atol=1e-6)


def test_the_margin_stays_that_of_the_routers_own_scores() -> None:
    model = _model("gpt_oss")
    with torch.no_grad():
        _, routes = _run(model)
        _, ran = _run(model, _replay(model, (_ids(routes) + 3) % EXPERTS))
    assert torch.equal(ran[0].margin, routes[0].margin)  # later layers see other hidden states
    assert ran[1].margin is not None


def test_rows_that_are_not_known_keep_the_models_own_choice() -> None:
    model = _model("qwen3_moe")
    with torch.no_grad():
        _, routes = _run(model)
        mask = torch.zeros(24, dtype=torch.bool)
        mask[[0, 5]] = True
        other = (_ids(routes) + 3) % EXPERTS
        _, ran = _run(model, _replay(model, other, mask))
    first = ran[0].ids  # later layers see other hidden states
    assert torch.equal(first[mask], other[mask][:, 0])
    assert torch.equal(first[~mask], routes[0].ids[~mask])


def test_weights_can_be_given_too() -> None:
    model = _model("gpt_oss")
    with torch.no_grad():
        logits, routes = _run(model)
        own = torch.stack([layer.weights for layer in routes], 1)
        again, _ = _run(model, _replay(model, _ids(routes), None, own))
        assert torch.equal(logits, again)
        even = torch.full_like(own, 0.5)
        changed, ran = _run(model, _replay(model, _ids(routes), None, even))
    assert torch.equal(ran[1].weights, even[:, 1])
    assert not torch.allclose(changed, logits, atol=1e-3)


def test_weights_cannot_be_given_to_a_family_that_does_not_show_them() -> None:
    model = _model("phimoe")
    with torch.no_grad():
        _, routes = _run(model)
        weights = torch.stack([layer.weights for layer in routes], 1)
        with pytest.raises(MismatchError, match=r"layer 0\b.*no weights"):
            _run(model, _replay(model, _ids(routes), None, weights))


# ---------------------------------------------------------------- gradients


def _router_gradient(model: Any, weights: bool) -> float:
    with torch.no_grad():
        _, routes = _run(model)
    ids = (_ids(routes) + 1) % EXPERTS
    constant = torch.full(ids.shape, 0.5) if weights else None
    logits, _ = _run(model, _replay(model, ids, None, constant))
    logits.float().logsumexp(-1).sum().backward()
    name = next(
        n for n, _ in model.named_parameters() if "router.weight" in n or "gate.weight" in n
    )
    gradient = model.get_parameter(name).grad
    return 0.0 if gradient is None else float(gradient.abs().sum())


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_gradients_reach_the_router_through_replayed_ids(family: str) -> None:
    assert _router_gradient(_model(family), weights=False) > 0


def test_replayed_weights_are_constants_without_a_gradient_for_the_router() -> None:
    assert _router_gradient(_model("gpt_oss"), weights=True) == 0.0


def test_a_layer_that_is_run_again_for_its_gradients_replays_the_same_routes() -> None:
    """The backward pass comes after the ``with`` block: only the checkpoint's contexts know."""
    with torch.no_grad():
        _, routes = _run(_model("gpt_oss"))
    ids = (_ids(routes) + 1) % EXPERTS

    def gradients(checkpointing: bool, contexts: bool = True) -> list[torch.Tensor]:
        model = _model("gpt_oss").train()
        if checkpointing:
            options: dict[str, Any] = {"use_reentrant": False}
            if contexts:
                options["context_fn"] = checkpoint_contexts
            model.gradient_checkpointing_enable(options)
        logits, _ = _run(model, _replay(model, ids))
        logits.float().logsumexp(-1).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain, again = gradients(False), gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    with pytest.raises(torch.utils.checkpoint.CheckpointError):  # what they guard against
        gradients(True, contexts=False)


def test_nothing_is_left_behind() -> None:
    model = _model("gpt_oss")
    with torch.no_grad():
        logits, routes = _run(model)
        with pytest.raises(ZeroDivisionError):
            _interrupted(model, _replay(model, (_ids(routes) + 1) % EXPERTS))
        assert torch.equal(_run(model)[0], logits)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def _interrupted(model: Any, replay: Replay) -> None:
    handle = model.model.layers[1].mlp.router.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        _run(model, replay)
    finally:
        handle.remove()


# ---------------------------------------------------------------- what is refused


def _source(**changes: Any) -> tuple[Any, Scoring]:
    samples = rollout()
    tokens = len(samples.token_ids)
    draw = np.random.default_rng(3)
    ids = np.stack([draw.permutation(EXPERTS)[:TOP_K] for _ in range(tokens * 2)])
    fields: dict[str, Any] = {
        "layers": (0, 1),
        "num_experts": EXPERTS,
        "ids": ids.reshape(tokens, 2, TOP_K).astype(np.uint8),
        "present": np.ones(tokens, bool),
        **changes,
    }
    actions = samples.token_ids[samples.actions]
    routing = Routing(**fields) if changes.get("ids", 0) is not None else None
    return samples, Scoring("vllm:decode", actions, np.zeros(len(actions)), {}, routing=routing)


def test_a_corrupt_capture_is_refused_with_its_layer_and_row() -> None:
    samples, scoring = _source()
    assert scoring.routing is not None
    scoring.routing.ids[17, 1] = 5  # the same expert twice
    with pytest.raises(CorruptCapture, match=r"twice.*token 17\b.*layer 1"):
        ReplaySource.of(scoring, "ids", samples)
    weights = np.full((*scoring.routing.ids.shape,), 0.5, np.float32)
    weights[21, 0, 1] = np.nan
    samples, scoring = _source(weights=weights)
    with pytest.raises(CorruptCapture, match=r"number.*token 21\b.*layer 0"):
        ReplaySource.of(scoring, "ids+weights", samples)
    ReplaySource.of(scoring, "ids", samples)  # whose ids are all right


def test_routes_that_are_not_there_are_refused() -> None:
    samples, scoring = _source(ids=None)
    with pytest.raises(MismatchError, match="--replay-routing ids: vllm:decode"):
        ReplaySource.of(scoring, "ids", samples)
    samples, scoring = _source()
    with pytest.raises(MismatchError, match=r"ids\+weights: vllm:decode.*without weights"):
        ReplaySource.of(scoring, "ids+weights", samples)


def test_routes_of_another_model_are_refused() -> None:
    layers = moe_layers(_model("gpt_oss").get_decoder())
    samples, scoring = _source()
    ReplaySource.of(scoring, "ids", samples).require_fits(layers)
    samples, scoring = _source(layers=(0, 2))
    with pytest.raises(MismatchError, match=r"\b0, 2,.*\b0, 1"):
        ReplaySource.of(scoring, "ids", samples).require_fits(layers)
    samples, scoring = _source(num_experts=16)
    with pytest.raises(MismatchError, match=r"\b16 experts,.*layer 0\b.*\b8"):
        ReplaySource.of(scoring, "ids", samples).require_fits(layers)


def test_rows_follow_the_tokens_in_both_layouts() -> None:
    samples, scoring = _source()
    assert scoring.routing is not None
    scoring.routing.present[samples.offsets[1:] - 1] = False  # the last sampled tokens
    source = ReplaySource.of(scoring, "ids", samples)
    facts = source.facts(overruled=0)
    assert (facts["rows_replayed"], facts["rows_own"]) == (len(samples.token_ids) - 5, 5)
    spans = [(int(samples.offsets[n]), int(samples.offsets[n + 1])) for n in (3, 1)]
    tokens = np.concatenate([np.arange(a, b) for a, b in spans])
    for layout in ("padding", "packing"):
        batch = collate([samples.token_ids[a:b] for a, b in spans], layout, "cpu")
        replay = source.on(tokens, batch)
        flat = batch.input_ids.reshape(-1)
        assert torch.equal(flat[batch.rows], torch.from_numpy(samples.token_ids[tokens]))
        expected = scoring.routing.ids[tokens].astype(np.int64)
        assert np.array_equal(replay.ids[batch.rows].numpy(), expected)
        assert int(replay.replayed.sum()) == len(tokens) - 2
        assert not replay.replayed[batch.rows[[48, 83]]].any()


@pytest.mark.parametrize("family", ALL)
def test_routers_are_tried_before_any_weight_is_loaded(family: str) -> None:
    with torch.device("meta"):
        bare = transformers.AutoModelForCausalLM.from_config(CONFIGURATIONS[family]())
    require_interventions_possible(TrainSpec(replay_routing="ids"), bare)


def test_a_router_that_cannot_be_answered_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        bare = transformers.AutoModelForCausalLM.from_config(configuration("gpt_oss"))
        dense = transformers.AutoModelForCausalLM.from_config(configuration("llama"))

    def by_sorting(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        values, ids = logits.sort(-1, descending=True)
        return logits, values[:, :TOP_K].softmax(-1), ids[:, :TOP_K]

    monkeypatch.setattr(type(bare.model.layers[0].mlp.router), "forward", by_sorting)
    with pytest.raises(MismatchError, match=r"layer 1\b.*not seen"):
        require_interventions_possible(TrainSpec(replay_routing="ids"), bare)
    require_interventions_possible(TrainSpec(), bare)
    with pytest.raises(MismatchError, match="llama is dense"):
        require_interventions_possible(TrainSpec(inject=(("router-noise", 0.1),)), dense)


# ---------------------------------------------------------------- injected noise


def _noise(sigma: float, seed: int = 0) -> RouterNoise:
    return RouterNoise(sigma, seed, np.array([0, 1]), np.array([12, 8]), _batch())


@pytest.mark.parametrize("family", ALL)
def test_noise_is_added_to_the_router_logits_alone(family: str) -> None:
    model = _model(family)
    with torch.no_grad():
        logits, routes = _run(model)
        noisy, moved = _run(model, _noise(3.0))
        again, _ = _run(model, _noise(3.0))
        other, _ = _run(model, _noise(3.0, seed=1))
        tiny, _ = _run(model, _noise(1e-12))
        fixed, held = _run(model, _replay(model, _ids(routes)), _noise(3.0))
    assert torch.equal(noisy, again)
    assert not torch.equal(noisy, other)
    assert torch.allclose(tiny, logits, atol=1e-5)
    assert not torch.equal(_ids(routes), _ids(moved))
    assert torch.equal(_ids(held), _ids(routes))  # replay undoes the flips, not the other weights
    assert not torch.equal(fixed, logits)


def test_noise_has_the_size_that_was_asked_for_and_follows_the_token() -> None:
    drawn = _noise(0.25).draw(3, 64)
    assert drawn.shape == (20, 64)
    assert drawn.std() == pytest.approx(0.25, rel=0.05)
    swapped = RouterNoise(0.25, 0, np.array([1, 0]), np.array([8, 12]), _batch()).draw(3, 64)
    assert np.array_equal(drawn, np.concatenate([swapped[8:], swapped[:8]]))
    assert not np.array_equal(drawn, _noise(0.25).draw(2, 64))
    assert not np.array_equal(drawn[:8], drawn[12:])  # nor is it the same for every sequence


def test_noise_that_found_no_router_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("gpt_oss")

    def by_hand(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden @ self.weight.T + self.bias
        values, ids = logits.topk(TOP_K, -1)
        return logits, values.softmax(-1), ids

    monkeypatch.setattr(type(model.model.layers[0].mlp.router), "forward", by_hand)
    with torch.no_grad(), pytest.raises(MismatchError, match="gave no logits"):
        _run(model, _noise(0.1))
