"""sink-flex on a CPU, where it has no gradients: right, and compiled a few times for all calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mismatch.training.attention import sink_flex
from mismatch.training.attention.resolve import OUR_KERNELS, register_kernels
from mismatch.training.attention.sink_flex import flex_mask, sink_flex_attention
from mismatch.training.attention.trial import Geometry, _cases, _inputs, _layer, definition
from mismatch.training.packing import collate, plan_batches
from mismatch.training.routing.capture import recording
from mismatch.training.scorer import Scorer
from tests.checkpoints import configuration

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
LAYERS = 2


@pytest.mark.slow
def test_the_flex_kernel_is_right_forward() -> None:
    geometry = Geometry(4, 2, 16, 16, True, True, 0.25)
    for case in _cases(geometry, CPU):
        inputs = [x.detach() for x in _inputs(geometry, CPU, torch.float64)]
        tokens = inputs[0].shape[2]
        layer = _layer(geometry, "", inputs, torch.float64)
        window = case.arguments["sliding_window"]
        with torch.compiler.set_stance("force_eager"):  # nothing is compiled
            mask = flex_mask(tokens, tokens, mask_function=case.mask_function, local_size=window)
            out, _ = sink_flex_attention(layer, *inputs[:3], mask, 0.25, s_aux=inputs[3])
        wanted = definition(inputs, case.allowed, 0.25)
        assert torch.allclose(out, wanted, rtol=1e-10), case.name


def visible(mask: Any, tokens: int) -> torch.Tensor:
    rows = torch.arange(tokens)
    seen: torch.Tensor = mask.mask_mod(0, 0, rows[:, None], rows[None])
    return seen


def test_no_row_of_the_flex_mask_is_empty() -> None:
    # Padding sees itself: a row without keys has a log-sum-exp of -inf, and a gradient of NaN.
    real = torch.arange(8)[None] >= 3
    rows = torch.arange(8)
    seen = visible(flex_mask(8, 8, attention_mask=real), 8)
    assert torch.equal(seen[3:], (real[0] & (rows[:, None] >= rows))[3:])
    assert seen.diagonal().all()


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
@pytest.mark.parametrize("borders", [(), (128,), (5, 200, 256, 511)])
def test_blocks_hold_all_that_is_visible(window: int | None, borders: tuple[int, ...]) -> None:
    tokens = 600
    document = sum((torch.arange(tokens) >= border).long() for border in borders)
    document = document + torch.zeros(tokens, dtype=torch.long)

    def pattern(batch: Any, head: Any, query: Any, key: Any) -> Any:
        near = (key <= query) & (query - key < (window or tokens))
        return near & (document[query] == document[key])

    if window == 1:
        return  # every token is a document of its own then
    mask = flex_mask(tokens, tokens, mask_function=pattern, local_size=window)
    padded = mask.to_dense()  # [1, 1, blocks, blocks]: partial or full
    rows = torch.arange(tokens)
    wanted = pattern(0, 0, rows[:, None], rows[None])
    assert torch.equal(visible(mask, tokens), wanted)
    whole = torch.nn.functional.pad(wanted, (0, -tokens % 128, 0, -tokens % 128))
    blocks = whole.view(len(whole) // 128, 128, -1, 128)
    assert not (blocks.any(3).any(1) & ~padded[0, 0].bool()).any()
    for query, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        for key in mask.full_kv_indices[0, 0, query, :count].tolist():
            assert blocks[query, :, key].all()


def test_a_mask_of_another_kind_is_refused() -> None:
    def chunked(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query // 64 == key // 64) | (key < 10) & (key <= query)

    with pytest.raises(ValueError, match="not causal"):
        flex_mask(400, 400, mask_function=chunked)
    with pytest.raises(ValueError, match="no cache"):
        flex_mask(1, 400)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts of graphs compiled and calls made, with a backend that only counts."""
    counted: Counter[str] = Counter()

    def backend(graph: Any, inputs: Any) -> Any:
        counted["graphs"] += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(sink_flex._plain(), backend=backend, dynamic=True)

    def attend(*args: Any, **kwargs: Any) -> Any:
        counted["calls"] += 1
        return compiled(*args, **kwargs)

    monkeypatch.setattr(sink_flex, "_plain", lambda: attend)
    yield counted
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_run_compiles_a_few_graphs_for_all_its_passes(graphs: Counter[str]) -> None:
    """Padding and packing, one row and several, recording routes and not: never a limit."""
    register_kernels()
    config = configuration("gpt_oss", head_dim=64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=OUR_KERNELS["sink-flex"])
    scorer = Scorer(model.eval())
    draw = np.random.default_rng(0)
    rows = [draw.integers(1, config.vocab_size, int(n)) for n in draw.integers(60, 200, 24)]
    for layout, budget, record in (
        ("padding", 600, False),
        ("padding", 600, True),
        ("padding", 200, True),
        ("padding", 200, False),
        ("packing", 600, True),
    ):
        for plan in plan_batches([len(row) for row in rows], budget, layout):
            batch = collate([rows[i] for i in plan.sequences], layout, CPU)
            with torch.no_grad(), recording(scorer.moe) if record else nullcontext():
                scorer.hidden(batch)
    assert graphs["calls"] > 50 * LAYERS
    assert graphs["graphs"] <= 6
