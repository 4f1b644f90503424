"""A framework's configuration as YAML or JSON; other syntaxes are in syntaxes.py.

OmegaConf is needed where values are interpolations (``${data.n}``), as in a verl config that hydra
saved; what ``--resolve`` prints has none. They are resolved where a value is asked for, never
before: ``${now:…}`` and its like in keys that nobody reads do no harm. Hydra's ``defaults`` are not
composed; NeMo-RL's are, in other.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError, first_line, require_packages
from mismatch.run.provenance import variable
from mismatch.run.yaml_file import parsed, read_mapping

MISSING = "???"  # hydra's mandatory value that nobody has given
INSTALL = (
    "print it without interpolations (verl: --cfg job --resolve), or: "
    "pip install 'train-infer-mismatch[verl]'"
)


@dataclass(frozen=True)
class ConfigFile:
    """A file of this name, as plain data, interpolations still in place.

    Attributes:
        resolving: the same as OmegaConf's ``DictConfig``; None: it has no interpolations.
        left_open: keys of a script whose values are variables that it does not set, with these.
    """

    origin: str
    tree: dict[str, Any]
    resolving: Any = None
    left_open: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """Return the value at a dotted key as plain data; None where it is absent, null or ???.

        Raises:
            MismatchError: an interpolation that cannot be resolved.
        """
        if self.resolving is None:
            return _at(self.tree, key)
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            value = OmegaConf.select(self.resolving, key)
            whole = OmegaConf.is_config(value)
            return OmegaConf.to_container(value, resolve=True) if whole else value
        except OmegaConfBaseException as error:
            fault = f"{self.origin}: {key}: {first_line(error)}"
            fix = f"give the value of {key} in the file; verl: --framework-override {key}=VALUE"
            raise MismatchError(fault, fix) from error

    def model(self, key: str) -> str:
        """Return the model that the key names; MismatchError where it names none."""
        path = self.get(key)
        if not isinstance(path, str):
            fault = f"{self.origin}: {key} is {'not given' if path is None else path}"
            raise MismatchError(fault, f"name the model: --model MODEL, or {key} in the file")
        return str(Path(path).expanduser()) if path.startswith("~") else path

    def given(self) -> Iterator[str]:
        """Yield the dotted keys of all values but null, ???, "" and empty lists and mappings."""

        def walk(tree: Any, prefix: str) -> Iterator[str]:
            for name, value in tree.items():
                if isinstance(value, dict):
                    yield from walk(value, f"{prefix}{name}.")
                elif value not in (None, MISSING, "", []) and name != "_target_":  # hydra's class
                    yield f"{prefix}{name}"

        yield from walk(self.tree, "")


def read_config(flag: str, path: Path, overrides: Sequence[str] = ()) -> ConfigFile:
    """Read the file of a flag and apply ``key=value`` overrides.

    Raises:
        MismatchError: missing file, invalid YAML (with the line), not a mapping, a malformed
            override, or interpolations without OmegaConf.
    """
    where = f"{flag} {path}"
    tree = read_mapping(path, where)
    for text in overrides:
        try:
            _override(tree, text)
        except ValueError as error:
            fault = f"--framework-override {text!r} is not key=value: {first_line(error)}"
            fix = "--framework-override actor_rollout_ref.rollout.temperature=0.7"
            raise MismatchError(fault, fix) from error
    return resolving(ConfigFile(str(path), tree), where)


def resolving(source: ConfigFile, where: str) -> ConfigFile:
    """Return the same file with its interpolations; MismatchError without OmegaConf."""
    if not _interpolates(source.tree):
        return source
    require_packages("omegaconf", fix=INSTALL)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_new_resolver("oc.env", variable, replace=True)
    try:
        return replace(source, resolving=OmegaConf.create(source.tree))
    except OmegaConfBaseException as error:
        raise MismatchError(f"{where}: {first_line(error)}", "correct it in the file") from error


def _at(tree: Any, key: str) -> Any:
    """Return the value at a dotted key of plain data; None where it is absent, null or ???."""
    for name in key.split("."):
        if isinstance(tree, list) and name.isdigit() and int(name) < len(tree):
            tree = tree[int(name)]
        else:
            tree = tree.get(name) if isinstance(tree, dict) else None
    return None if tree == MISSING else tree


def _override(tree: dict[str, Any], override: str) -> None:
    """Set a value by ``key=value``; a mapping is merged into one that is there.

    Raises:
        ValueError: no key, no value, or a value that is no YAML.
    """
    from yaml import YAMLError

    key, equals, text = override.lstrip("+").partition("=")
    if not equals or not key or override.startswith("~"):
        raise ValueError("no key, or no value")
    try:
        value = parsed(text)
    except YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    put(tree, key, value)


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a dotted key; a mapping is merged into one that is there."""
    *sections, name = key.split(".")
    for section in sections:
        inside = tree.get(section)
        tree[section] = tree = inside if isinstance(inside, dict) else {}
    old = tree.get(name)
    both = isinstance(old, dict) and isinstance(value, dict)
    tree[name] = old | value if both else value


def _interpolates(value: Any) -> bool:
    """Return whether a text inside has an interpolation."""
    if isinstance(value, dict):
        return any(map(_interpolates, value.values()))
    if isinstance(value, list):
        return any(map(_interpolates, value))
    return isinstance(value, str) and "${" in value
