"""A framework's configuration as YAML or JSON, read by OmegaConf.

Interpolations are resolved where a value is asked for, never before: ``${now:…}`` and its like in
keys that nobody reads do no harm. Hydra's ``defaults`` are not composed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError, first_line, require_packages

MISSING = "???"  # hydra's mandatory value that nobody has given
INSTALL = "pip install 'train-infer-mismatch[verl]'"


@dataclass(frozen=True)
class ConfigFile:
    """A file of this name, and its OmegaConf ``DictConfig``, interpolations still in place."""

    origin: str
    tree: Any

    def get(self, key: str) -> Any:
        """Return the value at a dotted key as plain data; None where it is absent, null or ???.

        Raises:
            MismatchError: an interpolation that cannot be resolved.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            value = OmegaConf.select(self.tree, key)
            whole = OmegaConf.is_config(value)
            return OmegaConf.to_container(value, resolve=True) if whole else value
        except OmegaConfBaseException as error:
            fault = f"{self.origin}: {key}: {first_line(error)}"
            fix = f"give the value of {key} in the file, or as --verl-override {key}=VALUE"
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
        from omegaconf import OmegaConf

        def walk(tree: Any, prefix: str) -> Iterator[str]:
            for name, value in tree.items():
                if isinstance(value, dict):
                    yield from walk(value, f"{prefix}{name}.")
                elif value not in (None, MISSING, "", []) and name != "_target_":  # hydra's class
                    yield f"{prefix}{name}"

        yield from walk(OmegaConf.to_container(self.tree, resolve=False), "")


def read_config(flag: str, path: Path, overrides: Sequence[str] = ()) -> ConfigFile:
    """Read the file of a flag and apply ``key=value`` overrides.

    Raises:
        MismatchError: OmegaConf is not installed, missing file, invalid YAML (with the line), not
            a mapping, or a malformed override.
    """
    require_packages("omegaconf", fix=INSTALL)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    where = f"{flag} {path}"
    try:
        tree = OmegaConf.load(path)
    except (OSError, ValueError, YAMLError, RecursionError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())  # a YAML error says the line
        raise MismatchError(f"{where}: {reason}", f"{flag} FILE, a YAML mapping") from error
    if not OmegaConf.is_dict(tree):
        raise MismatchError(f"{where} holds a list, not keys", "write key: value")
    for text in overrides:
        key, equals, _ = text.lstrip("+").partition("=")
        try:
            if not equals or not key or text.startswith("~"):
                raise ValueError("no key, or no value")
            tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([text.lstrip("+")]))
        except (OmegaConfBaseException, YAMLError, ValueError) as error:
            fault = f"--verl-override {text!r} is not key=value: {first_line(error)}"
            fix = "--verl-override actor_rollout_ref.rollout.temperature=0.7"
            raise MismatchError(fault, fix) from error
    return ConfigFile(str(path), tree)
