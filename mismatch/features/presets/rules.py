"""Which keys of a framework's configuration a check follows, read from one TOML file each."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from mismatch.errors import MismatchError


@dataclass(frozen=True, slots=True)
class Rule:
    """A key that is followed."""

    key: str
    kind: str
    """Type of its value, a key of ``READERS``."""
    to: tuple[str, ...] = ()
    """Places in the spec, ``train.dtype``; ``:NAME`` follows where the flag has another name."""
    argument: str = ""
    """Instead of places: the argument of vLLM that it becomes."""
    env: str = ""
    """Instead of places: the variable of the engine's environment that it sets to 1."""
    skip: Any = None
    """A value that asks for nothing."""
    convert: str = ""
    """A key of ``CONVERSIONS``; "": the value as it is."""


@dataclass(frozen=True, slots=True)
class KeyGap:
    """A key that matters and cannot be followed."""

    key: str
    what: str
    above: int | None = None
    """It matters above this number."""
    usual: tuple[Any, ...] = ()
    """Values at which it does not matter; with neither, it matters where it is switched on."""

    def matters(self, value: Any) -> bool:
        if self.above is not None:
            return isinstance(value, int) and value > self.above
        if self.usual:
            return value is not None and value not in self.usual
        return bool(value) and str(value).lower() not in ("false", "none", "disabled")


@dataclass(frozen=True, slots=True)
class Keys:
    """What is known of a framework's keys."""

    rules: tuple[Rule, ...]
    gaps: tuple[KeyGap, ...]
    no_effect: tuple[str, ...]
    """Keys that change no log-probability, and their sections."""
    near: tuple[str, ...]
    """Beginnings of the keys that are named where they are not followed."""
    always: tuple[str, ...] = ()
    """What the framework does whatever its configuration says, and this tool does not."""
    required: tuple[str, ...] = ()
    """Keys that every complete configuration has."""
    own_arguments: tuple[Rule, ...] = ()
    """Arguments of vLLM that have a separate flag here."""
    defaults: tuple[tuple[str, Any], ...] = ()
    """What the framework sends where its configuration does not name a key."""


def read_keys(name: str) -> Keys:
    """Return ``NAME_keys.toml`` next to this file."""
    text = files("mismatch.features.presets").joinpath(f"{name}_keys.toml").read_text("utf-8")
    data = tomllib.loads(text)

    def rules(section: str) -> tuple[Rule, ...]:
        rows = data.get(section, ())
        return tuple(Rule(**row | {"to": tuple(row.get("to", ()))}) for row in rows)

    return Keys(
        rules=rules("follow"),
        gaps=tuple(KeyGap(**row) for row in data["gap"]),
        no_effect=tuple(
            f"{section}.{name}".lstrip(".")
            for section, names in data["no_effect"].items()
            for name in names
        ),
        near=tuple(data["near"]),
        always=tuple(data.get("always", ())),
        required=tuple(data.get("required", ())),
        own_arguments=rules("engine_argument"),
        defaults=tuple(data.get("defaults", {}).items()),
    )


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "layout": lambda value: "packing" if value else "padding",
    "autocast": lambda value: None if value == "fp32" else value,
    "top_k": lambda value: max(value, 0),  # -1 is off
    "fp32 head": lambda value: "fp32" if value else None,
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
        fault = f"{key} is {short(value)}, not {_EXPECTED.get(kind, f'a {kind}')}"
        fix = f"correct it in the file; verl: --verl-override {key}=VALUE"
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
    "mapping": _instance(dict),
    "files": lambda value: [
        _instance(str)(item) for item in (value if isinstance(value, list) else [value])
    ],
    "dtype": lambda value: _DTYPES[str(value).lower()],
}


def short(value: Any) -> str:
    """Cut a value for a message."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
