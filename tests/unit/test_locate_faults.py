"""Faults planted in tiny models of three families: the first source is the module at fault.

The side computes in bf16 (or float32, for faults of precision), the yardstick is a plain forward in
the same dtype, the reference is float32. Real engines and the head: tests/integration.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mismatch.features.locate.errors import Sums, form_of, site_errors
from mismatch.features.locate.judge import groups_of
from mismatch.features.locate.reference import Replay
from mismatch.features.locate.results import Site
from mismatch.models.boundaries import Boundaries, Recorder
from mismatch.models.layer_parts import LAYERS, child, parts_of
from tests import checkpoints, families
from tests.unit.test_module_capture import model_of

SEQUENCES, TOKENS = 3, 40
FAULTY = 1  # layer
FAMILIES = (*checkpoints.FAMILIES, *checkpoints.FURTHER_NORMS, *checkpoints.OTHER_LAYERS)
Plant = Callable[[Any], None]


def rope(model: Any) -> None:
    decoder = model.get_decoder()
    other = copy.deepcopy(decoder.rotary_emb)
    count = other.inv_freq.numel()
    other.inv_freq.mul_(4.0 ** -(torch.arange(count) / count))

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        tables = other(kwargs["hidden_states"], torch.arange(TOKENS)[None])
        return args, kwargs | {"position_embeddings": tables}

    decoder.layers[FAULTY].self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def window(model: Any) -> None:
    model.config.sliding_window -= 1


def sinks(model: Any) -> None:
    for layer in model.get_decoder().layers:
        layer.self_attn.sinks.data.fill_(-1e4)


def swapped(model: Any) -> None:
    for parameter in model.get_decoder().layers[FAULTY].mlp.experts.parameters():
        parameter.data[:2] = parameter.data[:2].flip(0).clone()


def noise(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.get_decoder().layers[FAULTY].named_parameters():
        if "norm" not in name:
            off = 0.03 * torch.randn(parameter.shape, generator=generator)
            parameter.data.mul_((1 + off).to(parameter.dtype))


def eps(model: Any) -> None:
    model.get_decoder().layers[FAULTY].post_attention_layernorm.variance_epsilon = 0.5


def clamp(model: Any) -> None:
    for layer in model.get_decoder().layers:
        layer.mlp.experts.limit = 0.3


def router_bf16(model: Any) -> None:
    for layer in model.get_decoder().layers:
        router = getattr(layer.mlp, "router", None) or layer.mlp.gate
        router.weight.data.copy_(router.weight.data.bfloat16())
        router.register_forward_pre_hook(lambda _, args: tuple(x.bfloat16().float() for x in args))


def behind_attention(model: Any) -> None:
    parts_of(model.get_decoder().layers[FAULTY]).behind_attention.weight.data.add_(0.2)


def behind_mlp(model: Any) -> None:
    parts_of(model.get_decoder().layers[FAULTY]).behind_mlp.weight.data.add_(0.2)


def query(model: Any) -> None:
    model.get_decoder().h[FAULTY].attn.c_attn.weight.data[:, : model.config.n_embd] *= 1.1


def mamba(model: Any) -> None:
    model.get_decoder().layers[0].mamba.out_proj.weight.data.mul_(1.1)


def shared(model: Any) -> None:
    model.get_decoder().layers[FAULTY].shared_mlp.output_linear.weight.data.mul_(1.1)


def mlp(model: Any) -> None:
    """Half of what the MLP gives: a norm behind it would take out a factor on all of it."""
    decoder = model.get_decoder()
    layer = child(decoder, LAYERS)[FAULTY]

    def louder(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * (1 + 0.1 * (torch.arange(out.shape[-1]) % 2).to(out.dtype))

    parts_of(layer).mlp.register_forward_hook(louder)


FAULTS: tuple[tuple[str, Plant, str, torch.dtype], ...] = (
    ("gpt_oss", sinks, "0.attention", torch.bfloat16),
    ("gpt_oss", window, "0.attention", torch.bfloat16),
    ("gpt_oss", rope, "1.rope_q", torch.bfloat16),
    ("gpt_oss", swapped, "1.mlp", torch.bfloat16),
    ("gpt_oss", noise, "1.q", torch.bfloat16),
    ("gpt_oss", eps, "1.post_norm", torch.bfloat16),
    ("gpt_oss", clamp, "0.mlp", torch.bfloat16),
    ("gpt_oss", router_bf16, "0.router", torch.float32),
    ("qwen3", rope, "1.rope_q", torch.bfloat16),
    ("qwen3", noise, "1.q", torch.bfloat16),
    ("qwen3", eps, "1.post_norm", torch.bfloat16),
    ("qwen3_moe", rope, "1.rope_q", torch.bfloat16),
    ("qwen3_moe", swapped, "1.mlp", torch.bfloat16),
    ("qwen3_moe", noise, "1.q", torch.bfloat16),
    ("qwen3_moe", router_bf16, "0.router", torch.float32),
    ("gemma2", behind_mlp, "1.mlp_norm", torch.bfloat16),
    ("gemma3", behind_attention, "1.attention_norm", torch.bfloat16),
    ("glm4", behind_attention, "1.attention_norm", torch.bfloat16),
    ("glm4", behind_mlp, "1.mlp_norm", torch.bfloat16),
    *((family, mlp, "1.mlp", torch.bfloat16) for family in checkpoints.OTHER_LAYERS),
    ("olmo2", behind_attention, "1.attention_norm", torch.bfloat16),
    ("gpt2", query, "1.q", torch.bfloat16),
    ("falcon_h1", mamba, "0.mixer", torch.bfloat16),
    ("granitemoehybrid", mamba, "0.mixer", torch.bfloat16),
    ("granitemoehybrid", shared, "1.shared_mlp", torch.bfloat16),
)


def recorded(model: Any, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 250, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
    recorder = Recorder()
    with torch.no_grad(), Boundaries(model.get_decoder(), recorder).shown():
        model(input_ids=ids, use_cache=False)
    return recorder.values


def replayed(model: Any, side: Any) -> dict[Site, list[Sums]]:
    sums: dict[Site, list[Sums]] = {}
    top_k = getattr(model.config, "num_experts_per_tok", 0) or 0
    for seed in range(SEQUENCES):
        replay = Replay(recorded(side, seed), recorded(model, seed), top_k)
        ids = torch.randint(3, 250, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), Boundaries(model.get_decoder(), replay).shown():
            model(input_ids=ids, use_cache=False)
        for site, total in replay.sums.items():
            sums.setdefault(site, []).append(total)
    return sums


def published(family: str) -> Any:
    """A model all of whose values are bf16."""
    model = model_of(family)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    return model


def sources(family: str, plant: Plant | None, dtype: torch.dtype) -> list[str]:
    """Keys of the sources, in their order."""
    reference = published(family)
    side = published(family).to(dtype)
    plain = None if dtype == torch.float32 else replayed(reference, published(family).to(dtype))
    if plant is not None:
        plant(side)
    short = "fp32" if dtype == torch.float32 else "bf16"
    errors = site_errors(replayed(reference, side), plain, short)
    return [sites[0].key for _, sites in groups_of(errors)]


@pytest.mark.parametrize(("family", "plant", "expected", "dtype"), FAULTS)
def test_the_first_source_is_the_module_at_fault(
    family: str, plant: Plant, expected: str, dtype: torch.dtype
) -> None:
    assert sources(family, plant, dtype)[:1] == [expected]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clean_side_has_no_source(family: str) -> None:
    assert sources(family, None, torch.bfloat16) == []


# ---------------------------------------------------------------- what a side leaves out


def normed_later(model: Any) -> None:
    """Queries and keys go into the rotation as they are, and are normalised behind it."""
    for layer in model.get_decoder().layers:
        norms = layer.self_attn.q_norm, layer.self_attn.k_norm
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
        layer.self_attn.late = torch.nn.ModuleList(norms)


def ungated(model: Any) -> None:
    for layer in model.get_decoder().layers:
        layer.mlp.shared_expert_gate.weight.data.zero_()  # sigmoid(0) = 1/2
        down = layer.mlp.shared_expert.down_proj.weight
        down.data.mul_(2.0)


def unshared(model: Any) -> None:
    for layer in model.get_decoder().layers:
        layer.mlp.shared_expert.down_proj.weight.data.zero_()


def halfway(model: Any) -> None:
    for layer in model.get_decoder().layers:
        layer.mlp.shared_expert_gate.weight.data.mul_(0.5)


def louder_experts(model: Any) -> None:
    for layer in model.get_decoder().layers:
        experts = layer.mlp.experts
        experts.down_proj.data.mul_(1.5)


def exact_gelu(model: Any) -> None:
    for layer in model.get_decoder().layers:
        layer.mlp.act_fn = torch.nn.GELU()


def uncapped(model: Any) -> None:
    for layer in model.get_decoder().layers:
        layer.self_attn.attn_logit_softcapping = None


FORMED: tuple[tuple[str, Plant | None, str, str], ...] = (
    ("qwen3", normed_later, "0.q", "no-qk-norm"),
    ("qwen3", noise, "1.q", ""),  # other weights, and nothing left out
    ("qwen2_moe", ungated, "0.mlp", "no-shared-gate"),
    ("qwen2_moe", unshared, "0.mlp", "no-shared-expert"),
    ("qwen2_moe", halfway, "0.mlp", "shared-gate"),
    ("qwen2_moe", louder_experts, "0.mlp", "routed-scale"),
    ("qwen3_moe", louder_experts, "0.mlp", "routed-scale"),
    ("qwen3_moe", swapped, "1.mlp", ""),
    ("gemma2", exact_gelu, "0.mlp", "gelu"),
    ("gemma2", uncapped, "0.attention", "no-softcap"),
    ("gpt_oss", sinks, "0.attention", ""),
)


def made(family: str) -> Any:
    import transformers

    if family != "qwen2_moe":
        return published(family)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        families.configuration(family, decoder_sparse_step=1)
    )
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def form_at(family: str, plant: Plant | None) -> tuple[str, str]:
    """Key of the first source, and the form of it, in float32."""
    model, faulty = made(family), made(family)
    if plant is not None:
        plant(faulty)
    top_k = getattr(model.config, "num_experts_per_tok", 0) or 0
    sums: dict[Site, list[Sums]] = {}
    forms: dict[tuple[Site, str], list[Sums]] = {}
    for seed in range(SEQUENCES):
        replay = Replay(recorded(faulty, seed), recorded(model, seed), top_k)
        ids = torch.randint(3, 250, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
        boundaries = Boundaries(model.get_decoder(), replay, replay.otherwise)
        with torch.no_grad(), boundaries.shown():
            model(input_ids=ids, use_cache=False)
        for site, total in replay.sums.items():
            sums.setdefault(site, []).append(total)
        for form, total in replay.forms.items():
            forms.setdefault(form, []).append(total)
    groups = groups_of(site_errors(sums, None, "fp32"))
    if not groups:
        return "", ""
    _, places = groups[0]
    return places[0].key, form_of(places, forms, None, "fp32")


@pytest.mark.parametrize(("family", "plant", "site", "form"), FORMED)
def test_what_a_side_leaves_out_is_told_from_other_weights(
    family: str, plant: Plant, site: str, form: str
) -> None:
    assert form_at(family, plant) == (site, form)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe", "gemma2", "gpt_oss"])
def test_a_module_as_it_is_declared_has_no_other_form(family: str) -> None:
    assert form_at(family, None) == ("", "")
