"""Keys of verl's config that are followed, read from verl_keys.toml, and types of their values."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from mismatch.errors import MismatchError


@dataclass(frozen=True, slots=True)
class Rule:
    """A key that is followed.

    Attributes:
        kind: type of its value, a key of ``READERS``.
        targets: (place in the spec, command-line parameter) pairs.
        argument: instead of targets, the engine argument that it becomes (vLLM).
        skip: a value that asks for nothing.
        only: name of the preset that it is for; "": all.
        convert: a key of ``CONVERSIONS``; "": the value as it is.
    """

    key: str
    kind: str
    targets: tuple[tuple[str, str], ...] = ()
    argument: str = ""
    skip: Any = None
    only: str = ""
    convert: str = ""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Rule:
        """Make a rule of a TOML row; a parameter has the name of its place unless ``:NAME``."""
        pairs = (place.partition(":") for place in row.pop("to", ()))
        targets = tuple((place, name or place.partition(".")[2]) for place, _, name in pairs)
        return cls(targets=targets, **row)


@dataclass(frozen=True, slots=True)
class KeyGap:
    """A key that matters and cannot be followed.

    Attributes:
        above: it matters above this number.
        usual: values at which it does not matter; with neither, it matters where it is switched on.
    """

    key: str
    what: str
    above: int | None = None
    usual: tuple[Any, ...] = ()
    only: str = ""

    def matters(self, value: Any) -> bool:
        if self.above is not None:
            return isinstance(value, int) and value > self.above
        if self.usual:
            return value is not None and value not in self.usual
        return bool(value) and str(value).lower() not in ("false", "none", "disabled")


_TEXT = files("mismatch.features.presets").joinpath("verl_keys.toml").read_text(encoding="utf-8")
_DATA = tomllib.loads(_TEXT)
REQUIRED: tuple[str, ...] = tuple(_DATA["required"])
RULES = tuple(Rule.of(row) for row in _DATA["follow"])
# Engine arguments that have a flag of their own here; in engine_kwargs they win, as in verl.
OWN_ARGUMENTS = {row["key"]: Rule.of(row) for row in _DATA["engine_argument"]}
GAPS = tuple(KeyGap(**row) for row in _DATA["gap"])

CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "layout": lambda value: "packing" if value else "padding",
    "autocast": lambda value: None if value == "fp32" else value,
    "top_k": lambda value: max(value, 0),  # verl's -1 is off
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
        raise MismatchError(
            f"{key} is {short(value)}, not {_EXPECTED.get(kind, f'a {kind}')}",
            f"correct it in the file, or: --verl-override {key}=VALUE",
        ) from error


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def _whole(value: Any, least: float = float("-inf")) -> int:
    number = _number(value)
    if number != int(number) or number < least:
        raise ValueError(value)
    return int(number)


def _instance(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(value)
        return value

    return read


READERS: dict[str, Callable[[Any], Any]] = {
    "number": _number,
    "whole number": _whole,
    "count": lambda value: _whole(value, least=1),
    "switch": lambda value: {"true": True, "false": False}[str(value).lower()],
    "text": _instance(str),
    "files": lambda value: [
        _instance(str)(item) for item in (value if isinstance(value, list) else [value])
    ],
    "mapping": _instance(dict),
    "dtype": lambda value: _DTYPES[str(value).lower()],
}


def short(value: Any) -> str:
    """Cut a value for a message."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
