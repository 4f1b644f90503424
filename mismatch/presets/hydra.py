"""Reads a hydra config without hydra: YAML, ``defaults`` that lie beside it, ``${…}``, overrides.

Interpolations are resolved where a value is asked for, never before: ``${now:…}`` and its like in
keys that nobody reads do no harm. Absent and ``???`` (mandatory, not given) are the same here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.presets.compose import MAX_DEPTH, Composer, merge, nest, parse_scalar

MISSING = "???"
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")


class Absent:
    """The key is not there, which is not the same as null."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


@dataclass(frozen=True)
class HydraConfig:
    """A composed config.

    Attributes:
        origin: the file, for messages.
        tree: nested dictionaries, interpolations still in place.
        missing_defaults: entries of ``defaults`` whose files are not there.
    """

    origin: str
    tree: dict[str, Any]
    missing_defaults: tuple[str, ...] = field(default=())

    def get(self, key: str) -> Any:
        """The value at a dotted key, interpolations resolved; ABSENT if there is none.

        Raises:
            MismatchError: an interpolation that leads nowhere (named), in a circle, or that needs
                hydra itself.
        """
        return self._find(key, 0)

    def leaves(self) -> Iterator[str]:
        """Dotted keys of everything that is not a dictionary; empty dictionaries count."""
        yield from _leaves(self.tree, "")

    def _resolved(self, value: Any, key: str, depth: int) -> Any:
        if isinstance(value, dict):
            return {
                name: self._resolved(item, f"{key}.{name}", depth) for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._resolved(item, f"{key}.{i}", depth) for i, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        if value == MISSING:
            return ABSENT
        while match := _INNERMOST.search(value):
            if depth > MAX_DEPTH:
                raise MismatchError(
                    f"{self.origin}: {key}: ${{{match[1]}}} refers to itself",
                    f"give the value: --verl-override {key}=VALUE",
                )
            depth += 1
            found = self._interpolated(match[1], key, depth)
            if match.span() == (0, len(value)):
                return found
            value = f"{value[: match.start()]}{found}{value[match.end() :]}"
        return value

    def _interpolated(self, inside: str, key: str, depth: int) -> Any:
        """What ``${inside}`` within the value of ``key`` means."""
        resolver, colon, rest = inside.partition(":")
        if not colon:
            found = self._reference(inside.strip(), key, depth)
            if found is not ABSENT:
                return found
            raise self._unresolved(inside, key, "there is no such key")
        arguments = [part.strip() for part in rest.split(",", 1)]
        default = parse_scalar(arguments[1]) if len(arguments) > 1 else ABSENT
        if resolver == "oc.select":
            found = self._reference(arguments[0], key, depth)
            return (None if default is ABSENT else default) if found is ABSENT else found
        if resolver == "oc.env":
            if arguments[0] in os.environ:
                return os.environ[arguments[0]]
            if default is not ABSENT:
                return default
            raise self._unresolved(inside, key, "the environment variable is not set")
        raise self._unresolved(inside, key, f"only hydra knows the resolver {resolver}")

    def _reference(self, path: str, key: str, depth: int) -> Any:
        return self._find(_absolute(path, key), depth)

    def _find(self, key: str, depth: int) -> Any:
        value: Any = self.tree
        parts = key.split(".")
        for index, part in enumerate(parts):
            if isinstance(value, str):  # a whole branch may be an interpolation
                value = self._resolved(value, ".".join(parts[:index]), depth)
            value = _lookup(value, [part])
        return self._resolved(value, key, depth)

    def _unresolved(self, inside: str, key: str, why: str) -> MismatchError:
        return MismatchError(
            f"{self.origin}: {key}: cannot resolve ${{{inside}}}: {why}",
            f"give the value: --verl-override {key}=VALUE; or give the config that verl itself "
            "prints when it starts",
        )


def read_config(path: Path, overrides: Sequence[str] = ()) -> HydraConfig:
    """Compose a config from a file, its ``defaults`` and overrides (``key=value``).

    Raises:
        MismatchError: missing file, invalid YAML (with the line), not a mapping, or an override
            that is not ``key=value``.
    """
    plain = [text for text in overrides if not text.startswith("~")]
    choices = dict(_assignment(text) for text in plain if "." not in text.partition("=")[0])
    composer = Composer(choices, [], [path.parent])
    tree = composer.compose(path)
    for text in overrides:
        _override(tree, text)
    return HydraConfig(str(path), tree, tuple(composer.missing))


# ---------------------------------------------------------------- trees


def _override(tree: dict[str, Any], text: str) -> None:
    """``key=value``, ``+key=value``, ``++key=value`` or ``~key``, as on verl's command line."""
    if text.startswith("~"):
        parts = text[1:].partition("=")[0].split(".")
        parent = _lookup(tree, parts[:-1]) if len(parts) > 1 else tree
        if isinstance(parent, dict):
            parent.pop(parts[-1], None)
        return
    key, value = _assignment(text)
    merge(tree, nest(value, key))


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or not key.strip():
        raise MismatchError(
            f"--verl-override {text!r} is not key=value",
            "--verl-override actor_rollout_ref.rollout.temperature=0.7",
        )
    return key.strip(), parse_scalar(value)


def _lookup(tree: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return ABSENT
    return tree


def _absolute(path: str, key: str) -> str:
    """Relative references: one dot is the key's own dictionary, each further one a level up."""
    dots = len(path) - len(path.lstrip("."))
    if not dots:
        return path
    return ".".join([*key.split(".")[:-dots], path[dots:]])


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key
