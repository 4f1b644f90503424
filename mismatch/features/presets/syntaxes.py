"""Files of any framework: YAML, JSON, TOML, or a script with arguments; and whose file one is."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.features.presets.config_file import ConfigFile, put
from mismatch.features.presets.rules import table
from mismatch.run.files import LARGEST_YAML, read_regular
from mismatch.run.yaml_file import parsed, read_mapping

END = set("();&|\n")  # of a command, or of an array of words
OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)  # a.b=value, as hydra's
VARIABLE = re.compile(r"\$\{(\w+)(?::?([-=])([^}]*))?\}|\$(\w+)")


def read_any(path: Path, where: str) -> ConfigFile:
    """Return a file's keys and values; interpolations are left as they are.

    Raises:
        MismatchError: it cannot be read in any of the syntaxes, or a script ends within quotes.
    """
    try:
        return ConfigFile(str(path), read_mapping(path, where))
    except MismatchError as error:  # another syntax, or nothing that can be read
        fault = error
    try:
        text = read_regular(path, LARGEST_YAML).decode("utf-8")
        return ConfigFile(str(path), tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        if path.suffix == ".toml":
            raise MismatchError(f"{where}: {error}", "correct it in the file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise fault from error
    source = arguments(text, str(path), where)
    if not source.tree and not source.left_open:
        raise fault
    return source


def arguments(text: str, origin: str, where: str) -> ConfigFile:
    """Return the arguments of a script's commands: ``--name value``, and ``a.b=value`` as hydra's.

    Variables that the script sets are put in; nothing is run, and none is read of the environment.
    """
    text = re.sub(r"(?m)(^|(?<=\s))#.*$", "", text).replace("\\\n", " ")
    words = shlex.shlex(text, posix=True, punctuation_chars="".join(END))
    words.whitespace, words.commenters = " \t\r", ""
    words.whitespace_split = True
    variables: dict[str, str] = {}
    room = LARGEST_YAML  # a variable of variables doubles with every line

    def known(match: re.Match[str]) -> str:
        nonlocal room
        name = match[1] or match[4]
        if match[2] == "=":
            variables.setdefault(name, match[3])
        value = variables.get(name, match[0] if match[2] is None else match[3])
        room -= len(value)
        if room < 0:
            raise ValueError("its variables grow without bound")
        return value

    given: dict[str, list[str]] = {}
    name = ""
    try:
        for word in (VARIABLE.sub(known, word) for word in words):
            if word and set(word) <= END:
                name = ""
            elif override := OVERRIDE.fullmatch(word):
                given[override[1]], name = [override[2]], ""
            elif word.startswith("--") and word[2:3].isalpha():
                name, equals, value = word[2:].partition("=")
                given[name] = [value] if equals else []
            elif assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL):
                variables[assigned[1]], name = assigned[2], ""
            elif name and "[@]" not in word and word != "$@":  # an array was read already
                given[name].append(word)
    except ValueError as error:
        raise MismatchError(f"{where}: {error}", "correct it: is the file cut off?") from error
    left_open: dict[str, str] = {}
    source = ConfigFile(origin, {}, left_open=left_open)
    for name, values in given.items():
        if any("$" in value or "`" in value for value in values):
            left_open[name] = " ".join(values)
        elif len(values) > 1:
            put(source.tree, name, [_value(value) for value in values])
        else:
            put(source.tree, name, _value(values[0]) if values else True)
    return source


def _value(text: str) -> Any:
    from yaml import YAMLError

    try:
        return parsed(text)
    except (ValueError, YAMLError):
        return text


def owner(source: ConfigFile) -> str | None:
    """Return the framework whose configuration it is, as others.toml names it; None: of none."""
    names = {*source.tree, *source.given(), *source.left_open}
    names |= {key.partition(".")[0] for key in source.left_open}
    marks = ((name, about["marks"]) for name, about in table("others").items())
    return next((name for name, sets in marks if any(set(m.split()) <= names for m in sets)), None)
