"""Attention with sinks is its definition in every dtype, gradients included, the sinks' above all.

The definition in float64 is the truth (``definition`` of the module that tries kernels), checked
itself by differences. Blocks are made small, so that every case has several.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from benchmarks.planted_attention import sinks_forward_only
from mismatch.training.attention import sink_sdpa
from mismatch.training.attention.sink_sdpa import BlockedMask, sink_attention, with_sinks
from mismatch.training.attention.trial import definition, relative_error
from mismatch.training.distributed import MemoryPeak
from tests.tensors import Largest

HEADS, KV_HEADS, SIZE, VALUE_SIZE, SCALE = 4, 2, 6, 4, 0.7
# float64 as the project's goal has it; float32 adds its roundings up, the short ones only round.
LIMITS = {
    torch.float64: 1e-10,
    torch.float32: 8 * 2**-23,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
}


def _mask(name: str, tokens: int) -> BlockedMask:
    looks = causal_mask_function
    if name == "window":
        looks = sliding_window_causal_mask_function(tokens // 4)
    elif name == "documents":
        document = (torch.arange(tokens) * 3 // tokens)[None]
        looks = and_masks(causal_mask_function, packed_sequence_mask_function(document))
    real = torch.arange(tokens)[None] < 2 * tokens // 3 if name == "padding" else None
    return BlockedMask(tokens, tokens, batch_size=1, mask_function=looks, attention_mask=real)


def _inputs(tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [
        (1, HEADS, tokens, SIZE),
        (1, KV_HEADS, tokens, SIZE),
        (1, KV_HEADS, tokens, VALUE_SIZE),
        (HEADS,),
    ]
    return [
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def _run(inputs: Any, mask: BlockedMask, dropout: float = 0.0) -> torch.Tensor:
    query, key, value, *sinks = inputs
    out, _ = sink_attention(
        torch.nn.Module(), query, key, value, mask, SCALE, dropout, sinks[0] if sinks else None
    )
    return out


def _errors(inputs: list[torch.Tensor], mask: BlockedMask) -> list[float]:
    """Of the output, and of the gradients of q, k, v and sinks."""
    tokens = inputs[0].shape[2]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = definition(exact, mask.part(0, tokens, 0, tokens)[0, 0], SCALE)
    weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1)).double()
    wanted = torch.autograd.grad(truth, exact, weights)
    out = _run(inputs, mask)
    got = torch.autograd.grad(out, inputs, weights.to(out.dtype))
    pairs = zip((out, *got), (truth, *wanted), strict=True)
    return [relative_error(ours, theirs) for ours, theirs in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_gradients_are_those_of_small_differences(
    monkeypatch: pytest.MonkeyPatch, name: str, sinks: bool
) -> None:
    monkeypatch.setattr(sink_sdpa, "BLOCK", 4)
    inputs, mask = _inputs(11)[: 4 if sinks else 3], _mask(name, 11)
    assert len(mask.spans) == 3
    assert torch.autograd.gradcheck(lambda *x: _run(x, mask), inputs)


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("name", ["causal", "window", "documents", "padding"])
def test_errors_are_those_of_rounding(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(sink_sdpa, "BLOCK", 64)
    errors = _errors(_inputs(300, dtype), _mask(name, 300))
    limit = LIMITS[dtype]
    # The sinks' gradient is what is left of a sum of terms of both signs.
    limits = [limit] * 4 + [limit if dtype == torch.float64 else 8 * limit]
    assert all(error <= most for error, most in zip(errors, limits, strict=True)), errors


def test_no_sinks_is_attention_without_them_and_so_is_a_layer_that_has_none() -> None:
    inputs, mask = _inputs(40), _mask("window", 40)
    looks = mask.part(0, 40, 0, 40)[0, 0]
    without, _ = sink_sdpa.sinkless_attention(
        torch.nn.Module(), *inputs[:3], mask, SCALE, s_aux=inputs[3]
    )
    assert relative_error(without, definition(inputs[:3], looks, SCALE)) < LIMITS[torch.float64]
    assert torch.equal(without, _run(inputs[:3], mask))
    assert relative_error(without, definition(inputs, looks, SCALE)) > 0.01


def test_the_sink_is_not_rounded_away() -> None:
    # bfloat16 rounds 8.97 to 9.0, which would move a sink of 24 by 0.08.
    tokens = 300
    query, key, value, _ = _inputs(tokens, torch.bfloat16)
    sinks = torch.full((HEADS,), 24.0)
    nothing, mask = torch.zeros_like(query), _mask("causal", tokens)
    out, _ = sink_attention(torch.nn.Module(), nothing, key, value, mask, 1 / 8.97, s_aux=sinks)
    seen = torch.arange(1, tokens + 1)[:, None, None]  # all their scores are 0
    total = value.double().repeat_interleave(HEADS // KV_HEADS, 1).cumsum(2).transpose(1, 2)
    wanted = total / (seen + torch.tensor(24.0).double().exp())
    assert (out - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("window", 16 + 30 - 1),  # a block, and the window before its first query
        ("documents", 40 + 16),  # a document, and the one that the block shares
    ],
)
def test_blocks_read_no_more_keys_than_they_see(
    monkeypatch: pytest.MonkeyPatch, name: str, keys: int
) -> None:
    monkeypatch.setattr(sink_sdpa, "BLOCK", 16)
    spans = _mask(name, 120).spans
    assert [span.start for span in spans] == list(range(0, 120, 16))
    assert spans[-1].stop == 120
    assert max(span.high - span.low for span in spans) <= keys
    assert max(span.high - span.low for span in _mask("causal", 120).spans) == 120


def test_no_row_of_the_mask_is_empty() -> None:
    # Far behind the text, a window holds nothing but padding.
    padding = torch.arange(80)[None] < 2
    window = sliding_window_causal_mask_function(4)
    mask = BlockedMask(80, 80, batch_size=1, attention_mask=padding, mask_function=window)
    looks = mask.part(0, 80, 0, 80)
    assert looks.any(-1).all()
    assert not looks[0, 0, 50, 48]  # still, padding sees no other padding


@pytest.mark.slow
def test_sums_over_blocks_are_not_rounded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # 256 and more blocks in bfloat16: a sum of equal terms would stand still at the 256th.
    tokens = 600
    inputs, mask = _inputs(tokens, torch.bfloat16), _mask("causal", tokens)
    whole = _errors(inputs, mask)
    monkeypatch.setattr(sink_sdpa, "BLOCK", 2)
    mask = _mask("causal", tokens)
    assert len(mask.spans) == 300
    for error, many in zip(whole, _errors(inputs, mask), strict=True):
        assert many < 1.5 * error + 1e-3


def test_sinks_gather_their_gradient_from_a_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # All values and weights are 1: every query pulls its sink down, over 300 blocks.
    monkeypatch.setattr(sink_sdpa, "BLOCK", 4)
    query, key = (torch.zeros(1, 1, 1200, 8, dtype=torch.bfloat16) for _ in range(2))
    sinks = torch.tensor([6.0], requires_grad=True)
    _run((query, key, torch.ones_like(key), sinks), _mask("causal", 1200)).sum().backward()
    seen, exp = torch.arange(1, 1201).double(), torch.tensor(6.0).double().exp()
    wanted = -8 * (seen * exp / (seen + exp) ** 2).sum()
    assert sinks.grad is not None
    assert abs(float(sinks.grad) / float(wanted) - 1) < 5e-3


def test_only_what_is_wanted_is_differentiated() -> None:
    tokens = 40
    for leaf in range(4):
        inputs = [x.detach() for x in _inputs(tokens)]
        inputs[leaf].requires_grad_()
        alone = torch.autograd.grad(_run(inputs, _mask("causal", tokens)).sum(), inputs[leaf])[0]
        full = _inputs(tokens)
        together = torch.autograd.grad(_run(full, _mask("causal", tokens)).sum(), full)[leaf]
        assert torch.equal(alone, together)


def test_dropout_drops_the_same_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_sdpa, "BLOCK", 16)
    inputs = _inputs(60)
    torch.manual_seed(5)
    out = _run(inputs, _mask("causal", 60), dropout=0.5)
    after = torch.rand(1)
    weights = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, inputs[2], weights)
    assert torch.rand(1) != after  # the backward pass has put the outer numbers back
    # Attention is linear in the values, whatever is dropped.
    assert torch.allclose((out * weights).sum(), (grad * inputs[2]).sum())


def test_autocast_is_entered_again_in_the_backward_pass() -> None:
    inputs = _inputs(40, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = _run(inputs, _mask("causal", 40))
    assert out.dtype == torch.bfloat16
    got = torch.autograd.grad(out.float().sum(), inputs)
    low = [x.detach().bfloat16().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(_run(low, _mask("causal", 40)).float().sum(), low)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(got[:3], wanted[:3], strict=True))
    assert torch.allclose(got[3], wanted[3].float(), rtol=0.01)


def test_the_backward_pass_makes_no_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_sdpa, "BLOCK", 32)
    sizes = []
    for tokens in (256, 512, 1024):
        inputs, mask = _inputs(tokens, torch.float32), _mask("causal", tokens)
        with Largest() as largest:
            _run(inputs, mask).sum().backward()
        sizes.append(largest.numel)
    assert all(after <= 2 * before + 200 for before, after in pairwise(sizes))
    assert sizes[-1] < 1024**2 / 8


@pytest.mark.grid
def test_a_third_of_eagers_memory_at_4096_tokens() -> None:
    # benchmarks/attention.py measures it properly, and the time.
    from transformers.masking_utils import eager_mask
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    tokens, peaks = 4096, {}
    mask = eager_mask(batch_size=1, q_length=tokens, kv_length=tokens, dtype=torch.bfloat16)
    for name in ("eager", "blocked"):
        inputs = _inputs(tokens, torch.bfloat16)
        module: Any = torch.nn.Module()
        module.num_key_value_groups, module.sinks = HEADS // KV_HEADS, inputs[3]
        with MemoryPeak(torch.device("cpu"), True) as peak:
            if name == "eager":
                out, _ = eager_attention_forward(module, *inputs[:3], mask, SCALE)
            else:
                out = _run(inputs, _mask("causal", tokens))
            out.sum().backward()
        peaks[name] = peak.bytes or 0
        del out
    assert peaks["eager"] > 256 << 20
    assert 3 * peaks["blocked"] < peaks["eager"]


def test_queries_may_start_later_than_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_sdpa, "BLOCK", 8)
    inputs, later = _inputs(50), 21
    whole = _run(inputs, _mask("window", 50))
    looks = sliding_window_causal_mask_function(50 // 4)
    mask = BlockedMask(50 - later, 50, batch_size=1, q_offset=later, mask_function=looks)
    part = _run([inputs[0][:, :, later:], *inputs[1:]], mask)
    assert torch.allclose(part, whole[:, later:], rtol=1e-12)


def test_the_planted_gradient_lacks_the_sinks_and_the_forward_pass_has_them() -> None:
    visible = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    outs, gradients = {}, {}
    for name in ("right", "planted", "without"):
        query, key, value, sinks = inputs = _inputs(5)
        if name == "planted":
            out = sinks_forward_only(torch.nn.Module(), query, key, value, visible, SCALE, sinks)[0]
        else:
            added = torch.zeros(5, 5).masked_fill(~visible, -torch.inf)
            out = with_sinks(query, key, value, added, SCALE, sinks if name == "right" else None)
        outs[name] = out.detach()
        used = inputs if name == "planted" else inputs[:3]
        gradients[name] = torch.autograd.grad(out.sum(), used)
    assert torch.allclose(outs["planted"], outs["right"], atol=1e-6)
    assert not torch.allclose(outs["planted"], outs["without"], atol=1e-2)
    assert not gradients["planted"][3].any()
    for ours, right, without in zip(
        *(gradients[n][:3] for n in ("planted", "right", "without")), strict=True
    ):
        assert torch.allclose(ours, without)
        assert not torch.allclose(ours, right, atol=1e-3)
