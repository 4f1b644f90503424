"""Boundaries of decoders: every site is seen, replacing one by itself changes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch.errors import MismatchError
from mismatch.features.locate.engine_side import join_ranks, of_rank, start, stop, take
from mismatch.features.locate.reference import Replay, added, unseen
from mismatch.features.locate.results import LAYER_SITES, SOME_FAMILIES, TITLES
from mismatch.models.boundaries import Boundaries, Recorder
from tests import checkpoints, families
from tests.checkpoints import FAMILIES, FURTHER_NORMS, OTHER_LAYERS
from tests.families import configuration

TOKENS = 12


ROPE = {"rope_q", "rope_k"}
NORMS_BEHIND = {"attention_norm", "mlp_norm"}
ATTENTION = {"q", "k", "v", "attention", "attention_output"}
# What a layer of other parts shows further, and what it does not have or does not show.
FURTHER = {
    **dict.fromkeys((*FURTHER_NORMS, "olmo2"), NORMS_BEHIND),
    "falcon_h1": {"mixer"},
    "granitemoehybrid": {"shared_mlp"},
}
WITHOUT = {
    "olmo2": {"input_norm", "post_norm"},
    "gpt2": ROPE,
    "granitemoehybrid": ROPE,
    "cohere": {"attention_residual", "post_norm"},
    "apertus": {"input_norm", "attention_residual", "post_norm"},
}


def sites_of(family: str, layer: int = 1) -> set[str]:
    """What a layer of this family shows."""
    left_out = set() if "moe" in family or family == "gpt_oss" else {"router"}
    shown = set(LAYER_SITES) - left_out - set(SOME_FAMILIES) - WITHOUT.get(family, set())
    if family == "granitemoehybrid" and layer == 0:
        shown = (shown - ATTENTION) | {"mixer"}
    return shown | FURTHER.get(family, set())


def model_of(family: str, **overrides: Any) -> Any:
    import transformers

    config = checkpoints.configuration(family, **overrides)
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def logits(model: Any, visit: Any) -> torch.Tensor:
    ids = torch.arange(TOKENS)[None] + 5
    with torch.no_grad(), Boundaries(model.get_decoder(), visit).shown():
        out: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return out


@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER_NORMS, *OTHER_LAYERS])
def test_every_site_is_seen_and_replacing_it_by_itself_changes_nothing(family: str) -> None:
    model = model_of(family)
    recorder = Recorder()
    with torch.no_grad():
        plain = model(input_ids=torch.arange(TOKENS)[None] + 5, use_cache=False).logits
    torch.testing.assert_close(logits(model, recorder), plain, rtol=0, atol=0)
    layers = range(model.config.num_hidden_layers)
    expected = {f"{layer}.{name}" for layer in layers for name in sites_of(family, layer)}
    assert set(recorder.values) == expected | {"embedding", "final_norm"}
    assert all(len(value) == TOKENS for value in recorder.values.values())
    top_k = getattr(model.config, "num_experts_per_tok", 0) or 0
    replay = Replay(recorder.values, recorder.values, top_k)
    torch.testing.assert_close(logits(model, replay), plain, rtol=1e-5, atol=1e-5)
    assert not replay.hidden
    assert all(sums.new <= 1e-9 * sums.same for sums in replay.sums.values())


def fault(model: Any, name: str) -> None:
    """Plants one, in the second layer where there is a choice."""
    layer = model.get_decoder().layers[1]
    if name == "mlp":
        for parameter in layer.mlp.experts.parameters():
            parameter.data[:2] = parameter.data[:2].flip(0).clone()
    elif name == "q":
        layer.self_attn.q_proj.weight.data.mul_(1.03)
    elif name == "post_norm":
        layer.post_attention_layernorm.variance_epsilon *= 1000
    elif name == "attention":
        layer.self_attn.sinks.data.fill_(-1e4)
    elif name == "router":
        layer.mlp.router.weight.data.copy_(layer.mlp.router.weight.data.bfloat16())
    elif name == "final_norm":
        model.get_decoder().norm.weight.data.mul_(1.001)


@pytest.mark.parametrize("name", ["q", "attention", "post_norm", "router", "mlp", "final_norm"])
def test_a_fault_is_new_at_its_module_alone_and_explains_the_end(name: str) -> None:
    model, faulty = model_of("gpt_oss"), model_of("gpt_oss")
    fault(faulty, name)
    own, natural = Recorder(), Recorder()
    plain, off = logits(model, natural), logits(faulty, own)
    replay = Replay(own.values, natural.values, 2)
    torch.testing.assert_close(logits(model, replay), off, rtol=1e-4, atol=1e-4)
    large = {s.key for s, sums in replay.sums.items() if sums.new > 1e-9 * sums.same}
    expected = name if name == "final_norm" else f"1.{name}"
    assert large == {expected}
    alone = logits(model, partial(added, {expected: replay.news[expected]}))
    assert float((alone - off).abs().max()) < 0.01 * float((plain - off).abs().max())


@pytest.mark.parametrize(("family", "attention"), [("nemotron_h", 2), ("qwen3_next", 3)])
def test_what_mixes_tokens_without_attention_is_seen(family: str, attention: int) -> None:
    """In Nemotron-H a layer is one such part, whatever it does, behind one norm."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_config(configuration(family)).eval()
    recorder = Recorder()
    plain = logits(model, recorder)
    assert {"0.input_norm", "0.mixer", "0.residual"} <= set(recorder.values)
    shown = [key for key in recorder.values if key.endswith(".attention")]
    assert shown == [f"{attention}.attention"]
    torch.testing.assert_close(logits(model, Replay(recorder.values, recorder.values, 2)), plain)


