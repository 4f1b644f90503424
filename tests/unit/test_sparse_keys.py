"""Keys that sparse attention selects: captured as they ran, replayed, compared, kept in a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mismatch.types
from mismatch.analysis.comparison import compare
from mismatch.engines.artefacts import build_rollout, decode_keys
from mismatch.engines.transformers.engine import TransformersEngine
from mismatch.engines.turns import starting
from mismatch.metrics.routing_pairs import RouterNoise, common, in_other
from mismatch.run import store
from mismatch.specs import EngineSpec, RolloutSpec
from mismatch.training.packing import collate
from mismatch.training.routing.keys import KeyRecorder, KeyRows, key_layers, sparse_top_k
from mismatch.training.scorer import Scorer
from mismatch.types import KEYS, Sampling, Scoring, SparseKeys, kept_rows, selecting_rows
from tests import families
from tests.invented_run import facts, likely, report_of, sampled, saved

TOP_K, LENGTHS = 5, (14, 9, 12)
SELECTING = ("deepseek_v32", "glm_moe_dsa", "axk2")


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, families.VOCABULARY, length) for length in LENGTHS]


def recorded(model: Any, layout: str, replay: torch.Tensor | None = None) -> tuple[Any, Any]:
    """What a forward pass selects for the tokens that can choose; its last hidden states [n, H]."""
    scorer, batch = Scorer(model), collate(sequences(), layout, "cpu")
    position = torch.from_numpy(np.concatenate([np.arange(n) for n in LENGTHS]))
    recorder = KeyRecorder(scorer.sparse, KeyRows.of(batch, position >= TOP_K, replay))
    with torch.no_grad(), recorder.recording():
        hidden = scorer.hidden(batch)
    return recorder.finished(), hidden.reshape(-1, hidden.shape[-1])[batch.rows]


@pytest.mark.parametrize("family", SELECTING)
def test_what_is_recorded_is_what_attention_attended_to(family: str) -> None:
    model = families.tiny(family, index_topk=TOP_K)
    keys, _ = recorded(model, "padding")
    layers = key_layers(model.get_decoder())
    assert sparse_top_k(model.get_decoder()) == TOP_K
    row = 0
    for ids in sequences():
        with torch.no_grad():
            seen = model(torch.from_numpy(ids)[None], output_attentions=True).attentions
        for position in range(TOP_K, len(ids)):
            for column, layer in enumerate(layers):
                attended = seen[layer.index][0, :, position].sum(0).nonzero().flatten()
                assert keys.ids[row, column].sort().values.tolist() == attended.tolist()
            row += 1
    assert row == len(keys.ids)
    assert (keys.margin >= 0).all()


def test_packed_sequences_select_as_padded_ones_do() -> None:
    model = families.tiny("deepseek_v32", index_topk=TOP_K)
    padded, _ = recorded(model, "padding")
    packed, _ = recorded(model, "packing")
    assert torch.equal(padded.ids.sort(-1).values, packed.ids.sort(-1).values)
    torch.testing.assert_close(padded.margin, packed.margin)


@pytest.mark.parametrize("layout", ["padding", "packing"])
def test_replayed_selections_run_instead(layout: str) -> None:
    model = families.tiny("deepseek_v32", index_topk=TOP_K)
    own, plain = recorded(model, layout)
    same, again = recorded(model, layout, own.ids)
    torch.testing.assert_close(again, plain)
    assert torch.equal(same.ids, own.ids)
    first = torch.arange(TOP_K).expand_as(own.ids)
    given, other = recorded(model, layout, first)
    assert torch.equal(given.ids, first)
    assert (other - plain).abs().max() > 1e-3
    torch.testing.assert_close(other[:TOP_K], plain[:TOP_K])  # these attend to all that there is


@pytest.mark.parametrize("fault", ["another K", "no top-k"])
def test_an_indexer_that_cannot_be_read_costs_its_own_measurement(fault: str) -> None:
    model = families.tiny("deepseek_v32", index_topk=TOP_K)
    indexer = model.get_decoder().layers[1].self_attn.indexer
    if fault == "another K":
        indexer.index_topk = TOP_K - 1
    else:
        indexer.forward = lambda states, *rest, **more: torch.zeros(
            *states.shape[:2], TOP_K, dtype=torch.int32
        )
    keys, hidden = recorded(model, "padding")
    assert keys is None
    assert torch.isfinite(hidden).all()


def test_pools_and_blocks_of_tokens_are_not_read() -> None:
    assert sparse_top_k(families.tiny("deepseek_v4").get_decoder()) == 0
    assert sparse_top_k(families.tiny("deepseek_v3").get_decoder()) is None


def test_the_engine_gives_what_a_plain_forward_selects(tmp_path: Path) -> None:
    law, prompts = Sampling(max_tokens=9, samples_per_prompt=2, seed=1), [[5, 9, 12, 40], [7] * 8]
    model = families.write("deepseek_v32", tmp_path, index_topk=TOP_K)
    spec = EngineSpec("transformers", str(model), dtype="fp32")
    with TransformersEngine(spec, law, 24) as engine:
        trajectories = starting(prompts, engine.generate(prompts, lambda *_: None))
        rollout = build_rollout(trajectories, RolloutSpec(spec, sampling=law), {})
        keys = decode_keys(engine, trajectories, rollout)
        assert keys is not None
        assert np.array_equal(keys.rows, selecting_rows(rollout, TOP_K))
        for row, ids in zip(keys.rows, keys.choices.ids, strict=True):
            sequence = rollout.sequence_of_token[row]
            start, end = rollout.offsets[sequence : sequence + 2]
            whole = torch.from_numpy(rollout.token_ids[start:end])[None]
            recorder = KeyRecorder(
                key_layers(engine.model),
                KeyRows(torch.tensor([row - start]), torch.zeros(1).long()),
            )
            with torch.no_grad(), recorder.recording():
                engine.model(whole, use_cache=False)
            seen = recorder.finished()
            assert seen is not None
            assert np.array_equal(np.sort(ids), np.sort(seen.ids[0].numpy()))


# ---------------------------------------------------------------- compared, and kept


def scoring_of(name: str, rollout: Any) -> Scoring:
    ids, mode = rollout.token_ids[rollout.actions], "decode" if "decode" in name else "train"
    return Scoring(name, ids, likely(rollout), facts(mode))


def keys_of(rollout: Any, moved: int = 0) -> SparseKeys:
    """Two layers; the first ``moved`` tokens select their oldest key's neighbour in layer 1."""
    rows = selecting_rows(rollout, 3)
    ids = np.tile(np.array([0, 1, 2], np.uint16), (len(rows), 2, 1))
    ids[:moved, 1, 2] = 3
    margin = np.full((len(rows), 2), 0.5, np.float32)
    keys = SparseKeys.of(rollout, (0, 4), {"rows": rows, "ids": ids, "margin": margin})
    assert keys is not None
    return keys


