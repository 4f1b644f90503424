"""LongRoPE: the length that an engine is started with decides its function, not ours to decide."""

from __future__ import annotations

from typing import Any

import pytest

from mismatch.analysis.diagnosis.declared import rope_length
from mismatch.engines.model_info import ModelInfo
from mismatch.engines.vllm import arguments as vllm_args
from mismatch.experiments.beyond import length_of
from mismatch.models.config import ModelConfig
from mismatch.specs import CheckSpec, EngineSpec, Sampling

SIZES = {"model_type": "phi3", "vocab_size": 64, "hidden_size": 8, "num_attention_heads": 2}
SIZES |= {"num_hidden_layers": 2, "intermediate_size": 8, "max_position_embeddings": 131_072}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "rope_scaling, Phi-3.5": (
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096},
        4096,
    ),
    "su, Phi-3": (
        {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096},
        4096,
    ),
    "rope_parameters": (
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 2048}},
        2048,
    ),
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 4096}},
        0,
    ),
    "by layer type": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 0),
    "none": ({"rope_scaling": None}, 0),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_the_length_that_decides_is_read(case: str) -> None:
    fields, switch = PUBLISHED[case]
    assert ModelConfig.of(SIZES | fields).rope_switch == switch


@pytest.mark.parametrize(
    "name", ["n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length"]
)
def test_a_context_of_another_name_is_read(name: str) -> None:
    plain = {k: v for k, v in SIZES.items() if k != "max_position_embeddings"}
    assert ModelConfig.of(plain | {name: 1024}).context == 1024


@pytest.mark.parametrize("longest", [60, 1500, 1985, 1999])
@pytest.mark.parametrize("switch", [2000, 2048, 4096])
def test_an_engine_gets_no_length_that_its_sequences_do_not_need(longest: int, switch: int) -> None:
    """Lengths are rounded up for the kernels, and never beyond that of the factors."""
    info = ModelInfo(64, 131_072, (2,), num_experts=0, top_k=0, rope_switch=switch)
    given = vllm_args.engine_arguments(EngineSpec("vllm", "m"), Sampling(), info, longest)
    assert longest < given["max_model_len"] <= switch


def test_sequences_beyond_it_get_what_they_need() -> None:
    info = ModelInfo(64, 131_072, (2,), num_experts=0, top_k=0, rope_switch=2048)
    given = vllm_args.engine_arguments(EngineSpec("vllm", "m"), Sampling(), info, 3000)
    assert given["max_model_len"] == 3008


def test_the_long_sequence_ends_before_the_factors_change() -> None:
    fields, switch = PUBLISHED["rope_parameters"]
    check = CheckSpec(context_length=10_000)
    length, why = length_of(check, ModelConfig.of(SIZES | fields), 10**6, 1 << 50)
    assert length == switch - 1
    assert "LongRoPE" in why


def test_an_engine_without_the_length_of_the_users_own_is_no_proof() -> None:
    """vLLM's default is the whole context: there a run's own engine takes the long factors."""
    taken = {"rope_switch": 4096, "max_model_len": 2112}
    (unknown,) = rope_length(taken, given=False)  # type: ignore[arg-type]
    assert (unknown.status, "short" in unknown.detail) == ("warning", True)
    assert "--max-model-len" in unknown.fix
    (known,) = rope_length(taken | {"max_model_len": 8192}, given=True)  # type: ignore[arg-type]
    assert (known.status, "long" in known.detail) == ("passed", True)
    assert rope_length({"rope_switch": 0, "max_model_len": 8192}, given=False) == []
