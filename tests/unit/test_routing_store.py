"""Routes of a million tokens fit: one byte per expert, and neither disk nor checks copy them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from mismatch import captures
from mismatch.captures import corruption, narrowest
from mismatch.errors import CorruptCapture, MismatchError
from mismatch.run import store
from mismatch.run.captured import load_arrays, save_arrays
from mismatch.types import Routing, Scoring
from tests.checkpoints import rollout

MIB = 2**20


def distinct(tokens: int, layers: int, top_k: int = 4, experts: int = 32) -> np.ndarray:
    """[T, L, K] ids that break no rule, made without any large temporary."""
    ids = np.empty((tokens, layers, top_k), np.uint8)
    number = np.arange(tokens, dtype=np.int32)[:, None] * 7 + np.arange(layers, dtype=np.int32) * 3
    for slot in range(top_k):
        ids[:, :, slot] = (number + 5 * slot) % experts
    return ids


@pytest.mark.slow
def test_a_million_tokens_of_gpt_oss_size_stay_small(tmp_path: Path) -> None:
    ids = distinct(1_000_000, 36)
    present = np.ones(len(ids), np.bool_)
    tracemalloc.start()
    save_arrays(tmp_path, "x", {"ids": ids, "present": present}, "routes", {})
    assert tracemalloc.get_traced_memory()[1] < 180 * MIB  # the file's bytes, once
    size = (tmp_path / "x").stat().st_size
    assert size < 1_000_000 * (36 * 4 + 1) + 1000  # one byte per expert, one a row
    arrays = load_arrays(tmp_path, "x", "routes")[0]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    assert corruption(arrays["ids"], arrays["present"], 32) is None
    assert tracemalloc.get_traced_memory()[1] - held < 80 * MIB  # the ids alone are 137 MiB
    tracemalloc.stop()
    assert np.array_equal(arrays["ids"][::1000], ids[::1000])


@pytest.mark.parametrize("experts", [8, 256, 257, 512])
def test_ids_take_the_smallest_type(experts: int, tmp_path: Path) -> None:
    text = rollout()
    tokens = len(text.token_ids)
    ids = np.stack([np.arange(tokens) % experts, (np.arange(tokens) + 1) % experts], -1)[:, None]
    ids[-1] = [[0, experts - 1]]
    weights = np.linspace(0, 1, tokens * 2, dtype=np.float32).reshape(ids.shape)
    scoring = Scoring(
        "vllm:decode",
        text.token_ids[text.actions],
        np.zeros(text.n_actions),
        {},
        routing=Routing((3,), experts, ids, np.ones(tokens, np.bool_), weights),
    )
    store.save_rollout(tmp_path, text)
    store.save_scoring(tmp_path, scoring, text)
    back = store.load_scoring(tmp_path, "vllm:decode").routing
    assert back is not None
    assert back.ids.dtype == narrowest(experts) == (np.uint8 if experts <= 256 else np.uint16)
    assert np.array_equal(back.ids, ids)
    assert back.weights is not None
    assert np.array_equal(back.weights, weights)
    back.ids[0] = 0  # a copy of what lies on disk: changing it changes nothing there
    again = store.load_scoring(tmp_path, "vllm:decode").routing
    assert again is not None
    assert np.array_equal(again.ids, ids)


def test_the_files_are_safetensors_for_everybody(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    arrays = {
        "ids": distinct(1000, 3),
        "present": np.arange(1000) % 3 > 0,
        "margin": np.random.default_rng(0).random((1000, 3), np.float32),
        "wide": np.arange(10, dtype=np.uint16),
    }
    save_arrays(tmp_path, "x", arrays, "routes", {"layers": [0]})
    theirs = load_file(tmp_path / "x")
    ours, header = load_arrays(tmp_path, "x", "routes")
    assert header == {"layers": [0]}
    for name, array in arrays.items():
        assert np.array_equal(theirs[name], array)
        assert np.array_equal(ours[name], array)
        assert ours[name].dtype == array.dtype


def test_equal_arrays_make_equal_files(tmp_path: Path) -> None:
    arrays = {"ids": distinct(50, 3), "present": np.ones(50, np.bool_)}
    for name in ("one", "two"):
        save_arrays(tmp_path, name, arrays, "routes", {"layers": [0, 1, 2], "num_experts": 32})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("left", [0, 4, 40, 300])
def test_a_file_cut_short_is_refused(left: int, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "x"  # not recorded: a recorded one is refused by its size
    save_file({"ids": distinct(50, 3)}, path, {"schema": "routes"})
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(MismatchError, match="cannot be read"):
        load_arrays(tmp_path, "x", "routes")


@pytest.mark.parametrize("entries", [1, 30, 1 << 22])
@pytest.mark.parametrize(
    ("what", "row", "layer"),
    [
        ("an expert id out of range", 88, 1),
        ("the same expert twice", 3, 2),
        ("the same experts for every token", 0, 1),
    ],
)
def test_corruption_is_found_in_whatever_chunk(
    what: str, row: int, layer: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "ENTRIES", entries)
    ids, present = distinct(100, 3), np.ones(100, np.bool_)
    assert corruption(ids, present, 32) is None
    if "range" in what:
        ids[row, layer, 2] = 32
    elif "twice" in what:
        ids[row, layer, 3] = ids[row, layer, 0]
    else:
        ids[:, layer] = np.array([4, 3, 2, 1])
        ids[::2, layer] = np.array([1, 2, 3, 4])  # the same set in another order
    assert corruption(ids, present, 32) == (what, row, layer)
    present[row] = False
    if "every" not in what:
        assert corruption(ids, present, 32) is None  # rows that were not captured say nothing


def test_zeros_of_a_dense_layer_are_no_routes() -> None:
    text = rollout()
    ids = distinct(len(text.token_ids), 2)
    ids[:, 1] = 0
    routing = Routing((0, 5), 32, ids, np.ones(len(ids), np.bool_))
    with pytest.raises(CorruptCapture, match=r"twice.*token 0\b.*layer 5"):
        routing.validate(text, "vllm")


def test_a_negative_id_is_out_of_range() -> None:
    ids = distinct(100, 3).astype(np.int16)
    ids[70, 2, 0] = -1
    fault = corruption(ids, np.ones(100, np.bool_), 32)
    assert fault is not None
    what, *position = fault
    assert position == [70, 2]
    assert "out of range" in what


def test_an_impossible_expert_of_one_step_survives_the_narrow_ones() -> None:
    from mismatch.engines.distribution_capture import join_steps

    good = np.array([[[1, 2]], [[3, 4]]], np.uint8)
    bad = np.array([[[5, 65535]]], np.uint16)  # what a negative id becomes
    joined = join_steps([(0, good), (2, bad)])
    assert joined[2, 0].tolist() == [5, 65535]
    assert join_steps([(0, good), (2, good)]).dtype == np.uint8
