"""A complete hydra config as YAML, read by OmegaConf.

Interpolations are resolved where a value is asked for, never before: ``${now:…}`` and its like in
keys that nobody reads do no harm. Hydra's ``defaults`` are not composed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError, first_line

MISSING = "???"  # hydra's mandatory value that nobody has given
INSTALL = "pip install 'train-infer-mismatch[verl]'"
COMPLETE = (
    "give the config that hydra saved when the run started, outputs/DATE/TIME/.hydra/config.yaml; "
    "or print it: python -m verl.trainer.main_ppo YOUR_OVERRIDES --cfg job --resolve > config.yaml"
)


@dataclass(frozen=True)
class ConfigFile:
    """A config.

    Attributes:
        origin: the file, for messages.
        tree: an OmegaConf ``DictConfig``, interpolations still in place.
    """

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
            return (
                OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            )
        except OmegaConfBaseException as error:
            raise MismatchError(
                f"{self.origin}: {key}: {first_line(error)}",
                f"give the value: --verl-override {key}=VALUE; or {COMPLETE}",
            ) from error

    def given(self) -> Iterator[str]:
        """Yield the dotted keys of all values but null, ???, "" and empty lists and mappings."""
        from omegaconf import OmegaConf

        def walk(tree: Any, prefix: str) -> Iterator[str]:
            for name, value in tree.items():
                if isinstance(value, dict):
                    yield from walk(value, f"{prefix}{name}.")
                elif value not in (None, MISSING, "", []):
                    yield f"{prefix}{name}"

        yield from walk(OmegaConf.to_container(self.tree, resolve=False), "")


def read_config(path: Path, overrides: Sequence[str] = ()) -> ConfigFile:
    """Read a complete config and apply ``key=value`` overrides.

    Raises:
        MismatchError: OmegaConf is not installed, missing file, invalid YAML (with the line), not
            a mapping, a config that is not composed, or a malformed override.
    """
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        raise MismatchError(f"--verl-config needs OmegaConf: {error}", INSTALL) from error
    from yaml import YAMLError

    where = f"verl config {path}"
    try:
        tree = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise MismatchError(f"{where}: not UTF-8", "save the file as UTF-8") from error
    except OSError as error:  # OmegaConf's own, without strerror, where the file holds a scalar
        fix = "give a verl config: --verl-config FILE"
        raise MismatchError(f"{where}: {error.strerror or error}", fix) from error
    except (YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or first_line(error)
        raise MismatchError(f"{line}: not YAML: {reason}", "correct that line") from error
    except OmegaConfBaseException as error:
        raise MismatchError(f"{where}: {first_line(error)}", "correct it") from error
    if not OmegaConf.is_dict(tree):
        raise MismatchError(f"{where} holds a list, not keys", COMPLETE)
    if "defaults" in tree:
        raise MismatchError(f"{where} is not complete: its defaults are other files", COMPLETE)
    for text in overrides:
        key, equals, _ = text.lstrip("+").partition("=")
        try:
            if not equals or not key or text.startswith("~"):
                raise ValueError("no key, or no value")
            tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([text.lstrip("+")]))
        except (OmegaConfBaseException, YAMLError, ValueError) as error:
            raise MismatchError(
                f"--verl-override {text!r} is not key=value: {first_line(error)}",
                "--verl-override actor_rollout_ref.rollout.temperature=0.7",
            ) from error
    return ConfigFile(str(path), tree)
