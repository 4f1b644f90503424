"""Data sets of every format become the same prompts; nothing here needs a network."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from mismatch.errors import MismatchError
from mismatch.prompts.datasets import drawn_rows, prompt_column, read_dataset
from mismatch.prompts.prompt import numeric_answer, numeric_reward
from mismatch.run.hub import PROXIES, unknown_host
from mismatch.specs import PromptSpec

datasets = pytest.importorskip("datasets", reason="client: the extra `datasets` is not installed")

ROWS = [
    {"question": f"What is {n} plus {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n:,}"}
    for n in range(600, 620)
]


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def _stored(directory: Path, form: str) -> str:
    table = datasets.Dataset.from_list(ROWS)
    path = directory / f"data.{form}"
    if form in ("jsonl", "json"):
        return _jsonl(path, ROWS)
    if form == "parquet":
        table.to_parquet(path)
    elif form == "csv":
        table.to_csv(path)
    elif form == "one split":
        path = directory / "one"
        table.save_to_disk(str(path))
    elif form == "splits":
        path = directory / "splits"
        empty = datasets.Dataset.from_list(ROWS[:1])
        datasets.DatasetDict({"test": empty, "train": table}).save_to_disk(str(path))
    else:
        path = directory / "plain"
        path.mkdir()
        table.to_parquet(path / "train.parquet")
    return str(path)


@pytest.mark.parametrize(
    "form", ["jsonl", "json", "parquet", "csv", "one split", "splits", "directory"]
)
def test_every_format_gives_the_same_prompts(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    spec = PromptSpec(dataset=_stored(tmp_path, form), answer_column="answer", num_prompts=5)
    prompts = read_dataset(spec)
    rows = drawn_rows(len(ROWS), spec)
    assert [p.messages for p in prompts] == [
        [{"role": "user", "content": ROWS[row]["question"]}] for row in rows
    ]
    assert [p.answer for p in prompts] == [2 * (600 + row) for row in rows]
    assert [p.origin for p in prompts] == [f"{spec.dataset} row {row}" for row in rows]


def test_the_draw_is_seeded_distinct_and_in_order() -> None:
    def draw(**fields: int) -> list[int]:
        return drawn_rows(1000, PromptSpec(dataset="x", **fields))

    first = draw(num_prompts=50, seed=1)
    assert first == draw(num_prompts=50, seed=1)
    assert first != draw(num_prompts=50, seed=2)
    assert first == sorted(set(first))
    assert len(first) == 50
    assert first != list(range(50))  # not merely the head
    assert draw(num_prompts=2000) == list(range(1000))


def test_another_split(tmp_path: Path) -> None:
    path = _stored(tmp_path, "splits")
    assert len(read_dataset(PromptSpec(dataset=path, dataset_split="test"))) == 1
    with pytest.raises(MismatchError, match="no split validation") as caught:
        read_dataset(PromptSpec(dataset=path, dataset_split="validation"))
    assert "test, train" in caught.value.fix


MESSAGES = {
    "chat": (
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    ),
    "its own answer is dropped": (
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        [{"role": "user", "content": "Hi"}],
    ),
    "sharegpt": (
        [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
        [{"role": "user", "content": "Hi"}],
    ),
    "a later turn": (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_conversations(tmp_path: Path, case: str) -> None:
    given, expected = MESSAGES[case]
    path = _jsonl(tmp_path / "chat.jsonl", [{"messages": given, "id": 3}])
    (prompt,) = read_dataset(PromptSpec(dataset=path))
    assert prompt.messages == expected


def test_a_verl_parquet_with_a_nested_answer(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list([row]).to_parquet(path)
    spec = PromptSpec(dataset=str(path), answer_column="reward_model.ground_truth")
    (prompt,) = read_dataset(spec)
    assert (prompt.messages, prompt.answer) == (row["prompt"], 4)


def test_columns_are_found_by_name_or_asked_for() -> None:
    def column(columns: list[str], **fields: str) -> str:
        return prompt_column(columns, PromptSpec(dataset="d", **fields))

    assert column(["id", "Question", "answer"]) == "Question"
    assert column(["id", "question", "prompt"], prompt_column="id") == "id"
    with pytest.raises(MismatchError, match=r"\(question, prompt\)") as caught:
        column(["id", "question", "prompt"])
    assert "id, question, prompt" in caught.value.message
    assert caught.value.fix.endswith(": --prompt-column question")
    with pytest.raises(MismatchError, match="id, text, none"):
        column(["id", "text"])
    with pytest.raises(MismatchError, match="--prompt-column txt:") as caught:
        column(["id", "text"], prompt_column="txt")
    assert "id, text" in caught.value.fix


def _bad(directory: Path, case: str) -> PromptSpec:
    if case == "malformed":
        (directory / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": ')
        return PromptSpec(dataset=str(directory / "a.jsonl"))
    if case == "another format":
        (directory / "a.xlsx").write_bytes(b"PK")
        return PromptSpec(dataset=str(directory / "a.xlsx"))
    if case == "empty directory":
        return PromptSpec(dataset=str(directory))
    if case == "missing file":
        return PromptSpec(dataset=str(directory / "b.parquet"))
    rows = [{"prompt": "x", "n": 1}, {"prompt": "  ", "n": 2}]
    path = _jsonl(directory / "a.jsonl", rows)
    if case == "blank row":
        return PromptSpec(dataset=path)
    if case == "not a prompt":
        return PromptSpec(dataset=path, prompt_column="n")
    return PromptSpec(dataset=path, answer_column="solution")


BAD = {
    "malformed": ("not a readable json file", "JSONL"),
    "another format": ("cannot read a .xlsx", "parquet"),
    "empty directory": ("neither written by save_to_disk", "save_to_disk"),
    "missing file": ("no such file or directory", "check the path"),
    "blank row": ("row 1: prompt holds no prompt (str)", "--prompt-column"),
    "not a prompt": ("row 0: n holds no prompt (int)", "--prompt-column"),
    "no answer": ("--answer-column solution: the data set has no such column", "prompt, n"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said(tmp_path: Path, case: str) -> None:
    message, fix = BAD[case]
    with pytest.raises(MismatchError) as caught:
        read_dataset(_bad(tmp_path, case))
    assert message in caught.value.message
    assert fix in caught.value.fix


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MismatchError, match="not installed") as caught:
        read_dataset(PromptSpec(dataset="openai/gsm8k"))
    assert "train-infer-mismatch[datasets]" in caught.value.fix


def test_an_unreachable_hub_says_how_to_go_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    def no_name_server(*args: Any) -> None:
        raise OSError("Name or service not known")

    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", no_name_server)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(MismatchError, match="no address for") as caught:
        read_dataset(PromptSpec(dataset="openai/gsm8k", dataset_config="main"))
    assert "load_dataset('openai/gsm8k', 'main').save_to_disk" in caught.value.fix
    assert "HF_HUB_OFFLINE=1" in caught.value.fix
    offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
    assert constants.HF_HUB_OFFLINE is offline  # put back
    assert datasets.config.HF_HUB_OFFLINE is offline


@pytest.mark.hub
def test_gsm8k_from_the_hub() -> None:
    if unknown_host():
        pytest.skip("hub: the hub cannot be reached from here")
    spec = PromptSpec(
        dataset="openai/gsm8k", dataset_config="main", answer_column="answer", num_prompts=4
    )
    prompts = read_dataset(spec)
    assert len(prompts) == 4
    assert all(prompt.answer is not None for prompt in prompts)


ANSWERS: dict[Any, int | None] = {
    "3 * 4 = <<3*4=12>>12\n#### 12": 12,
    "#### $1,250": 1250,
    "####-7\n": -7,
    "so \\boxed{8} then \\boxed{9}": 9,
    "42": 42,
    " 42.0 ": 42,
    "42.5": None,
    "#### 42.5": None,
    "two": None,
    "": None,
    "9" * 5000: None,
    17: 17,
    -3.0: -3,
    17.5: None,
    float("inf"): None,
    True: None,
    None: None,
}


@pytest.mark.parametrize("value", ANSWERS, ids=lambda value: repr(value)[:20])
def test_numeric_answers(value: Any) -> None:
    assert numeric_answer(value) == ANSWERS[value]


REWARDS = {
    "It is 42.": 1.0,
    "42 apples, then 5 pears": 0.0,
    "#### 42\nor maybe 7": 1.0,
    "The answer is $42.00": 1.0,
    "\\boxed{42} dollars for 3 days": 1.0,
    "Answer: 42 (not 43)": 1.0,
    "42.5": 0.0,
    "no number": 0.0,
    "": 0.0,
    "9" * 5000: 0.0,
}


@pytest.mark.parametrize("response", REWARDS, ids=lambda text: text[:20])
def test_numeric_rewards(response: str) -> None:
    assert numeric_reward(response, 42) == REWARDS[response]
