"""Rollouts that a framework recorded: what is read, and what is refused with its line."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.errors import MismatchError
from mismatch.features.recorded import convert
from mismatch.features.recorded.dumps import Form, read_recorded
from mismatch.features.recorded.run import as_run, turns_of
from mismatch.types import Sampling

GENERIC = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4], "logprobs": [-0.1, -0.2]}
MASKED = {
    "token_ids": [1, 2, 3, 9, 9, 4],
    "action_mask": [0, 0, 1, 0, 0, 1],
    "logprobs": [-0.1, -0.2],
    "prompt_id": "a",
    "reward": 1,
    "finish_reason": "length",
}
INSTRUCT = {
    "step": 1,
    "sample_idx": 0,
    "prompt_idx": 7,
    "prompt_tokens": [1, 2],
    "response_tokens": [3, 4],
    "reward": 0.5,
    "finish_reason": "stop",
    "logprobs": [-0.1, -0.2],
    "request_info": None,
}


VERL = {
    "prompts": [0, 5, 6],
    "responses": [7, 8, 20, 9, 0],
    "attention_mask": [0, 1, 1, 1, 1, 1, 1, 0],
    "response_mask": [1, 1, 0, 1, 0],
    "rollout_log_probs": [-0.5, -0.25, 0.0, -0.125, 0.0],
    "rm_scores": [0.0, 0.0, 0.0, 1.0, 0.0],
}


def turn(prompt: list[int], completion: list[int], versions: tuple[int, int] = (1, 1)) -> Any:
    return {
        "min_policy_version": versions[0],
        "max_policy_version": versions[1],
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "completion_logprobs": [-float(token) for token in completion],
    }


def titan(*turns: Any, group: int = 0) -> Any:
    return {"group_id": group, "rollout_id": 0, "reward": 1.0, "turns": list(turns)}


def written(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    return path


def read(path: Path, *entries: Any, form: Form | None = None) -> Any:
    got = read_recorded(written(path / "a.jsonl", *entries), form)
    return got.form, got


def lists(row: Any) -> dict[str, Any]:
    """The fields of a row, arrays as lists."""
    return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in vars(row).items()}


def test_the_plain_form_and_the_masked_one(tmp_path: Path) -> None:
    form, batch = read(tmp_path, GENERIC, MASKED, MASKED, GENERIC)
    assert form == "generic"
    run = as_run(batch, Sampling(), {"engine": "recorded"})
    rollout, scoring = run.rollout, run.decode
    assert rollout.prompt_index.tolist() == [0, 1, 1, 2]
    assert rollout.token_ids.tolist()[4:10] == MASKED["token_ids"]
    assert rollout.turn.tolist()[4:10] == [0, 0, 1, 1, 1, 2]
    assert rollout.finish_reason == ("unknown", "length", "length", "unknown")
    assert rollout.rewards is None  # not every sequence has one
    assert scoring.token_ids.tolist() == [3, 4] * 4
    assert np.array_equal(scoring.logprobs, [-0.1, -0.2] * 4)


def test_samples_of_a_prompt_stand_together(tmp_path: Path) -> None:
    other = INSTRUCT | {"prompt_idx": 8, "reward": 2.0}
    _, batch = read(tmp_path, INSTRUCT, other, INSTRUCT)
    rollout = as_run(batch, Sampling(), {}).rollout
    assert rollout.prompt_index.tolist() == [0, 0, 1]
    assert rollout.rewards is not None
    assert rollout.rewards.tolist() == [0.5, 0.5, 2.0]


def test_turns_that_grow_are_one_sequence(tmp_path: Path) -> None:
    entry = titan(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6]), group=4)
    form, batch = read(tmp_path, entry)
    assert form == "torchtitan"
    (row,) = batch.sequences
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.sampled.tolist() == [False, False, True, True, False, True]
    assert turns_of(row.sampled).tolist() == [0, 0, 1, 1, 1, 2]
    assert row.logprobs.tolist() == [-3.0, -4.0, -6.0]
    assert not batch.remarks


def test_a_turn_with_other_ids_before_it_is_a_sequence_of_its_own(tmp_path: Path) -> None:
    """Encoded anew between the turns: each is scored with the context that its engine saw."""
    entry = titan(turn([1, 2], [3, 4]), turn([1, 2, 7, 5], [6], versions=(1, 2)))
    _, batch = read(tmp_path, entry)
    assert [row.token_ids.tolist() for row in batch.sequences] == [[1, 2, 3, 4], [1, 2, 7, 5, 6]]
    assert sorted(batch.remarks.values()) == [1, 1]
    rollout = as_run(batch, Sampling(), {}).rollout
    assert rollout.n_prompts == 1


def test_sequences_of_tools_without_a_mask_are_left_out(tmp_path: Path) -> None:
    tool = INSTRUCT | {"request_info": {"num_calls": 2, "tool_calleds": True}}
    _, batch = read(tmp_path, INSTRUCT, tool)
    assert len(batch.sequences) == 1
    assert list(batch.remarks.values()) == [1]
    with pytest.raises(MismatchError, match="no sequence"):
        read(tmp_path, tool)


REFUSED: dict[str, tuple[Any, str]] = {
    "no tensors": (titan({"turn_id": 0}), "log_tensors=True"),
    "no logprobs": (titan({"completion_token_ids": [1]}), "log_logprobs=True"),
    "text for a number": (GENERIC | {"logprobs": [-0.1, "-0.3"]}, "no log-probability"),
    "text ids": (GENERIC | {"response_token_ids": ["a", "b"]}, "no token id"),
    "negative": (GENERIC | {"response_token_ids": [3, -4]}, "no token id"),
    "first sampled": (GENERIC | {"prompt_token_ids": []}, "nothing predicts it"),
    "short mask": (MASKED | {"action_mask": [0, 1]}, "2 entries for 6"),
    "mask is no list": (MASKED | {"action_mask": 7}, "no list"),
    "instruct without": (INSTRUCT | {"logprobs": None}, "no logprobs"),
    "turns are text": (titan("a"), "torchtitan"),
    "verl": ({"input": "a", "output": "b", "gts": None, "score": 1}, "calculate_log_probs"),
    "TRL": ({"prompt": "a", "completion": "b", "step": 1}, "sampling_per_token_logps"),
    "verl without": ({"responses": [1], "response_mask": [1]}, "calculate_log_probs=True"),
    "verl's mask": ({**VERL, "attention_mask": [1]}, "1 entries for 8"),
    "unknown": ({"text": "a"}, "fields: text"),
    "a list": ([1], "no JSON object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_line_that_cannot_be_scored_is_named(name: str, tmp_path: Path) -> None:
    entry, says = REFUSED[name]
    with pytest.raises(MismatchError) as refused:
        read(tmp_path, entry)
    text = f"{refused.value.message} {refused.value.fix}"
    assert says in text
    assert "a.jsonl:1" in text


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b'{"token_ids": [1', b"\xff\xfe", b"[" * 100_000]
)
def test_a_file_that_is_empty_or_cut_off_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(MismatchError, match=r"a\.jsonl"):
        read_recorded(path)
    with pytest.raises(MismatchError, match="missing"):
        read_recorded(tmp_path / "missing")
    with pytest.raises(MismatchError):
        read_recorded(tmp_path)


# ---------------------------------------------------------------- verl


def test_rows_of_verl_lose_their_padding(tmp_path: Path) -> None:
    cut = VERL | {"attention_mask": [0] + [1] * 7}
    tool = VERL | {"responses": [7, 20], "response_mask": [1, 0], "padded": False}
    tool |= {"attention_mask": [0, 1, 1, 1, 1], "rollout_log_probs": [-1.0, 0.0], "rm_scores": [0]}
    empty = VERL | {"response_mask": [0] * 5}
    form, recorded = read(tmp_path, VERL, cut, tool, empty)
    assert form == "verl"
    first, second, third = recorded.sequences
    assert first.token_ids.tolist() == [5, 6, 7, 8, 20, 9]
    assert first.sampled.tolist() == [False, False, True, True, False, True]
    assert first.logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert [row.reward for row in recorded.sequences] == [1.0, 1.0, 0.0]
    reasons = [row.finish_reason for row in recorded.sequences]
    assert reasons == ["stop", "length", "environment"]
    assert second.token_ids.tolist() == [*first.token_ids.tolist(), 0]
    assert third.token_ids.tolist() == [5, 6, 7, 20]
    assert list(recorded.remarks.values()) == [1]
    run = as_run(recorded, Sampling(), {})
    assert run.rollout.prompt_index.tolist() == [0, 0, 0]  # samples of one prompt share its ids
    assert run.rollout.turn.tolist()[:6] == [0, 0, 1, 1, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gen_batch.dp", "tq_batch.pt"])
def test_a_pickle_is_read_by_torch_in_the_environment_that_wrote_it(
    name: str, tmp_path: Path
) -> None:
    """A file holds its batch as verl's does; what else it holds never runs."""
    import torch

    batch = {key: torch.tensor([values] * 2) for key, values in VERL.items()}
    dump = tmp_path / name
    if name == "tq_batch.pt":
        torch.save({"tensordict": batch, "keys": ["a_0_0", "a_1_0"]}, dump)
    else:
        inner = io.BytesIO()
        torch.save(batch, inner)
        dump.write_bytes(pickle.dumps((inner.getvalue(), {"uid": ["a", "a"]}, Hostile())))
    with pytest.raises(MismatchError, match="can run code") as refused:
        read_recorded(dump)
    assert "--python" in refused.value.fix
    got = read_recorded(tmp_path, python=sys.executable)
    assert (got.form, len(got.sequences)) == ("verl", 2)
    _, plain = read(tmp_path, VERL | {"padded": name == "gen_batch.dp"})
    one, other = got.sequences[1], plain.sequences[0]
    assert lists(one) | {"number": 0, "place": "0:0"} == lists(other)