class Unnamed(torch.nn.Module):
    """A layer whose parts have names of no other family."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.whole = torch.nn.Sequential(layer)

    def forward(self, x: torch.Tensor, **rest: Any) -> torch.Tensor:
        out: torch.Tensor = self.whole[0](x, **rest)
        return out


def test_layers_without_known_parts_are_compared_as_wholes() -> None:
    model, faulty = model_of("llama"), model_of("llama")
    for each in (model, faulty):
        decoder = each.get_decoder()
        decoder.layers = torch.nn.ModuleList(map(Unnamed, decoder.layers))
    faulty.get_decoder().layers[1].whole[0].mlp.down_proj.weight.data.mul_(1.5)
    own, natural = Recorder(), Recorder()
    logits(model, natural), logits(faulty, own)
    replay = Replay(own.values, natural.values, 0)
    logits(model, replay)
    large = {site.key for site, sums in replay.sums.items() if sums.new > 1e-9 * sums.same}
    assert large == {"1.residual"}
    (entry,) = unseen(own.values, layers=2, routers=())
    assert TITLES["mlp"] in entry.what
    assert TITLES["residual"] not in entry.what.split(", ")


def test_a_module_without_layers_is_refused() -> None:
    with pytest.raises(MismatchError), Boundaries(torch.nn.Linear(2, 2), Recorder()).shown():
        pass


def test_hooks_and_functions_are_gone_behind_the_block() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = model_of("qwen3_moe")
    before = type(ALL_ATTENTION_FUNCTIONS).get_interface
    recorder = Recorder()
    with pytest.raises(RuntimeError), Boundaries(model.get_decoder(), recorder).shown():
        raise RuntimeError
    model(input_ids=torch.arange(TOKENS)[None], use_cache=False)
    assert recorder.values == {}
    assert type(ALL_ATTENTION_FUNCTIONS).get_interface is before


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_latent_attention_shows_the_part_that_rope_turns(family: str) -> None:
    """By a function with another name; where there is an indexer, its part is turned as well."""
    model = model_of(family) if family == "deepseek_v3" else families.tiny(family)
    recorder = Recorder()
    plain = logits(model, recorder)
    assert all(f"1.{name}" in recorder.values for name in sites_of("a moe"))
    layers = len(model.get_decoder().layers)
    assert unseen(recorder.values, layers, routers=range(1, layers)) == []
    replay = Replay(recorder.values, recorder.values, 2)
    torch.testing.assert_close(logits(model, replay), plain, rtol=1e-5, atol=1e-5)
    zeros = {key: torch.zeros_like(value) for key, value in recorder.values.items()}
    torch.testing.assert_close(logits(model, partial(added, zeros)), plain, rtol=1e-5, atol=1e-5)


def test_a_site_that_some_layer_does_not_show_is_not_tested() -> None:
    shown = {f"{layer}.{name}" for layer in range(2) for name in sites_of("a moe")}
    assert unseen(shown, 2, routers=(0, 1)) == []
    assert unseen(shown - {"0.router"}, 2, routers=(1,)) == []  # a dense layer
    (entry,) = unseen(shown - {"0.router"}, 2, routers=(0, 1))
    assert entry.what == TITLES["router"]
    (entry,) = unseen(shown - {"0.router", "1.router", "1.q"}, 2, routers=(0, 1))
    assert entry.what == ", ".join(TITLES[name] for name in ("q", "router"))
    (entry,) = unseen(shown, 3, routers=())
    assert TITLES["residual"] in entry.what.split(", ")


# ---------------------------------------------------------------- several ranks of an engine

HEADS, KV_HEADS, SIZE, RANKS = 8, 2, 3, 4


def test_what_ranks_hold_is_put_together(tmp_path: Path) -> None:
    """Four ranks, two heads of keys and values: pairs of neighbours have the same."""
    draw = torch.Generator().manual_seed(0)
    widths = {"0.q": HEADS * SIZE, "0.rope_k": KV_HEADS * SIZE, "0.attention": HEADS * SIZE}
    whole = {key: torch.randn(TOKENS, width, generator=draw) for key, width in widths.items()}
    same = torch.randn(TOKENS, 5, generator=draw)
    same[0, 0] = torch.nan
    shares = torch.randn(RANKS, TOKENS, 5, generator=draw)
    for rank in range(RANKS):
        parts = {
            "0.q": whole["0.q"].chunk(RANKS, -1)[rank],
            "0.rope_k": whole["0.rope_k"].chunk(KV_HEADS, -1)[rank // 2],
            "0.attention": whole["0.attention"].chunk(RANKS, -1)[rank],
            "0.residual": same,
            "0.mlp": same,
            "0.attention_output": shares[rank],
            "0.router": shares[rank],  # other values on every rank, and no sum of anything
        }
        parts = {key: value.clone().contiguous() for key, value in parts.items()}
        save_file(parts, of_rank(tmp_path / "0", rank), {"kv_copies": '{"0": 2}'})
    join_ranks(tmp_path / "0", RANKS)
    joined = load_file(tmp_path / "0")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert joined.keys() == whole.keys() | {"0.residual", "0.mlp", "0.attention_output"}
    for key, value in whole.items():
        assert torch.equal(joined[key], value)
    for key in ("0.residual", "0.mlp"):
        torch.testing.assert_close(joined[key], same, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(joined["0.attention_output"], shares.sum(0))


def test_a_single_rank_is_taken_as_it_is(tmp_path: Path) -> None:
    parts = {"0.q": torch.ones(2, 3), "0.mlp": torch.full((2, 3), torch.inf)}
    save_file(parts, of_rank(tmp_path / "0", 0))
    join_ranks(tmp_path / "0", 1)
    assert all(torch.equal(load_file(tmp_path / "0")[key], parts[key]) for key in parts)


# ---------------------------------------------------------------- fused modules of an engine


class Fused(torch.nn.Module):
    """A norm as vLLM has it: it adds the residual where one is given."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return x * 2
        return (x + residual) * 2, x + residual


