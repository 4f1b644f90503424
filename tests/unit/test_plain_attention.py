"""Plain attention: the eager numbers of a family, in blocks of queries, keys in fp8 where asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mismatch.doctor.memory import PLAIN_BLOCK
from mismatch.errors import MismatchError
from mismatch.training.attention.resolve import YARDSTICKS, register_kernels, resolve_for
from mismatch.training.attention.sink_sdpa import BLOCK, through_fp8
from tests.checkpoints import configuration

TOKENS = BLOCK + 70  # more than a block


def logits(model: Any, implementation: str, padding: int = 0) -> torch.Tensor:
    ids = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padding:
        mask[1, -padding:] = 0
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return output[mask.bool()]


def model_of(family: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = configuration(family, max_position_embeddings=1024, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(0.0, 0.3 if "sink" in name else 0.1)
    register_kernels()
    return model


SCALED = {"query_pre_attn_scalar": 64}  # no head's size, as in gemma2-27b and gemma3-27b


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((name, {}) for name in ("llama", "gpt_oss", "qwen3_moe", "qwen3", "glm4", "olmo2")),
        ("gemma2", SCALED),
        ("gemma3", SCALED),
        ("granitemoehybrid", {"attention_multiplier": 0.12}),
    ],
)
def test_plain_attention_is_the_family_own_in_float32(family: str, fields: dict[str, Any]) -> None:
    model = model_of(family, **fields)
    eager = logits(model, "eager", padding=40)
    plain = logits(model, YARDSTICKS["plain"], padding=40)
    assert (plain - eager).abs().max() < 1e-4 * eager.abs().max()
    fp8 = logits(model, YARDSTICKS["plain-fp8-kv"], padding=40)
    assert 1e-3 < (fp8 - eager).abs().max() / eager.abs().max() < 0.5


def test_keys_and_values_go_through_fp8_and_saturate() -> None:
    values = torch.tensor([1.0, 1.03, 300.0, 1e6, -1e6, 0.0])
    assert through_fp8(values).tolist() == [1.0, 1.0, 288.0, 448.0, -448.0, 0.0]
    assert through_fp8(values.bfloat16()).dtype == torch.bfloat16


def test_the_yardsticks_run_for_any_model_and_never_drop_sinks() -> None:
    for family, honours in (("llama", None), ("gpt_oss", True)):
        for name in YARDSTICKS:
            attention = resolve_for(name, model_of(family))
            assert (attention.implementation, attention.honours_sinks) == (
                YARDSTICKS[name],
                honours,
            )
            assert attention.label == name


def test_a_family_that_computes_with_its_masks_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    monkeypatch.setattr(type(model), "_supports_flash_attn", False)
    assert resolve_for("plain", model).implementation == "eager"
    with pytest.raises(MismatchError):
        resolve_for("plain-fp8-kv", model)


def test_memory_is_predicted_for_blocks_of_that_size() -> None:
    assert PLAIN_BLOCK == BLOCK
