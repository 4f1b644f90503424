"""What is known of frameworks, read from TOML files next to this file.

``NAME.toml`` has what a framework's trainer runs, as settings of our own trainer (a preset); each
names its place in the framework's source. verl and TRL also have adapters, which run the
framework's code: a preset is for what only our own loop measures. ``NAME_keys.toml`` has the keys
of a framework's configuration: ``follow`` (a :class:`Rule` each), ``gap`` (they matter and are not
followed, unless the flag ``unless`` is given), ``no_effect`` and ``always`` (gaps of every run).
Those of verl and TRL name beginnings of keys that are ``near``; those of others name all keys, so
that the rest is unknown, and have ``model`` (keys), ``fixed`` (what it always does), ``engine`` (a
key), ``extra`` (what begins so is an argument of an engine) and ``unfollowed`` (sections).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from mismatch.errors import MismatchError

Name = Literal["verl", "trl", "skyrl"]
NAMES: tuple[Name, ...] = get_args(Name)


@cache
def table(name: str) -> dict[str, Any]:
    """Return ``NAME.toml`` next to this file."""
    text = files("mismatch.features.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@dataclass(frozen=True, slots=True)
class Rule:
    """A key that is followed.

    Attributes:
        kind: type of its value, a key of ``READERS``.
        to: places in the spec, ``train.dtype``.
        argument: instead of places, the argument of vLLM that it becomes.
        skip: a value that asks for nothing.
        convert: a key of ``CONVERSIONS``; "": the value as it is.
        needs: the module of flash attention; where it lacks, that is said and the value left out.
    """

    key: str
    kind: str
    to: Sequence[str] = ()
    argument: str = ""
    skip: Any = None
    convert: str = ""
    needs: str = ""


def rules_of(name: str) -> tuple[Rule, ...]:
    """Return the keys of a framework's configuration that are followed."""
    return tuple(Rule(**row) for row in table(f"{name}_keys")["follow"])


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "layout": lambda value: "packing" if value else "padding",
    "autocast": lambda value: None if value == "fp32" else value,
    "fp32 head": lambda value: "fp32" if value else None,
    "fp16": lambda value: "fp16" if value else "bf16",
    "flash or sdpa": lambda value: "flash_attention_2" if value else "sdpa",
}
_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "16", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "32", "torch.float32"), "fp32"),
}
_EXPECTED = {"count": "a positive whole number", "dtype": "bf16, fp16 or fp32"}


def typed(kind: str, value: Any, key: str) -> Any:
    """Return the value as ``kind``.

    Raises:
        MismatchError: it is none, with the key.
    """
    try:
        return READERS[kind](value)
    except (TypeError, ValueError, KeyError) as error:
        fault = f"{key} is {value!s:.60}, not {_EXPECTED.get(kind, f'a {kind}')}"
        fix = f"correct it in the file; verl: --framework-override {key}=VALUE"
        raise MismatchError(fault, fix) from error


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def _whole(value: Any, least: float = float("-inf")) -> int:
    number = _number(value)
    if number != int(number) or number < least:
        raise ValueError(value)
    return int(number)


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(value)
    return value


READERS: dict[str, Callable[[Any], Any]] = {
    "number": _number,
    "whole number": _whole,
    "count": lambda value: _whole(value, least=1),
    "switch": lambda value: {"true": True, "false": False}[str(value).lower()],
    "text": lambda value: _of(str, value),
    "mapping": lambda value: _of(dict, value),
    "files": lambda value: [_of(str, x) for x in (value if isinstance(value, list) else [value])],
    "dtype": lambda value: _DTYPES[str(value).lower()],
}
