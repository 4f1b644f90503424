"""Blocked attention with sinks is the definition, block borders and all, in values and gradients.

The definition, written out here in float64: softmax over [scores, sink], without the sink's column,
times the values. The cases cross block borders, leave blocks half full, and put window, padding and
documents where borders are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from mismatch.training.attention.sink_sdpa import (
    BLOCK,
    BlockedMask,
    sink_attention,
    sinkless_attention,
)
from tests.tensors import Largest

HEADS, KV_HEADS, SIZE = 4, 2, 16
TOKENS = 2 * BLOCK + 37
WINDOW = 24


def _documents(count: int) -> torch.Tensor:
    """[1, T] which of ``count`` documents each token belongs to, the borders within blocks."""
    return (torch.arange(TOKENS) * count // TOKENS)[None]


def _mask(name: str, tokens: int = TOKENS) -> BlockedMask:
    arguments: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": {"mask_function": sliding_window_causal_mask_function(WINDOW)},
        "documents": {
            "mask_function": and_masks(
                causal_mask_function, packed_sequence_mask_function(_documents(3))
            )
        },
        "padding": {"batch_size": 2, "attention_mask": torch.arange(tokens)[None] < PADDED},
    }
    return BlockedMask(tokens, tokens, **{"batch_size": 1, **arguments[name]})


PADDED = torch.tensor([[TOKENS], [BLOCK + 5]])  # real tokens per row


def _inputs(
    batch: int = 1, dtype: torch.dtype = torch.float32, value_size: int = SIZE
) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size)]
    tensors = [torch.randn(batch, heads, TOKENS, size, generator=draw) for heads, size in shapes]
    return tuple(x.to(dtype) for x in (*tensors, torch.randn(HEADS, generator=draw)))


def _by_hand(inputs: tuple[torch.Tensor, ...], looks: torch.Tensor, sink: bool) -> torch.Tensor:
    query, key, value, sinks = (x.double() for x in inputs)
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) / SIZE**0.5).masked_fill(~looks, -torch.inf)
    if sink:
        column = sinks.view(1, -1, 1, 1).expand(len(query), -1, TOKENS, 1)
        scores = torch.cat([scores, column], -1)
    return (scores.softmax(-1)[..., :TOKENS] @ value).transpose(1, 2)


def _run(
    inputs: tuple[torch.Tensor, ...], mask: BlockedMask, kernel: Callable[..., Any] = sink_attention
) -> torch.Tensor:
    query, key, value, sinks = inputs
    out, _ = kernel(torch.nn.Module(), query, key, value, mask, SIZE**-0.5, s_aux=sinks)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("name", ["causal", "window", "documents", "padding"])
def test_the_kernel_equals_the_definition(name: str) -> None:
    mask = _mask(name)
    inputs = _inputs(batch=2 if name == "padding" else 1)
    looks = mask.part(0, TOKENS, 0, TOKENS)
    assert (_run(inputs, mask) - _by_hand(inputs, looks, sink=True)).abs().max() < 2e-6


def test_the_planted_fault_equals_attention_without_sinks() -> None:
    inputs, mask = _inputs(), _mask("window")
    out, looks = _run(inputs, mask, sinkless_attention), mask.part(0, TOKENS, 0, TOKENS)
    assert (out - _by_hand(inputs, looks, sink=False)).abs().max() < 2e-6
    assert (out - _by_hand(inputs, looks, sink=True)).abs().mean() > 0.01


@pytest.mark.parametrize("name", ["causal", "window"])
def test_gradients_are_those_of_the_definition(name: str) -> None:
    mask = _mask(name)
    leaves = [x.requires_grad_() for x in _inputs()]
    looks = mask.part(0, TOKENS, 0, TOKENS)
    wanted = torch.autograd.grad(_by_hand(tuple(leaves), looks, True).square().sum(), leaves)
    got = torch.autograd.grad(_run(tuple(leaves), mask).square().sum(), leaves)
    for ours, theirs in zip(got, wanted, strict=True):
        assert theirs.abs().max() > 0.1
        assert (ours - theirs).abs().max() < 1e-4 * (1 + theirs.abs().max())


def test_a_layer_without_sinks_is_plain_attention() -> None:
    inputs, mask = _inputs(), _mask("causal")
    bare, _ = sink_attention(torch.nn.Module(), *inputs[:3], mask, SIZE**-0.5, s_aux=None)
    assert torch.equal(bare, _run(inputs, mask, sinkless_attention))


def test_values_may_be_of_another_size_than_keys() -> None:
    inputs, mask = _inputs(value_size=8), _mask("causal")
    wanted = _by_hand(inputs, mask.part(0, TOKENS, 0, TOKENS), sink=True)
    assert (_run(inputs, mask) - wanted).abs().max() < 2e-6


def test_the_sink_is_not_rounded_away() -> None:
    # bfloat16 rounds 8.97 to 9.0, which would move a sink of 24 by 0.08.
    query, key, value, _ = _inputs(dtype=torch.bfloat16)
    sinks, nothing = torch.full((HEADS,), 24.0), torch.zeros_like(query)
    out, _ = sink_attention(
        torch.nn.Module(), nothing, key, value, _mask("causal"), 1 / 8.97, s_aux=sinks
    )
    tokens = torch.arange(1, TOKENS + 1)[:, None, None]  # all their scores are 0
    total = value.double().repeat_interleave(HEADS // KV_HEADS, 1).cumsum(2).transpose(1, 2)
    wanted = total / (tokens + torch.tensor(24.0).double().exp())
    assert (out - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("window", BLOCK + WINDOW - 1),  # a block, and the window before its first query
        ("documents", TOKENS // 3 + BLOCK),  # a document, and the one that the block shares
    ],
)
def test_blocks_read_no_more_keys_than_they_see(name: str, keys: int) -> None:
    spans = _mask(name).spans
    assert [span.start for span in spans] == [0, BLOCK, 2 * BLOCK]
    assert spans[-1].stop == TOKENS
    assert max(span.high - span.low for span in spans) <= keys
    assert max(span.high - span.low for span in _mask("causal").spans) == TOKENS


@pytest.mark.parametrize("sink", [True, False])
def test_no_tensor_grows_with_the_square_of_the_length(sink: bool) -> None:
    kernel = sink_attention if sink else sinkless_attention
    sizes = []
    for tokens in (4 * BLOCK, 8 * BLOCK):
        query = torch.randn(1, HEADS, tokens, SIZE)
        key = value = torch.randn(1, KV_HEADS, tokens, SIZE)
        with Largest() as largest:
            kernel(
                torch.nn.Module(),
                query,
                key,
                value,
                _mask("causal", tokens),
                s_aux=query[0, :, 0, 0],
            )
        sizes.append(largest.numel)
    assert sizes[1] <= 2 * sizes[0] + BLOCK
    assert sizes[1] < (8 * BLOCK) ** 2 / 4


def test_no_row_of_the_mask_is_empty() -> None:
    # Far behind the text, a window holds nothing but padding.
    padding = torch.arange(80)[None] < 2
    window = sliding_window_causal_mask_function(4)
    mask = BlockedMask(80, 80, batch_size=1, attention_mask=padding, mask_function=window)
    looks = mask.part(0, 80, 0, 80)
    assert looks.any(-1).all()
    assert not looks[0, 0, 50, 48]  # still, padding sees no other padding
