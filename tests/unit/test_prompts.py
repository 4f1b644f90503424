"""Prompts: what a file may hold, and that every refusal names the file and the line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch.errors import MismatchError
from mismatch.prompts.arithmetic import arithmetic_problems
from mismatch.prompts.environments import Calculator, Retry, prepared
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.sources import read_file, read_prompts, render_prompts
from mismatch.specs import PromptSpec


def write(path: Path, *lines: str) -> PromptSpec:
    path.write_text("\n".join(lines), encoding="utf-8")
    return PromptSpec(path=str(path))


def test_the_built_in_task_keeps_its_answers() -> None:
    prompts = read_prompts(PromptSpec(num_prompts=5, seed=3))
    problems = arithmetic_problems(5, 3)
    assert [prompt.messages for prompt in prompts] == [problem.messages for problem in problems]
    assert [prompt.answer for prompt in prompts] == [problem.answer for problem in problems]


def test_an_environment_may_prepare_the_prompts() -> None:
    """The calculator offers its tool in conversations; others leave the prompts as they are."""
    prompts = read_prompts(PromptSpec("calculator", num_prompts=3))
    assert all(prompt.answer is not None for prompt in prompts)
    offered = prepared(Calculator, prompts)
    assert offered == [replace(prompt, tools=[Calculator.tool]) for prompt in prompts]
    assert prepared(Calculator, [Prompt("p", text="once")]) == [Prompt("p", text="once")]
    assert prepared(Retry, prompts) == prepared(None, prompts) == prompts


def test_a_prepare_that_fails_is_named() -> None:
    class Wrong:
        @staticmethod
        def prepare(prompt: Prompt) -> Prompt:
            raise KeyError("level")

    with pytest.raises(MismatchError, match="level"):
        prepared(Wrong, [Prompt("p", text="once")])


def test_three_kinds_of_lines(tmp_path: Path) -> None:
    spec = write(
        tmp_path / "p.jsonl",
        '{"prompt": "Once", "id": 7}',
        '{"messages": [{"role": "user", "content": "Hi"}]}',
        '{"prompt_token_ids": [0, 5]}',
    )
    first, second, third = read_prompts(spec)
    assert (first.text, second.messages, third.token_ids) == (
        "Once",
        [{"role": "user", "content": "Hi"}],
        [0, 5],
    )
    assert third.origin == f"{spec.path}:3"
    assert [p.answer for p in (first, second, third)] == [None] * 3


def test_the_first_so_many_are_taken(tmp_path: Path) -> None:
    write(tmp_path / "p.jsonl", *[f'{{"prompt": "{i}"}}' for i in range(9)])
    spec = PromptSpec(path=str(tmp_path / "p.jsonl"), num_prompts=4)
    assert [prompt.text for prompt in read_prompts(spec)] == ["0", "1", "2", "3"]


def test_byte_order_mark_blank_lines_and_crlf_are_no_errors(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}\r\n\n')
    prompts = read_prompts(PromptSpec(path=str(path)))
    assert [prompt.text for prompt in prompts] == ["a", "b"]
    assert prompts[1].origin.endswith(":4")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("hello", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "not an object"),
        ("{}", "exactly one of"),
        ('{"text": "x"}', "keys: text"),
        ('{"prompt": "x", "messages": []}', "prompt and messages"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": 3}', "must be a string"),
        ('{"messages": []}', "not empty"),
        ('{"messages": ["hi"]}', "messages[0]"),
        ('{"messages": [{"content": "hi"}]}', "role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content"),
        ('{"prompt_token_ids": []}', "not empty"),
        ('{"prompt_token_ids": "12"}', "must be a list"),
        ('{"prompt_token_ids": [1, -1]}', "prompt_token_ids[1]"),
        ('{"prompt_token_ids": [1, 2.0]}', "prompt_token_ids[1]"),
        ('{"prompt_token_ids": [true]}', "prompt_token_ids[0]"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    spec = write(tmp_path / "p.jsonl", '{"prompt": "good"}', "", line)
    with pytest.raises(MismatchError) as caught:
        read_prompts(spec)
    assert f"{spec.path}:3: " in caught.value.message
    assert says in caught.value.message
    assert caught.value.fix


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(MismatchError, match=r":2: not UTF-8"):
        read_prompts(PromptSpec(path=str(path)))


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff\n"])
def test_a_file_without_prompts(tmp_path: Path, content: str) -> None:
    with pytest.raises(MismatchError, match="has no prompts"):
        read_prompts(write(tmp_path / "p.jsonl", content))


def test_a_file_of_prompts_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with path.open("wb") as file:
        file.truncate((128 << 20) + 1)
    with pytest.raises(MismatchError) as refused:
        read_file(path)
    assert "128 MiB" in refused.value.message


def test_a_missing_file_and_an_unknown_task(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="No such file"):
        read_prompts(PromptSpec(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(MismatchError, match="unknown task 'chess'"):
        read_prompts(PromptSpec(task="chess"))


def test_reading_is_light() -> None:
    code = (
        "import sys, mismatch.prompts.sources\n"
        "heavy = {'torch', 'transformers', 'pandas', 'pyarrow', 'vllm'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Letters:
    """A tokenizer whose tokens are characters; "^" is its BOS, id 94."""

    bos_token = "^"
    chat_template: str | None = "a template"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in ("^" + text if add_special_tokens else text)]}

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: bool) -> list[int]:
        assert kwargs == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        if messages[0]["role"] != "user":
            raise ValueError("the first role must be user")
        return [ord(c) for message in messages for c in message["content"]]


def test_rendering_each_kind() -> None:
    prompts = [
        Prompt("a:1", text="AB"),
        Prompt("a:2", text="^AB"),
        Prompt("a:3", messages=[{"role": "user", "content": "C"}]),
        Prompt("a:4", token_ids=[3, 1]),
    ]
    assert render_prompts(prompts, Letters(), 128) == [[94, 65, 66], [94, 65, 66], [67], [3, 1]]


def test_a_base_model_is_asked_in_plain_text_where_the_prompts_are_questions() -> None:
    bare = Letters()
    bare.chat_template = None
    question = Prompt("a:1", messages=[{"role": "user", "content": "C"}])
    assert render_prompts([question], bare, 128, plain=True) == [[94, 67, 10]]
    assert render_prompts([question], Letters(), 128, plain=True) == [[67]]
    system = {"role": "system", "content": "D"}
    assert question.messages is not None
    for talk in (replace(question, messages=[system, *question.messages]),
                 replace(question, tools=[{}])):  # fmt: skip
        with pytest.raises(MismatchError, match=r"a:1.*no chat template"):
            render_prompts([talk], bare, 128, plain=True)


def test_rendering_refuses_what_cannot_be_rendered() -> None:
    bare = Letters()
    bare.chat_template = None
    talk = Prompt("a:3", messages=[{"role": "tool", "content": "C"}])
    with pytest.raises(MismatchError, match=r"a:3.*no chat template"):
        render_prompts([talk], bare, 128)
    with pytest.raises(MismatchError, match=r"a:3.*must be user"):
        render_prompts([talk], Letters(), 128)
    with pytest.raises(MismatchError, match=r"a:4.*id 128\b.*\b128"):
        render_prompts([Prompt("a:4", token_ids=[127, 128])], Letters(), 128)
    with pytest.raises(MismatchError, match="a:5: no tokens"):
        render_prompts([Prompt("a:5", messages=[{"role": "user", "content": ""}])], Letters(), 128)