@pytest.mark.slow
def test_a_hostile_file_of_torch_is_refused(tmp_path: Path) -> None:
    import torch

    torch.save({"rollout_data": Hostile()}, tmp_path / "a.pt")
    with pytest.raises(MismatchError, match=r"a\.pt"):
        read_recorded(tmp_path / "a.pt", python=sys.executable)


class Hostile:
    """Ends the process of whoever unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (7,)


# ---------------------------------------------------------------- dumps with both sides

NEMO = {
    "token_ids": [[1, 2, 3, 4, 0, 0]],
    "token_loss_mask": [[0, 0, 1, 1, 0, 0]],
    "generation_logprobs": [[0.0, 0.0, -0.1, -0.2, 0.0, 0.0]],
    "prev_logprobs": [[0.0, 0.0, -0.11, -0.21, 0.0, 0.0]],
    "input_lengths": [4],
    "rewards": [1.0],
    "content": ["text"],
    "idx": 0,
}
PRIME = {
    "schema_version": 1,
    "step": 3,
    "rank": 1,
    "env_name": "math",
    "token_ids": [1, 2, 3, 4],
    "loss_mask": [False, False, True, True],
    "inference_logprobs": [0.0, 0.0, -0.1, -0.2],
    "trainer_logprobs": [0.0, -3.0, -0.11, -0.21],
    "entropy": [0.0, 1.0, 0.5, 0.6],
    "rewards": [None, None, 1.0, 1.0],
    "new_column": [1, 2, 3, 4],
}
BOTH = MASKED | {"train_logprobs": [-0.11, -0.21], "entropy": [0.5, 0.6], "replica": 2}
BOTH |= {"new_column": 1}
SLIME = {
    "tokens": [1, 2, 3, 4],
    "response_length": 2,
    "loss_mask": [1, 1],
    "rollout_log_probs": [-0.5, -0.25],
    "log_probs": [-0.625, -0.25],
    "reward": 1.0,
}
SKYRL = {
    "sequences": [0, 1, 2, 3, 4],
    "attention_mask": [0, 1, 1, 1, 1],
    "loss_mask": [0.0, 1.0, 1.0],
    "rollout_logprobs": [0.0, -0.1, -0.2],
    "action_log_probs": [0.0, -0.11, -0.21],
}
# A row of every format, for tests/fuzz.py.
ROWS = (GENERIC, MASKED, INSTRUCT, VERL, NEMO, PRIME, BOTH, SLIME, SKYRL)
ROWS = (*ROWS, titan(turn([1, 2], [3, 4])))


@pytest.mark.parametrize("entry", [NEMO, PRIME, BOTH], ids=["nemo-rl", "prime-rl", "generic"])
def test_both_sides_are_read(entry: Any, tmp_path: Path) -> None:
    form, recorded = read(tmp_path, entry)
    (row,) = recorded.sequences
    assert (row.logprobs.tolist(), row.train_logprobs.tolist()) == ([-0.1, -0.2], [-0.11, -0.21])
    assert lists(row)["entropy"] == (None if form == "nemo-rl" else [0.5, 0.6])
    assert row.reward == 1.0
    unread = {"generic": {"new_column"}, "nemo-rl": {"content", "idx"}}
    assert recorded.unread == unread.get(form, recorded.unread)
    run = as_run(recorded, Sampling(), {}, {})
    assert run.train is not None
    assert run.train.logprobs.tolist() == [-0.11, -0.21]


def test_attributes_come_from_rows_and_from_names_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "token_exports" / "step_7"
    folder.mkdir(parents=True)
    plain = {key: value for key, value in PRIME.items() if key not in ("step", "rank")}
    written(folder / "rank_3.jsonl", plain)
    written(tmp_path / "token_exports" / "step_12.jsonl", PRIME)
    first, second = read_recorded(tmp_path / "token_exports").sequences
    assert first.attributes == {"step": "7", "rank": "3", "environment": "math"}
    assert second.attributes == {"step": "3", "rank": "1", "environment": "math"}


NUMBERS_ALONE: dict[str, dict[str, Any]] = {
    "two columns": {},
    "ratios": {"importance_ratio": [1.0, 0.5, 2.0]},
    "turns": {"turn_ids": [0, 1, 1]},
    "mask": {"action_mask": [1, 0, 1]},
    "prompt": {"prompt_id": "a"},
    "entropy": {"entropy": [0.5, 0.25, 1.5]},
}


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("more", NUMBERS_ALONE)
def test_numbers_without_ids_are_one_dump_as_lines_and_as_parquet(
    more: str, kind: str, tmp_path: Path
) -> None:
    """Parquet gives arrays of their own types where JSON gives lists."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"logprobs": [-0.5, -1.25, -2.0], "train_logprobs": [-0.75, -1.5, -2.25]},
        {"logprobs": [-1.5, -1.0, -0.25], "train_logprobs": [-1.5, -1.0, -0.5]},
    ]
    rows = [row | NUMBERS_ALONE[more] for row in rows]
    columns = pa.Table.from_pylist(rows)
    for number, each in enumerate(columns.schema):
        if each.type == pa.list_(pa.float64()):
            cast = columns.column(number).cast(pa.list_(getattr(pa, kind)()))
            columns = columns.set_column(number, each.name, cast)
    pq.write_table(columns, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one, other = (read_recorded(tmp_path / f"a.{end}") for end in ("parquet", "jsonl"))
    assert len(one.sequences) == len(rows)
    for left, right in zip(one.sequences, other.sequences, strict=True):
        for name in (
            "token_ids",
            "sampled",
            "logprobs",
            "train_logprobs",
            "entropy",
            "ratios",
            "turns",
        ):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        assert left.prompt == right.prompt


def test_a_parquet_file_is_read_like_its_lines(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([BOTH, BOTH]), tmp_path / "a.parquet")
    rows = read_recorded(tmp_path / "a.parquet").sequences
    assert list(map(lists, rows)) == list(map(lists, read(tmp_path, BOTH, BOTH)[1].sequences))
    bad = BOTH | {"logprobs": [None, -0.2]}
    pq.write_table(pa.Table.from_pylist([BOTH, bad]).slice(1), tmp_path / "c.parquet")
    sums = read_recorded(tmp_path / "c.parquet").sums
    assert (sums.rows, sums.not_finite["rollout", "NaN or null"], sums.whole.tokens) == (1, 1, 1)
    pq.write_table(pa.Table.from_pylist([BOTH | {"token_ids": None}]), tmp_path / "d.parquet")
    with pytest.raises(MismatchError, match="token_ids"):
        read_recorded(tmp_path / "d.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:200])
    with pytest.raises(MismatchError, match="Parquet"):
        read_recorded(tmp_path / "b.parquet")


def test_of_a_large_dump_whole_prompts_are_drawn_and_sums_are_of_all(tmp_path: Path) -> None:
    """The same prompts whatever the order of the rows; other steps are not read."""
    random = np.random.default_rng(0)
    entries = []
    for number in range(600):
        delta = random.normal(0, 0.1, 4)
        entries.append(
            {
                "prompt_token_ids": [number // 3],
                "response_token_ids": [1, 2, 3, 4],
                "logprobs": [-1.0] * 4,
                "train_logprobs": (delta - 1.0).tolist(),
                "prompt_id": f"p{number // 3}",
                "step": number % 2,
                "reward": float(number % 2),
            }
        )
    dump = written(tmp_path / "a.jsonl", *entries)
    kept = read_recorded(dump, most=500)
    tokens = sum(len(row.token_ids) for row in kept.sequences)
    assert 125 <= tokens <= 500
    per_prompt = Counter(row.prompt for row in kept.sequences)
    assert set(per_prompt.values()) == {3}
    whole = read_recorded(dump)
    assert len(whole.sequences) == whole.sums.rows == kept.sums.rows == 600
    assert kept.sums.steps() == whole.sums.steps()
    assert [step.reward for step in kept.sums.steps()] == [0.0, 1.0]
    dump = written(tmp_path / "a.jsonl", *reversed(entries))
    assert {row.prompt for row in read_recorded(dump, most=500).sequences} == {*per_prompt}
    of_one = read_recorded(dump, step=1)
    assert {row.attributes["step"] for row in of_one.sequences} == {"1"}
    assert of_one.sums.whole.step(1).abs_diff == pytest.approx(whole.sums.steps()[1].abs_diff)
    # Of few prompts rows are drawn: they may be as long as the others together.
    few = written(
        tmp_path / "a.jsonl", *(entry | {"prompt_id": n % 3} for n, entry in enumerate(entries))
    )
    rows = read_recorded(few, most=500).sequences
    assert 16 < len(rows) <= 100
    assert {row.prompt for row in rows} == {0, 1, 2}


def test_slimes_train_dump_is_read(tmp_path: Path) -> None:
    import torch

    data = {
        "tokens": [torch.tensor([1, 2, 3, 4])],
        "response_lengths": [2],
        "loss_masks": [torch.tensor([1, 1])],
        "rollout_log_probs": [torch.tensor([-0.5, -0.25])],
        "log_probs": [torch.tensor([-0.625, -0.25])],
        "rewards": [1.0],
    }
    torch.save({"rollout_id": 4, "rank": 1, "rollout_data": data}, tmp_path / "4_1.pt")
    got = read_recorded(tmp_path / "4_1.pt", python=sys.executable)
    (row,) = got.sequences
    assert got.form == "slime"
    assert (row.logprobs.tolist(), row.train_logprobs.tolist()) == ([-0.5, -0.25], [-0.625, -0.25])
    assert row.attributes == {"rank": "1", "step": "4"}


def test_values_that_cannot_be_true_are_findings(tmp_path: Path) -> None:
    """They are the faults of several published issues: the file is read, and they are counted."""
    nan = BOTH | {"train_logprobs": [float("nan"), -0.2]}
    null = BOTH | {"rollout_logprobs": [None, float("-inf")], "prompt_id": "b"}
    short = BOTH | {"train_logprobs": [-0.1]}
    _, recorded = read(tmp_path, nan, null, short, BOTH)
    run = as_run(recorded, Sampling(), {}, {})
    found = {(finding.side, finding.what): finding for finding in run.findings}
    assert found["trainer", "NaN or null"].tokens == 1
    assert found["rollout", "NaN or null"].sequences == 1
    assert found["rollout", "-inf"].sequences == 1
    assert sum(recorded.misfits.values()) == 1
    assert run.rollout.n_actions == 3
    assert np.isfinite(run.decode.logprobs).all()


def test_a_dump_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="no sequence"):
        read(tmp_path, MASKED | {"action_mask": [0] * 6, "logprobs": []})
    with pytest.raises(MismatchError, match="-1 rollout values"):
        read(tmp_path, GENERIC | {"logprobs": [-0.1]})


@pytest.mark.parametrize("version", ["2.5.1", "2.9.1+cu128", "1.13.0"])
def test_an_old_torch_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """A file can run code in it, also with weights_only."""
    import torch

    torch.save({"responses": torch.zeros(1, 1)}, tmp_path / "dump.pt")
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="can run code"):
        convert.load(tmp_path / "dump.pt", set())
