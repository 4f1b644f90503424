"""What is written is read back exactly; what is broken is refused with the fix."""

import json
import os
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mismatch.captures import Likeliest
from mismatch.codec import from_json
from mismatch.errors import CorruptCapture, EmptyComparison, MismatchError
from mismatch.run import store
from mismatch.specs import CheckSpec, spec_hash, to_dict
from mismatch.types import Pair, Rollout, Routing, Sampling, Scoring


def rollout(mask=(0, 0, 1, 1, 0, 0, 1)) -> Rollout:
    return Rollout(
        token_ids=np.array([5, 6, 7, 8, 5, 6, 9]),
        offsets=np.array([0, 4, 7]),
        action_mask=np.array(mask, bool),
        turn=np.array([0, 0, 1, 1, 0, 0, 1]),
        prompt_index=np.array([0, 0]),
        finish_reason=("length", "stop"),
        sampling=Sampling(max_tokens=2),
        fingerprint={"engine": "vllm"},
        rewards=np.array([0.0, 1.0]),
    )


def scoring(**changes) -> Scoring:
    values = {
        "name": "vllm:decode",
        "token_ids": np.array([7, 8, 9]),
        "logprobs": np.array([-0.1, -2.0, -0.3]),
        "fingerprint": {"mode": "decode"},
        "entropy": np.array([0.5, 0.6, 0.7]),
        "extra": {"kept_mass": np.array([1.0, 0.9, 1.0])},
    }
    return Scoring(**(values | changes))


def routing(ids=None) -> Routing:
    ids = np.tile(np.array([[[1, 5], [0, 2]]], np.uint8), (7, 1, 1)) if ids is None else ids
    present = np.array([1, 1, 1, 0, 1, 1, 0], bool)
    return Routing((1, 3), 8, ids, present, np.ones((7, 2, 2), np.float32))


def assert_same(a, b):
    for field in type(a).__dataclass_fields__:
        x, y = getattr(a, field), getattr(b, field)
        if isinstance(x, np.ndarray):
            assert np.array_equal(x, y), field
            assert x.dtype == y.dtype, field
        elif hasattr(x, "__dataclass_fields__"):
            assert_same(x, y)
        elif field == "extra":
            assert x.keys() == y.keys()
            assert all(np.array_equal(x[key], y[key]) for key in x)
        else:
            assert x == y, field


def test_round_trips(tmp_path):
    store.save_rollout(tmp_path, rollout())
    assert_same(rollout(), store.load_rollout(tmp_path))
    saved = scoring(routing=routing(), top1=np.array([7, 1, 9]))
    store.save_scoring(tmp_path, saved, rollout())
    assert_same(saved, store.load_scoring(tmp_path, "vllm:decode"))
    assert store.scoring_names(tmp_path) == ["vllm:decode"]
    frame = pd.DataFrame(
        {
            "sequence": [0],
            "prompt": [0],
            "position": [2],
            "token_id": [5],
            "rollout_logprob": [-0.1],
            "train_logprob": [-0.2],
            "delta": [-0.1],
            "routing_flips": pd.array([pd.NA], dtype="Int16"),
        }
    )
    store.save_tokens(tmp_path, frame)
    pd.testing.assert_frame_equal(store.load_tokens(tmp_path), frame, check_dtype=False)
    store.save_vocabulary(tmp_path, {7: "</script>", 8: "é"})
    assert store.load_vocabulary(tmp_path) == {7: "</script>", 8: "é"}


def test_nan_logprobs_survive_so_that_a_check_can_name_them(tmp_path):
    store.save_scoring(tmp_path, scoring(logprobs=np.array([-0.1, np.nan, -1])), rollout())
    assert np.isnan(store.load_scoring(tmp_path, "vllm:decode").logprobs[1])


def test_a_truncated_file_is_refused(tmp_path):
    path = store.save_rollout(tmp_path, rollout())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(MismatchError, match=r"rollout\.parquet is truncated"):
        store.load_rollout(tmp_path)
    (tmp_path / "manifest.json").unlink()  # a file that came alone, without its checksum
    with pytest.raises(MismatchError, match=r"rollout\.parquet.*readable Parquet"):
        store.load_rollout(tmp_path)


def test_an_empty_or_foreign_file_is_refused(tmp_path):
    (tmp_path / "rollout.parquet").write_bytes(b"")
    with pytest.raises(MismatchError, match=r"rollout\.parquet.*readable Parquet"):
        store.load_rollout(tmp_path)
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "rollout.parquet")
    with pytest.raises(MismatchError, match="schema none"):
        store.load_rollout(tmp_path)


