"""``--config FILE.toml`` and ``--print-config``: the flags of a command as a file.

Keys are the flags' names with dashes or underscores. A file may serve several verbs: keys of flags
that another verb has are passed over.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from mismatch.cli.options import ALL_GROUPS
from mismatch.errors import MismatchError

NOT_IN_FILES = ("config", "print_config")


def read_config(path: Path, groups: Sequence[type]) -> dict[str, Any]:
    """The flags that a file sets, for the verb that has ``groups``.

    Raises:
        MismatchError: no readable TOML, a key that no verb knows (with the nearest flag), or a
            value of the wrong type (with the key).
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MismatchError(
            f"config file {path}: {error.strerror}", "give a readable TOML file: --config FILE"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MismatchError(
            f"config file {path} is not TOML: {error}",
            'a line looks like: attention = "eager"; --print-config writes a whole file',
        ) from error
    known, mine = _hints(ALL_GROUPS), _hints(groups)
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in known:
            _unknown(path, key, known)
        if name == "engine" and isinstance(value, str):
            value = [value]  # most files name one engine
        values[name] = _checked(known[name], value, f"config file {path}, key {key!r}")
    return {name: value for name, value in values.items() if name in mine}


def to_toml(groups: Sequence[type], values: Mapping[str, Any]) -> str:
    """All flags of a verb as a file; those that are not set as comments."""
    lines = ["# mismatch COMMAND --config FILE.toml"]
    for name in _hints(groups):
        if name not in values:
            continue
        value = values[name]
        unset = value is None or value == []
        lines.append(f"# {name} is not set" if unset else f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _hints(groups: Sequence[type]) -> dict[str, Any]:
    """Types of the flags, without what typer is told about them."""
    hints: dict[str, Any] = {}
    for group in groups:
        for name, hint in get_type_hints(group, include_extras=True).items():
            is_option = get_origin(hint) is Annotated and hasattr(group, name)
            if is_option and name not in NOT_IN_FILES:
                hints[name] = get_args(hint)[0]
    return hints


def _unknown(path: Path, key: str, known: Mapping[str, Any]) -> None:
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise MismatchError(
        f"config file {path}: unknown key {key!r}",
        f"{guess}mismatch check --print-config lists all of them",
    )


def _checked(hint: Any, value: Any, where: str) -> Any:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] or [hint]
    kind = kinds[0] if isinstance(hint, UnionType) or len(kinds) == 1 else hint
    if get_origin(kind) is list:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        wanted = "a list of strings"
    elif isinstance(kind, type) and issubclass(kind, Enum):
        names = [member.value for member in kind]
        if value in names:
            return value
        wanted = "one of " + ", ".join(names)
    elif kind is bool:
        if isinstance(value, bool):
            return value
        wanted = "true or false"
    elif kind in (int, float):
        if isinstance(value, int if kind is int else int | float) and not isinstance(value, bool):
            return value
        wanted = "a whole number" if kind is int else "a number"
    else:
        if isinstance(value, str):
            return value
        wanted = "a string"
    raise MismatchError(f"{where}: {value!r} is not {wanted}", f"write {wanted}")


def _toml(value: Any) -> str:
    if isinstance(value, Enum):
        return _toml(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    # A JSON string is a TOML string, but for one character.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
