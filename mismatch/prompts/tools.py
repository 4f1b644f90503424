"""Read the call of a tool in a response, in the forms that chat models write; a calculator."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_CHARACTERS = 500  # of an expression
MOST_DIGITS = 30  # of a result
# Form -> pattern with the groups "name" (of the tool) and "arguments" (JSON).
FORMS = {
    "harmony": re.compile(
        r"to=(?:functions\.)?(?P<name>[\w.-]+)(?:(?!<\|(?:message|end)\|>).)*<\|message\|>"
        r"(?P<arguments>(?:(?!<\|(?:message|end)\|>).)*)<\|call\|>",
        re.DOTALL,
    ),
    "hermes": re.compile(r"<tool_call>(?P<arguments>.*?)</tool_call>", re.DOTALL),
    "plain": re.compile(r"(?P<name>[\w.-]+) (?P<arguments>\{[^<]*\})<\|call\|>", re.DOTALL),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The last call of a response."""

    name: str
    arguments: dict[str, Any] | None
    """None: they are no JSON object."""


def tool_call(response: str) -> ToolCall | None:
    """Return the last call of a response (with its special tokens); None: it calls nothing.

    Forms: harmony's ``to=functions.NAME … <|message|>{…}<|call|>`` (gpt-oss),
    ``<tool_call>{…}</tool_call>`` (Hermes, Qwen) and ``NAME {…}<|call|>`` (tiny-gpt-oss). In
    harmony the tool ``python`` takes bare code, which becomes its argument ``code``.

    >>> tool_call('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>')
    ToolCall(name='f', arguments={'x': 1})
    >>> tool_call("Answer: 4<|return|>") is None
    True
    """
    for form, pattern in FORMS.items():
        calls = list(pattern.finditer(response))
        if not calls:
            continue
        text = calls[-1]["arguments"]
        arguments = _object(text)
        if form != "hermes":
            name = calls[-1]["name"]
            bare_code = arguments is None and (form, name) == ("harmony", "python")
            return ToolCall(name, {"code": text} if bare_code else arguments)
        if arguments is None:
            return ToolCall("", None)
        inner = arguments.get("arguments")
        inner = _object(inner) if isinstance(inner, str) else inner
        name = str(arguments.get("name", ""))
        return ToolCall(name, inner if isinstance(inner, dict) else None)
    return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, ``+ - * / // %`` and brackets, or an error.

    Only these nodes of the syntax tree are evaluated, so nothing else can run; without powers no
    result can grow large.

    >>> calculate("12 + 3 * 4"), calculate("7 / 2"), calculate("1 / 0"), calculate("x")
    ('24', '3.5', 'error: division by zero', 'error: not an expression of numbers')
    """
    if len(expression) > MOST_CHARACTERS:
        return f"error: more than {MOST_CHARACTERS} characters"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        if not math.isfinite(value):
            raise OverflowError(expression)
        text = str(int(value)) if float(value).is_integer() else f"{value:.10g}"
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, SyntaxError, OverflowError, RecursionError, MemoryError):
        return "error: not an expression of numbers"
    return text if len(text) <= MOST_DIGITS else f"error: more than {MOST_DIGITS} digits"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        result: float = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        return result
    raise ValueError(ast.dump(node))
