"""Calls of tools as models write them, and the calculator that answers."""

from __future__ import annotations

import pytest

from mismatch.prompts.environments import Calculator, between_turns
from mismatch.prompts.prompt import Prompt
from mismatch.prompts.tools import MOST_DIGITS, ToolCall, calculate, tool_call
from tests.checkpoints import tokenizer

HARMONY = (
    "<|channel|>analysis<|message|>I use to=functions.x.<|end|><|start|>assistant<|channel|>"
    'commentary to=functions.calculator <|constrain|>json<|message|>{"expression": "2*3"}<|call|>'
)


@pytest.mark.parametrize(
    ("response", "call"),
    [
        (HARMONY, ToolCall("calculator", {"expression": "2*3"})),
        ('calculator {"expression": "1+1"}<|call|>', ToolCall("calculator", {"expression": "1+1"})),
        (
            'a <tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call><|im_end|>',
            ToolCall("f", {"x": 1}),
        ),
        ("<tool_call>not json</tool_call>", ToolCall("", None)),
        (
            "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
            ToolCall("python", {"code": "print(1)"}),
        ),
        ("calculator {broken}<|call|>", ToolCall("calculator", None)),
        ('It is {"expression": "1"}<|return|>', None),
        ("Answer: 4<|return|>", None),
    ],
)
def test_the_call_that_a_response_ends_with(response: str, call: ToolCall | None) -> None:
    assert tool_call(response) == call


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "__import__('os').system('id')",
            "9**9**9",
            "[1]*9",
            "'a'*9",
            "True",
            "1 if 1 else 2",
            "",
        ),
        *("(" * 300 + "1" + ")" * 300, "1+" * 400 + "1", "9" * 200 + "*" + "9" * 200, "1e308*10"),
        *("lambda: 1", "x", "1;2", "f(1)", "1j", "-" * 499 + "1", "\x00"),
    ],
)
def test_only_numbers_are_calculated(expression: str) -> None:
    result = calculate(expression)
    assert result.startswith("error: ") or len(result) <= MOST_DIGITS
    if not expression.startswith(("(", "-", "1+")):
        assert result.startswith("error: ")


def test_the_calculator_answers_a_call_and_ends_with_an_answer() -> None:
    partner = Calculator(Prompt("p"))
    reply = partner.reply(HARMONY)
    assert reply == {"role": "tool", "name": "calculator", "content": "6"}
    assert partner.reply("Answer: 6<|return|>") is None
    other = partner.reply('browser {"url": "x"}<|call|>')
    assert other is not None
    assert "no tool 'browser'" in other["content"]


def test_a_tool_s_message_follows_a_call() -> None:
    """A template that takes a tool's message only after a call, as gpt-oss's does."""
    chat = tokenizer()
    chat.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}:"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}<call>"
        "{% elif m.role == 'tool' and not loop.previtem.tool_calls %}{{ raise_exception('no') }}"
        "{% else %}{{ m.content }}<end>{% endif %}{% endfor %}<s>assistant:"
    )
    chat.add_special_tokens({"additional_special_tokens": ["<s>", "<end>", "<call>"]})
    stops = [chat.convert_tokens_to_ids(token) for token in ("<end>", "<call>")]
    ids = between_turns(chat, {"role": "tool", "content": "42"}, stops)
    assert chat.decode(ids) == "<s>tool:42<end><s>assistant:"


def test_a_tool_s_message_names_its_tool() -> None:
    chat = tokenizer()
    chat.chat_template = (
        "{% for m in messages %}{% if m.tool_calls %}{% set ns.f = m.tool_calls[0].function %}"
        "{{ ns.f.arguments | tojson }}{% else %}{{ ns.f.name }}:{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    chat.chat_template = "{% set ns = namespace(f=none) %}" + chat.chat_template.replace(
        "{{ ns.f.name }}", "{{ ns.f.name if ns.f else m.role }}"
    )
    ids = between_turns(chat, {"role": "tool", "name": "python", "content": "42"}, [])
    assert chat.decode(ids).endswith("python:42")
