"""A hydra config file, read by OmegaConf; its ``defaults`` are composed by hydra itself.

Interpolations are resolved where a value is asked for, never before: ``${now:…}`` and its like in
keys that nobody reads do no harm. Values become typed, and have places in a check that they go to.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError

MISSING = "???"  # hydra's mandatory value that nobody has given
MOST_VALUES = 100_000  # of a file, aliases written out
INSTALL = "pip install 'train-infer-mismatch[verl]'"


@dataclass(frozen=True)
class ConfigFile:
    """A composed config.

    Attributes:
        origin: the file, for messages.
        tree: an OmegaConf ``DictConfig``, interpolations still in place.
        missing_defaults: entries of ``defaults`` whose files are not there.
    """

    origin: str
    tree: Any
    missing_defaults: tuple[str, ...] = ()

    def get(self, key: str) -> Any:
        """The value at a dotted key as plain Python data; None where it is absent, null or ???.

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
                f"{self.origin}: {key}: {_first_line(error)}",
                f"give the value: --verl-override {key}=VALUE; or give the config that verl itself "
                "prints when it starts",
            ) from error

    def leaves(self) -> Iterator[str]:
        """Dotted keys of everything that is not a dictionary."""
        from omegaconf import OmegaConf

        yield from _leaves(OmegaConf.to_container(self.tree, resolve=False), "")


def read_config(path: Path, overrides: Sequence[str] = ()) -> ConfigFile:
    """Compose a config from a file, its ``defaults`` and overrides in hydra's syntax.

    Raises:
        MismatchError: OmegaConf or hydra is not installed, missing file, invalid YAML (with the
            line), not a mapping, ``defaults`` that hydra refuses, or a malformed override.
    """
    try:
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        raise MismatchError(f"--verl-config needs hydra-core: {error}", INSTALL) from error
    tree = _load(path)
    parser, groups, values = OverridesParser.create(), _groups(tree, path), []
    chosen: list[str] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise _bad_override(text, _first_line(error)) from error
        if override.is_sweep_override():
            raise _bad_override(text, "one value is needed, not a sweep")
        if override.key_or_group in groups:
            chosen.append(text)
        else:
            values.append((text, override))
    missing: tuple[str, ...] = ()
    if "defaults" in tree:
        tree, missing = _compose(tree, path, chosen)
    for text, override in values:
        try:
            if override.is_delete():
                _delete(tree, override.key_or_group)
            else:
                OmegaConf.update(tree, override.key_or_group, override.value())
        except OmegaConfBaseException as error:
            raise _bad_override(text, _first_line(error)) from error
    return ConfigFile(str(path), tree, missing)