def test_another_schema_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROLLOUT_SCHEMA", "mismatch.rollout/0")
    monkeypatch.setitem(store.REQUIRED_COLUMNS, "mismatch.rollout/0", set())
    store.save_rollout(tmp_path, rollout())
    monkeypatch.undo()
    with pytest.raises(MismatchError, match=rf"mismatch\.rollout/0.*{store.ROLLOUT_SCHEMA}"):
        store.load_rollout(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path):
    path = store.write_text(tmp_path / "a.json", "old")

    def fail(file):
        file.write(b"half")
        raise OSError(28, os.strerror(28))

    with pytest.raises(MismatchError, match="No space left"):
        store.write_atomic(path, fail)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_json_is_strict(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write_json(tmp_path / "a.json", {"x": float("nan")})
    store.write_json(tmp_path / "a.json", {"x": np.float64(1.5), "y": np.arange(2)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1.5, "y": [0, 1]}


def test_specs_round_trip_through_json():
    spec = CheckSpec()
    again = from_json(CheckSpec, json.loads(json.dumps(to_dict(spec))))
    assert again == spec
    assert spec_hash(again) == spec_hash(spec)
    assert len(spec_hash(spec)) == 12


# ---------------------------------------------------------------- the spine refuses nonsense


def test_a_first_token_cannot_be_an_action():
    with pytest.raises(MismatchError, match="first token"):
        rollout(mask=(1, 0, 1, 1, 0, 0, 1))


def test_a_rollout_without_sequences_is_empty():
    none = np.array([], int)
    with pytest.raises(EmptyComparison, match="no sequence"):
        replace(
            rollout(), token_ids=none, offsets=np.array([0]), action_mask=none.astype(bool),
            turn=none, prompt_index=none, finish_reason=(), rewards=None,
        )  # fmt: skip


def test_rewards_are_one_per_sequence():
    with pytest.raises(MismatchError, match=r"rewards has 3\b.*\b2"):
        replace(rollout(), rewards=np.zeros(3))


def test_pairing_needs_action_tokens_and_equal_ids():
    empty = rollout(mask=(0,) * 7)
    none = scoring(token_ids=np.array([], int), logprobs=np.array([]))
    with pytest.raises(EmptyComparison):
        Pair.of(empty, none, none)
    other = scoring(token_ids=np.array([7, 8, 1]))
    with pytest.raises(MismatchError, match="other tokens"):
        Pair.of(rollout(), scoring(), other)


@pytest.mark.parametrize(
    ("extra", "counts"), [("entropy", r"2 entropies\b.*3"), ("top1", r"2 most likely\b.*3")]
)
def test_pairing_needs_one_entropy_and_one_most_likely_id_per_token(extra, counts):
    short = scoring(name="fsdp", **{extra: np.zeros(2, int)})
    with pytest.raises(MismatchError, match=f"fsdp: {counts} tokens"):
        Pair.of(rollout(), scoring(), short)


def test_delta_is_train_minus_rollout():
    right = scoring(logprobs=np.array([-0.2, -2.0, -0.1]))
    pair = Pair.of(rollout(), scoring(), right)
    np.testing.assert_allclose(pair.delta, [-0.1, 0.0, 0.2])
    assert pair.sequence.tolist() == [0, 0, 1]


def corrupt(row, layer, value):
    ids = routing().ids.copy()
    ids[row, layer] = value
    return routing(ids)


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (corrupt(4, 1, [9, 2]), r"range.*token 4\b.*layer 3"),
        (corrupt(2, 0, [5, 5]), r"twice.*token 2\b.*layer 1"),
        (routing(np.zeros((6, 2, 2), np.uint8)), "shape"),
    ],
)
def test_corrupt_captures_name_layer_and_row(capture, message):
    with pytest.raises(CorruptCapture, match=message):
        capture.validate(rollout(), "vllm")


def test_missing_rows_are_refused_but_not_the_last_token_of_a_sequence():
    routing().validate(rollout(), "vllm")
    present = routing().present.copy()
    present[2] = False  # predicts token 3, an action
    with pytest.raises(CorruptCapture, match=r"no experts.*token 2\b"):
        Routing((1, 3), 8, routing().ids, present).validate(rollout(), "vllm")


def test_the_likeliest_of_a_scoring_come_back(tmp_path):
    ids = np.arange(9, dtype=np.int32).reshape(3, 3)
    top = Likeliest(ids, -ids.astype(np.float32))
    store.save_scoring(tmp_path, scoring(likeliest=top), rollout())
    likeliest = store.load_scoring(tmp_path, scoring().name).likeliest
    np.testing.assert_array_equal(likeliest.ids, top.ids)
    np.testing.assert_array_equal(likeliest.logprobs, top.logprobs)
