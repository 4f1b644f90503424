"""tiny-gpt-oss-tools: its tokens, chat template in harmony's form, and training text.

Problems of two or three steps with a calculator on offer: called step by step, called once with the
whole expression, or left alone; short problems without tools; small instructions. All generated
here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from mismatch.prompts.arithmetic import Story, long_story, pick, story
from mismatch.prompts.environments import Calculator
from tools.tiny_gpt_oss_corpus import Chat, daydream, instruction, worked_answer
from tools.tiny_gpt_oss_model import CALL, RETURN, SPECIAL, START

TOOL_SPECIAL = (*SPECIAL, "<|channel|>", "<|constrain|>")

# As the model samples, not as gpt-oss's own template renders a history: so a rendered conversation
# is the sampled tokens, analysis and end tokens included.
TOOL_TEMPLATE = """\
{%- if tools -%}
<|start|>developer<|message|># Tools
{%- for tool in tools -%}
{{- ' ' + tool.function.name + '(' -}}
{{- tool.function.parameters.properties.keys() | join(', ') + ')' -}}
{%- endfor -%}
<|end|>
{%- endif -%}
{%- set last = namespace(tool='') -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|start|>assistant
{%- if message.thinking -%}
<|channel|>analysis<|message|>{{ message.thinking }}<|end|><|start|>assistant
{%- endif -%}
{%- if message.tool_calls -%}
{%- set call = message.tool_calls[0] -%}
{%- set function = call.function if call.function is defined else call -%}
{%- set last.tool = function.name -%}
{{- '<|channel|>commentary to=functions.' + function.name + ' <|constrain|>json<|message|>' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
<|call|>
{%- else -%}
<|channel|>final<|message|>{{ message.content }}<|return|>
{%- endif -%}
{%- elif message.role == 'tool' -%}
{{- '<|start|>functions.' + last.tool + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- message.content + '<|end|>' -}}
{%- else -%}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""

_PLANS = (
    "We need the calculator. ", "This is a sum for the tool. ", "Let us ask the tool. ",
    "The tool can do it. ", "A calculator helps here. ", "We call the tool. ",
)  # fmt: skip
_READ = (
    "The tool says {r}. ", "It is {r}. ", "We get {r}. ", "The result is {r}. ",
    "{w} has {r} {i}. ", "So there are {r} {i}. ",
)  # fmt: skip


def tool_chats(seed: int) -> Iterator[Chat]:
    """Yield an endless, reproducible stream of training conversations."""
    rng = random.Random(seed)
    while True:
        if rng.random() < 0.1:
            yield {"messages": instruction(rng), "tools": None}
            continue
        offered = rng.random() < 0.8
        told = (long_story if offered else story)(rng)
        if offered and rng.random() < 0.7:
            messages = _with_tool(rng, told)
        else:
            messages = [_said(rng, content=worked_answer(rng, told))]
        question = {"role": "user", "content": told.prompt}
        yield {"messages": [question, *messages], "tools": [Calculator.tool] if offered else None}


def _with_tool(rng: random.Random, told: Story) -> list[dict[str, Any]]:
    """Return calls, results and the answer that reads the last of them."""
    steps = [(f"{a} {sign.replace('x', '*')} {b}", result) for a, sign, b, result in told.steps]
    if rng.random() < 0.5:  # all at once, from left to right: a product can only come first
        whole = steps[0][0] + "".join(f" {sign} {b}" for _, sign, b, _ in told.steps[1:])
        steps = [(whole, told.answer)]
    messages = []
    for number, (expression, result) in enumerate(steps):
        plan = number == 0 and rng.random() < 0.7
        call = {"name": "calculator", "arguments": {"expression": expression}}
        calls = [{"type": "function", "function": call}]
        messages.append(_said(rng, pick(rng, _PLANS) if plan else None, tool_calls=calls))
        messages.append({"role": "tool", "name": "calculator", "content": str(result)})
    read = pick(rng, _READ).format(r=told.answer, w=told.who, i=told.item)
    return [
        *messages,
        {"role": "assistant", "content": f"{daydream(rng)}{read}Answer: {told.answer}"},
    ]


def _said(rng: random.Random, thinking: str | None = None, **message: Any) -> dict[str, Any]:
    """Return an assistant's message; with a plan, it thinks aloud before."""
    if thinking is not None:
        message["thinking"] = thinking + daydream(rng) + daydream(rng).strip()
    return {"role": "assistant"} | message


def tool_texts(chat: Chat) -> Iterator[str]:
    """Return what the tokenizer learns from a conversation."""
    for message in chat["messages"]:
        yield message["role"]
        yield message.get("thinking") or ""
        yield message.get("content") or ""
        for call in message.get("tool_calls", ()):
            yield f"commentary to=functions.{call['function']['name']} json"
            yield f'{{"expression": "{call["function"]["arguments"]["expression"]}"}}'
            yield "analysis final developer # Tools calculator(expression)"
            yield "final"


def spoken_tokens(ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Mask [rows, T] of what the assistant samples: from after its header to the end token.

    The headers between the assistant's messages (analysis, then a call) are sampled too.
    """
    (assistant,) = tokenizer.encode("assistant")
    mask = torch.zeros_like(ids, dtype=torch.bool)
    inside = torch.zeros(len(ids), dtype=torch.bool)
    for t in range(1, ids.shape[1]):
        mask[:, t] = inside
        opens = (ids[:, t] == assistant) & (ids[:, t - 1] == START)
        closes = (ids[:, t] == RETURN) | (ids[:, t] == CALL)
        inside = (inside & ~closes) | opens
    return mask