def _load(path: Path) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    where, fix = f"verl config {path}", "give a hydra config: --verl-config FILE"
    try:
        _require_bounded(path)
        tree = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise MismatchError(f"{where}: not UTF-8", "save the file as UTF-8") from error
    except OSError as error:  # OmegaConf's own, without strerror, where the file holds a scalar
        raise MismatchError(f"{where}: {error.strerror or error}", fix) from error
    except (YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or _first_line(error)
        raise MismatchError(f"{line}: not YAML: {reason}", "correct that line") from error
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise MismatchError(f"{where}: {key}: {_first_line(error)}", "correct it") from error
    if not OmegaConf.is_dict(tree):
        raise MismatchError(f"{where} holds a list, not keys", fix)
    return tree


def _require_bounded(path: Path) -> None:
    """Refuse aliases that stand for more values than any config has: OmegaConf copies each."""
    import yaml

    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 1  # also of a node that holds itself
            children = node.value if isinstance(node.value, list) else []
            pairs = (child if isinstance(child, tuple) else (child,) for child in children)
            sizes[id(node)] += sum(size(part) for pair in pairs for part in pair)
        return sizes[id(node)]

    with path.open(encoding="utf-8") as file:
        root = yaml.compose(file, Loader=yaml.SafeLoader)
    if root is not None and size(root) > MOST_VALUES:
        raise MismatchError(
            f"{path}: its aliases stand for over {MOST_VALUES:,} values",
            "write the values that are meant in their places",
        )


def _groups(tree: Any, path: Path) -> set[str]:
    """Names that an override chooses a file for, such as ``model_engine=megatron``."""
    entries = [entry for entry in tree.get("defaults") or [] if hasattr(entry, "keys")]
    return {str(key) for entry in entries for key in entry} | {
        folder.name for folder in path.absolute().parent.iterdir() if folder.is_dir()
    }


def _compose(tree: Any, path: Path, chosen: list[str]) -> tuple[Any, tuple[str, ...]]:
    """The file with its ``defaults``; those that are nowhere are left empty, and named.

    Hydra takes no file as optional that its author did not mark so. It therefore composes a copy
    of the file in a temporary folder that also gets an empty file for each one it misses.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    missing: list[str] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a search path that is not here shows in `missing`
        Path(folder, "empty").mkdir()
        own = OmegaConf.select(tree, "hydra.searchpath") or []
        search = [f"file://{path.absolute().parent}", *own, f"file://{folder}/empty"]
        tree = OmegaConf.merge(tree, {"hydra": {"searchpath": search}})
        OmegaConf.save(tree, Path(folder, "verl.yaml"))
        while True:
            try:
                with initialize_config_dir(folder, version_base=None):
                    tree = compose("verl", overrides=chosen)
                break
            except MissingConfigException as error:
                name = error.missing_cfg_file
                if name is None or name in missing:
                    raise _not_composed(path, error) from error
                missing.append(name)
                file = Path(folder, "empty", f"{name.removeprefix('/')}.yaml")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("{}\n", encoding="utf-8")
            except RecursionError as error:
                raise MismatchError(
                    f"{path}: its defaults lead back to themselves", "break the circle"
                ) from error
            except (HydraException, OmegaConfBaseException) as error:
                raise _not_composed(path, error) from error
    OmegaConf.set_struct(tree, False)
    return tree, tuple(missing)


def _delete(tree: Any, key: str) -> None:
    from omegaconf import OmegaConf

    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(tree, parent) if parent else tree
    if OmegaConf.is_dict(node):
        node.pop(name, None)


def _leaves(tree: Any, prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _bad_override(text: str, reason: str) -> MismatchError:
    return MismatchError(
        f"--verl-override {text!r} is not key=value: {reason}",
        "--verl-override actor_rollout_ref.rollout.temperature=0.7",
    )


def _not_composed(path: Path, error: Exception) -> MismatchError:
    return MismatchError(
        f"{path}: hydra cannot compose its defaults: {_first_line(error)}",
        "correct them, or give the config that verl itself prints when it starts",
    )


_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "16", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "32", "torch.float32"), "fp32"),
}
_EXPECTED = {"count": "a positive whole number", "dtype": "bf16, fp16 or fp32"}
_PLACES: dict[str, tuple[str, ...]] = {
    "engine": ("rollout", "engine"),
    "sampling": ("rollout", "sampling"),
    "prompts": ("rollout", "prompts"),
    "train": ("train",),
}


def typed(kind: str, value: Any, key: str) -> Any:
    """The value as ``kind``, a key of ``_READERS``.

    Raises:
        MismatchError: it is none, with the key.
    """
    try:
        return _READERS[kind](value)
    except (TypeError, ValueError, KeyError) as error:
        raise MismatchError(
            f"{key} is {short(value)}, not {_EXPECTED.get(kind, f'a {kind}')}",
            f"correct it in the file, or: --verl-override {key}=VALUE",
        ) from error


def _instance(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(value)
        return value

    return read


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def _whole(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(value)
    return int(number)


def _count(value: Any) -> int:
    number = _whole(value)
    if number < 1:
        raise ValueError(value)
    return number


_READERS: dict[str, Callable[[Any], Any]] = {
    "number": _number,
    "whole number": _whole,
    "count": _count,
    "switch": lambda value: {"true": True, "false": False}[str(value).lower()],
    "text": _instance(str),
    "files": lambda value: [
        _instance(str)(item) for item in (value if isinstance(value, list) else [value])
    ],
    "mapping": _instance(dict),
    "dtype": lambda value: _DTYPES[str(value).lower()],
}


def at(spec: Any, target: str) -> Any:
    """The value at ``engine.dtype``, ``train.dtype`` … of a check."""
    for name in _path(target):
        spec = getattr(spec, name)
    return spec


def put(spec: Any, target: str, value: Any) -> Any:
    """The check with another value there."""

    def inside(node: Any, path: tuple[str, ...]) -> Any:
        inner = value if len(path) == 1 else inside(getattr(node, path[0]), path[1:])
        return replace(node, **{path[0]: inner})

    return inside(spec, _path(target))


def _path(target: str) -> tuple[str, ...]:
    group, _, name = target.partition(".")
    return (*_PLACES[group], name)


def short(value: Any) -> str:
    """A value for a message."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
