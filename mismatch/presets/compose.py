"""Puts a hydra config's files together: YAML, and the ``defaults`` that can be found."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError

MAX_DEPTH = 32
_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_PACKAGE = re.compile(r"\A(?:\s*#.*\n|\s*\n)*?\s*#\s*@package\s+(\S+)")


@dataclass(frozen=True)
class Composer:
    """Merges a file with the files that its ``defaults`` name, wherever those can be found.

    Attributes:
        choices: overrides of whole groups, such as ``model_engine=megatron``.
        missing: filled with the entries whose files are not there.
    """

    choices: dict[str, Any]
    missing: list[str]
    roots: list[Path]

    def compose(self, path: Path, depth: int = 0) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            raise MismatchError(f"{path}: its defaults lead back to itself", "break the circle")
        own = load_yaml(path)
        entries = own.pop("defaults", None) or []
        if not isinstance(entries, list):
            raise MismatchError(f"{path}: defaults is not a list", "write it as hydra wants it")
        if depth == 0:
            self.roots.extend(_search_path(own.pop("hydra", None)))
        groups = self._groups(entries)
        tree: dict[str, Any] = {}
        for entry in entries if "_self_" in entries else [*entries, "_self_"]:
            if entry == "_self_":
                merge(tree, own)
            elif (target := _target(entry, path, groups)) is not None:
                self._include(tree, path, *target, depth)
        return tree

    def _include(
        self, tree: dict[str, Any], path: Path, name: str, package: str, depth: int
    ) -> None:
        bases = [path.parent, *self.roots]
        files = [base / f"{name.removeprefix('/')}.yaml" for base in bases]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            self.missing.append(name)
            return
        header = _header(file)
        merge(tree, nest(self.compose(file, depth + 1), package if header is None else header))

    def _groups(self, entries: list[Any]) -> dict[str, str]:
        """What ``${model_engine}`` means in names: ``- model_engine: dp`` above says so."""
        chosen: dict[str, str] = {}
        for entry in entries:
            if isinstance(entry, dict):
                chosen |= {key: str(value) for key, value in entry.items() if "@" not in key}
        return chosen | {key: str(value) for key, value in self.choices.items()}


def _target(entry: Any, path: Path, groups: dict[str, str]) -> tuple[str, str] | None:
    """File name and package of one entry: ``name``, ``group: name`` or ``group@package: name``."""
    if isinstance(entry, str):
        return entry, ""
    if not isinstance(entry, dict) or len(entry) != 1:
        raise MismatchError(f"{path}: defaults: cannot read {entry!r}", "write `group: name`")
    target, name = next(iter(entry.items()))
    for word in ("optional ", "override "):
        target = target.removeprefix(word)
    name = groups.get(target, name)
    if name is None or target.startswith("hydra/"):
        return None
    for key, value in groups.items():
        name = str(name).replace(f"${{{key}}}", value)
    group, _, package = target.partition("@")
    plain = group.strip("/").replace("../", "").replace("/", ".")
    return f"{group}/{name}", "" if package in ("_global_", "_here_") else package or plain


def _search_path(hydra: Any) -> list[Path]:
    """Directories of ``hydra.searchpath``: ``file://verl/trainer/config``, from where we stand."""
    entries = hydra.get("searchpath") if isinstance(hydra, dict) else None
    texts = [entry for entry in entries or [] if isinstance(entry, str)]
    return [Path(text.removeprefix("file://")) for text in texts if text.startswith("file://")]


def _header(file: Path) -> str | None:
    """The package that a file's first comment names; None where it names none."""
    found = _PACKAGE.match(file.read_text(encoding="utf-8", errors="replace"))
    if found is None or found[1] == "_group_":
        return None
    return "" if found[1] == "_global_" else found[1]


def load_yaml(path: Path) -> dict[str, Any]:
    """Keys of a YAML file.

    Raises:
        MismatchError: missing, not UTF-8, not YAML (with the line), or not a mapping.
    """
    import yaml

    try:
        value = yaml.load(path.read_text(encoding="utf-8"), _loader())
    except OSError as error:
        raise MismatchError(
            f"verl config {path}: {error.strerror}", "give a readable YAML file: --verl-config FILE"
        ) from error
    except UnicodeDecodeError as error:
        raise MismatchError(f"verl config {path}: not UTF-8", "save the file as UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise MismatchError(f"{where}: not YAML: {reason}", "correct that line") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise MismatchError(f"verl config {path} holds a {kind}, not keys", "give a hydra config")
    return value


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader that takes ``1e-6`` for a number, as hydra does."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return Loader


def parse_scalar(text: str) -> Any:
    """A value as YAML reads it, or the text itself."""
    import yaml

    try:
        return yaml.load(text, _loader())
    except yaml.YAMLError:
        return text


def merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = value


def nest(value: Any, package: str) -> Any:
    for part in reversed(package.split(".") if package else []):
        value = {part: value}
    return value
