"""``--config FILE.toml`` and ``--print-config``: the flags of a command as a file.

Keys are the flags' names with dashes or underscores. A file may serve several commands: keys of
flags that another command has are passed over.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mismatch.cli.flags import Option
from mismatch.cli.options import CHECK
from mismatch.errors import MismatchError

NOT_IN_FILES = ("config", "print_config")


def read_config(path: Path, options: Iterable[Option]) -> dict[str, Any]:
    """The flags that a file sets, for the command that has ``options``.

    Raises:
        MismatchError: no readable TOML, a key that no command knows (with the nearest flag), or a
            value of the wrong type (with the key).
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MismatchError(
            f"config file {path}: {error.strerror}", "give a readable TOML file: --config FILE"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise MismatchError(
            f"config file {path} is not TOML: {error}",
            'a line looks like: attention = "eager"; --print-config writes a whole file',
        ) from error
    mine = _in_files(options)
    readable = _in_files(CHECK) | mine
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in readable:
            near = difflib.get_close_matches(name, readable, n=1, cutoff=0.5)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise MismatchError(
                f"config file {path}: unknown key {key!r}",
                f"{guess}mismatch check --print-config lists all of them",
            )
        if name in values:
            raise MismatchError(
                f"config file {path}: {name} stands twice, with - and with _", "drop one of them"
            )
        option, where = readable[name], f"config file {path}, key {key!r}:"
        if option.is_list:  # most files name one engine: a string is a list of one
            items = value if isinstance(value, list) else [value]
            values[name] = [option.convert(item, where) for item in items]
        else:
            values[name] = option.convert(value, where)
    return {name: value for name, value in values.items() if name in mine}


def to_toml(options: Iterable[Option], values: Mapping[str, Any]) -> str:
    """All flags of a command as a file; those that are not set as comments."""
    lines = ["# mismatch COMMAND --config FILE.toml"]
    for name in _in_files(options):
        value = values[name]
        if name == "server" and value:  # a password typed into an address stays off the screen
            from mismatch.engines.servers.address import redacted

            value = [redacted(address) for address in value]
        unset = value is None or value == []
        lines.append(f"# {name} is not set" if unset else f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _in_files(options: Iterable[Option]) -> dict[str, Option]:
    return {
        option.name: option
        for option in options
        if not option.argument and option.name not in NOT_IN_FILES
    }


def _toml(value: Any) -> str:
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
