"""A kernel that drops attention sinks is refused, unless that fault is planted by name."""

from __future__ import annotations

import pytest
import torch

from mismatch.errors import MismatchError
from mismatch.training.attention import (
    PLANTED,
    boolean_mask,
    has_sinks,
    resolve_attention,
    sink_attention,
    sinkless_attention,
)
from mismatch.training.source import skeleton
from tests.checkpoints import configuration


def test_sinks_are_found() -> None:
    assert has_sinks(skeleton(configuration("gpt_oss")))
    assert not has_sinks(skeleton(configuration("llama")))


@pytest.mark.parametrize(
    ("family", "name", "runs", "honours"),
    [
        ("gpt_oss", "auto", "eager", True),
        ("gpt_oss", "eager", "eager", True),
        ("gpt_oss", "sink-sdpa", "sink-sdpa", True),
        ("gpt_oss", "no-sinks", PLANTED, False),
        ("llama", "auto", "sdpa", None),
        ("llama", "sdpa", "sdpa", None),
        ("llama", "eager", "eager", None),
    ],
)
def test_resolution(family: str, name: str, runs: str, honours: bool | None) -> None:
    attention = resolve_attention(name, configuration(family))
    assert (attention.label, attention.honours_sinks) == (runs, honours)
    assert attention.requested == name


@pytest.mark.parametrize(
    ("family", "name", "said"),
    [
        ("gpt_oss", "sdpa", "sinks"),
        ("gpt_oss", "no-such-kernel", "no-such-kernel"),
        ("llama", "no-sinks", "has no attention sinks"),
        ("llama", "no-such-kernel", "no-such-kernel"),
    ],
)
def test_refusals(family: str, name: str, said: str) -> None:
    with pytest.raises(MismatchError, match=said) as caught:
        resolve_attention(name, configuration(family))
    assert "auto" in caught.value.fix


def test_a_kernel_that_may_drop_sinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import mismatch.training.attention as attention

    monkeypatch.setattr(attention, "_transformers_choice", lambda name, model: "hub/fast-attn")
    assert resolve_attention("flash_attention_2", configuration("llama")).label == "hub/fast-attn"
    with pytest.raises(MismatchError, match="hub/fast-attn, which is not known to honour"):
        resolve_attention("flash_attention_2", configuration("gpt_oss"))


# ---------------------------------------------------------------- the kernels themselves

HEADS, KV_HEADS, TOKENS, SIZE = 4, 2, 24, 16


def _inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    query = torch.randn(2, HEADS, TOKENS, SIZE)
    key, value = (torch.randn(2, KV_HEADS, TOKENS, SIZE) for _ in range(2))
    return query, key, value, torch.randn(HEADS)


def _by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """softmax([scores, sink]) without the sink's column, times the values."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) / SIZE**0.5
    future = torch.ones(TOKENS, TOKENS).triu(1).bool()
    scores = scores.masked_fill(future, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(2, -1, TOKENS, 1)], -1)
    return (scores.softmax(-1)[..., :TOKENS] @ value).transpose(1, 2)


def test_sink_kernel_equals_the_definition() -> None:
    query, key, value, sinks = _inputs()
    out, _ = sink_attention(torch.nn.Module(), query, key, value, _mask(), SIZE**-0.5, s_aux=sinks)
    assert torch.allclose(out, _by_hand(query, key, value, sinks), atol=1e-6)


def test_planted_fault_equals_attention_without_sinks() -> None:
    query, key, value, sinks = _inputs()
    out, _ = sinkless_attention(
        torch.nn.Module(), query, key, value, _mask(), SIZE**-0.5, s_aux=sinks
    )
    assert torch.allclose(out, _by_hand(query, key, value, None), atol=1e-6)
    assert (out - _by_hand(query, key, value, sinks)).abs().mean() > 0.02


def test_gradients_reach_the_sinks() -> None:
    query, key, value, sinks = _inputs()
    sinks.requires_grad_()
    wanted = torch.autograd.grad(_by_hand(query, key, value, sinks).square().sum(), sinks)[0]
    out, _ = sink_attention(torch.nn.Module(), query, key, value, _mask(), SIZE**-0.5, s_aux=sinks)
    got = torch.autograd.grad(out.square().sum(), sinks)[0]
    assert torch.allclose(got, wanted, atol=1e-4)


def _mask() -> torch.Tensor:
    return boolean_mask(batch_size=2, q_length=TOKENS, kv_length=TOKENS)


def test_no_row_of_the_mask_is_empty() -> None:
    padding = torch.zeros(1, 6, dtype=torch.bool)
    padding[0, :2] = True
    mask = boolean_mask(batch_size=1, q_length=6, kv_length=6, attention_mask=padding)
    assert mask.any(-1).all()
    assert not mask[0, 0, 5, 3]  # padding behind the text still sees no other padding
