"""Typed values out of a config, and places in a check that they go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mismatch.errors import MismatchError

_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "16", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "32", "torch.float32"), "fp32"),
}
_EXPECTED = {"count": "a positive whole number", "dtype": "bf16, fp16 or fp32"}
_PLACES: dict[str, tuple[str, ...]] = {
    "engine": ("rollout", "engine"),
    "sampling": ("rollout", "sampling"),
    "prompts": ("rollout", "prompts"),
    "train": ("train",),
}


def typed(kind: str, value: Any, key: str) -> Any:
    """The value as ``kind``, a key of ``_READERS``.

    Raises:
        MismatchError: it is none, with the key.
    """
    try:
        return _READERS[kind](value)
    except (TypeError, ValueError, KeyError) as error:
        raise MismatchError(
            f"{key} is {short(value)}, not {_EXPECTED.get(kind, f'a {kind}')}",
            f"correct it in the file, or: --verl-override {key}=VALUE",
        ) from error


def _instance(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(value)
        return value

    return read


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def _whole(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(value)
    return int(number)


def _count(value: Any) -> int:
    number = _whole(value)
    if number < 1:
        raise ValueError(value)
    return number


_READERS: dict[str, Callable[[Any], Any]] = {
    "number": _number,
    "whole number": _whole,
    "count": _count,
    "switch": lambda value: {"true": True, "false": False}[str(value).lower()],
    "text": _instance(str),
    "files": lambda value: [
        _instance(str)(item) for item in (value if isinstance(value, list) else [value])
    ],
    "mapping": _instance(dict),
    "dtype": lambda value: _DTYPES[str(value).lower()],
}


def at(spec: Any, target: str) -> Any:
    """The value at ``engine.dtype``, ``train.dtype`` … of a check."""
    for name in _path(target):
        spec = getattr(spec, name)
    return spec


def put(spec: Any, target: str, value: Any) -> Any:
    """The check with another value there."""

    def inside(node: Any, path: tuple[str, ...]) -> Any:
        inner = value if len(path) == 1 else inside(getattr(node, path[0]), path[1:])
        return replace(node, **{path[0]: inner})

    return inside(spec, _path(target))


def _path(target: str) -> tuple[str, ...]:
    group, _, name = target.partition(".")
    return (*_PLACES[group], name)


def short(value: Any) -> str:
    """A value for a message."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