class Rope(torch.nn.Module):
    def forward(self, positions: Any, q: torch.Tensor, k: torch.Tensor) -> Any:
        return q + 1, k + 1


class Attend(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + k + v


class Output(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 3, None


class Attention(torch.nn.Module):
    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rotary_emb, self.attn, self.o_proj = rope, Attend(), Output()

    def forward(self, hidden_states: torch.Tensor) -> Any:
        q, k = self.rotary_emb(None, hidden_states, hidden_states)
        return self.o_proj(self.attn(q, k, hidden_states))[0]


class Layer(torch.nn.Module):
    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Fused(), Fused()
        self.self_attn, self.mlp = Attention(rope), torch.nn.Identity()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(hidden_states=x), residual)
        return self.mlp(x), residual


class Engine(torch.nn.Module):
    """A model of two layers that share their rope, with the names that vLLM uses."""

    def __init__(self) -> None:
        super().__init__()
        rope = Rope()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([Layer(rope), Layer(rope)])
        self.model.norm = Fused()

    def forward(self, x: torch.Tensor) -> Any:
        residual = None
        for layer in self.model.layers:
            x, residual = layer(x, residual)
        return self.model.norm(x, residual)


class WithImages(torch.nn.Module):
    """A model that reads images: vLLM keeps its language model under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = Engine()

    def forward(self, x: torch.Tensor) -> Any:
        return self.language_model(x)


@pytest.mark.parametrize("kind", [Engine, WithImages])
def test_fused_modules_show_every_site_under_its_name(
    kind: type[torch.nn.Module], tmp_path: Path
) -> None:
    model, x = kind(), torch.randn(3, 4)
    assert start(model) == ""
    for step in (x[:2], x[2:]):  # a prefill in two steps is joined
        final, stream = model(step.clone())
    assert take(model, str(tmp_path / "0")) == 3
    stop(model)
    join_ranks(tmp_path / "0", 1)
    shown = load_file(tmp_path / "0")
    sites = set(LAYER_SITES) - set(SOME_FAMILIES) - {"router"}
    expected = {f"{layer}.{site}" for layer in (0, 1) for site in sites}
    assert set(shown) == expected | {"embedding", "final_norm"}
    torch.testing.assert_close(shown["embedding"], x)
    torch.testing.assert_close(shown["0.rope_k"], 2 * x + 1)
    torch.testing.assert_close(shown["0.attention_output"], 3 * (6 * x + 2))
    torch.testing.assert_close(shown["1.input_norm"], 2 * shown["0.residual"])
    torch.testing.assert_close(shown["1.residual"][2:], stream)
    torch.testing.assert_close(shown["final_norm"][2:], final)
    model(x)
    assert take(model, str(tmp_path / "1")) == 0  # the hooks are gone


class Alone(torch.nn.Module):
    """A layer with a state-space block that fills what it is given, and norms behind alone."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mamba, self.mlp = torch.nn.Identity(), Filling(), torch.nn.Identity()
        self.self_attn.attn = Attend()
        self.post_attention_layernorm, self.post_feedforward_layernorm = Fused(), Fused()

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        filled = torch.zeros_like(x)
        self.mamba(x, filled)
        x = x + self.post_attention_layernorm(self.self_attn(self.self_attn.attn(x, x + 1, x)))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Filling(torch.nn.Module):
    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)