def test_differing_selections_are_counted_where_an_action_was_predicted() -> None:
    rollout = sampled(6, 1, 9)
    left, right = scoring_of("transformers:decode", rollout), scoring_of("fsdp", rollout)
    every = keys_of(rollout)
    left, right = replace(left, keys=every), replace(right, keys=keys_of(rollout, 7))
    for level, near in ((1.0, 1.0), (0.1, 0.0)):
        noise = RouterNoise({0: level, 4: level}, "reference:fp32")
        routing = compare(rollout, left, right, sampled_by_left=True, keys_noise=noise).routing
        assert routing["keys_disagree_layer"].n_tokens == len(every.rows)
        assert routing["keys_disagree_layer"].value == pytest.approx(7 / len(every.rows) / 2)
        assert routing["keys_overlap"].value == pytest.approx(1 - 7 / len(every.rows) / 6)
        assert routing["keys_near_tie_flipped"].value == near
    bare = compare(rollout, left, replace(right, keys=None), sampled_by_left=True)
    assert "keys_disagree_layer" not in bare.routing


def test_impossible_positions_are_no_selection() -> None:
    rollout = sampled(2, 1, 8)
    rows = selecting_rows(rollout, 3)
    good = np.tile(np.array([0, 1, 2], np.uint16), (len(rows), 1, 1))
    for bad in ([0, 1, 1], [0, 1, 9]):
        ids = good.copy()
        ids[0, 0] = bad
        assert SparseKeys.of(rollout, (0,), {"rows": rows, "ids": ids}) is None


def test_selections_are_kept_in_a_run(tmp_path: Path) -> None:
    rollout = sampled(2, 1, 8)
    store.save_rollout(tmp_path, rollout)
    store.save_scoring(
        tmp_path, replace(scoring_of("fsdp", rollout), keys=keys_of(rollout, 2)), rollout
    )
    keys, want = store.load_scoring(tmp_path, "fsdp").keys, keys_of(rollout, 2)
    assert keys is not None
    assert keys.choices.layers == want.choices.layers
    for name in ("ids", "margin"):
        assert np.array_equal(getattr(keys.choices, name), getattr(want.choices, name))
    assert np.array_equal(keys.rows, want.rows)


def test_an_even_share_is_kept_where_all_would_be_too_much(monkeypatch: Any) -> None:
    rollout = sampled(4, 1, 20)
    every = kept_rows(rollout, 3, 2)
    assert np.array_equal(every, selecting_rows(rollout, 3))
    monkeypatch.setattr(mismatch.types, "KEYS_BYTES", 10 * 3 * 2 * 2)  # of ten tokens
    some = kept_rows(rollout, 3, 2)
    assert 5 <= len(some) <= 10
    assert set(some) <= set(rollout.actions - 1)
    assert set(rollout.sequence_of_token[some]) == {0, 1, 2, 3}


def test_large_sets_are_compared_by_sorting() -> None:
    rng = np.random.default_rng(0)
    a, b = (np.stack([rng.permutation(90)[:40] for _ in range(6)], axis=1) for _ in range(2))
    assert np.array_equal(common(a, b), in_other(a, b).sum(axis=0))


@pytest.mark.parametrize(("top_k", "number"), [(0, ""), (3, ""), (500, "500"), (None, None)])
def test_what_was_not_compared_is_said(top_k: int | None, number: str, tmp_path: Path) -> None:
    rollout = sampled(4, 1, 8)
    trainer = {} if top_k is None else {"sparse_top_k": top_k}
    values = likely(rollout)
    run = saved(tmp_path / "run", rollout, values, values, trainer=trainer)
    said = [entry for entry in report_of(run).not_tested if entry.what == KEYS]
    assert len(said) == (top_k is not None)
    assert all(number in entry.reason for entry in said)


def test_compared_selections_stand_in_the_report(tmp_path: Path) -> None:
    rollout = sampled(4, 1, 8)
    values = likely(rollout)
    sides = {"one": {"keys": keys_of(rollout)}, "two": {"keys": keys_of(rollout, 4)}}
    run = saved(tmp_path / "run", rollout, values, values, trainer={"sparse_top_k": 3}, **sides)
    report = report_of(run)
    assert KEYS not in {entry.what for entry in report.not_tested}
    assert report.comparisons[0].routing["keys_disagree_layer"].value == pytest.approx(2 / 28)