class Batched(torch.nn.Module):
    """A model that is given a batch of one sequence, with names of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = torch.nn.Module()
        self.transformer.h = torch.nn.ModuleList([Alone(), Alone()])
        self.transformer.ln_f = Fused()

    def forward(self, x: torch.Tensor) -> Any:
        x = x[None]
        for layer in self.transformer.h:
            x = layer(torch.arange(x.shape[1])[None], x)
        return self.transformer.ln_f(x)


def test_layers_of_other_parts_are_recorded_by_what_they_have(tmp_path: Path) -> None:
    model, x = Batched(), torch.randn(3, 4)
    assert start(model) == ""
    final = torch.cat([model(step.clone())[0] for step in (x[:2], x[2:])])
    assert take(model, str(tmp_path / "0")) == 3
    stop(model)
    join_ranks(tmp_path / "0", 1)
    shown = load_file(tmp_path / "0")
    sites = sites_of("olmo2") - ROPE
    assert set(shown) == {f"{n}.{site}" for n in (0, 1) for site in sites} | {
        "embedding",
        "final_norm",
    }
    torch.testing.assert_close(shown["embedding"], x)
    torch.testing.assert_close(shown["0.k"], x + 1)
    torch.testing.assert_close(shown["0.attention_residual"], x + 2 * (3 * x + 1))
    torch.testing.assert_close(shown["final_norm"], final)
    torch.testing.assert_close(shown["final_norm"], 2 * shown["1.residual"])


class PassingOn(torch.nn.Module):
    """A norm as Cohere's models have it in vLLM: it takes a residual and does not add it."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
        return x * 2, residual


class Parallel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.mlp = PassingOn(), torch.nn.Identity()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        normed, residual = self.input_layernorm(x, x)
        return residual + self.mlp(normed), residual


def test_a_residual_that_a_norm_passes_on_is_not_the_stream(tmp_path: Path) -> None:
    model, x = Engine(), torch.randn(3, 4)
    model.model.layers = torch.nn.ModuleList([Parallel(), Parallel()])
    model.model.norm = PassingOn()
    assert start(model) == ""
    model(x.clone())
    assert take(model, str(tmp_path / "0")) == 3
    join_ranks(tmp_path / "0", 1)
    shown = load_file(tmp_path / "0")
    torch.testing.assert_close(shown["embedding"], x)
    torch.testing.assert_close(shown["0.residual"], 3 * x)
    torch.testing.assert_close(shown["1.residual"], 9 * x)


def test_a_stream_in_two_parts_is_not_taken_for_one(tmp_path: Path) -> None:
    model, x = Engine(), torch.randn(3, 4)
    for layer in model.model.layers:
        layer.norm_of_mine, layer.input_layernorm = layer.input_layernorm, None
        layer.forward = lambda x, residual, own=layer: (own.mlp(x), x)
    assert start(model) == ""
    model(x.clone())
    assert take(model, str(tmp_path / "0")) == 3
    stop(model)
    join_ranks(tmp_path / "0", 1)
    shown = load_file(tmp_path / "0")
    assert {"embedding", "1.residual", "1.mlp"} <= set(shown)
    assert "0.residual" not in shown


class Latent(torch.nn.Module):
    """MLA as vLLM has it: what is inside has no place in a trainer's model."""

    kv_lora_rank = 512

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 5 * hidden_states


def test_latent_attention_is_recorded_as_a_whole(tmp_path: Path) -> None:
    model, x = Engine(), torch.randn(3, 4)
    for layer in model.model.layers:
        layer.self_attn = Latent()
    assert start(model) == ""
    model(x.clone())
    assert take(model, str(tmp_path / "0")) == 3
    stop(model)
    join_ranks(tmp_path / "0", 1)
    shown = load_file(tmp_path / "0")
    torch.testing.assert_close(shown["0.attention_output"], 5 * shown["0.input_norm"])
    assert not {"0.q", "0.v", "0.attention", "1.rope_k"} & shown.keys()


def test_layers_of_an_engine_that_are_put_together_otherwise_are_said() -> None:
    model = Engine()
    del model.model.norm
    assert start(model)
    assert not model.model.layers[0].mlp._forward_hooks
