"""A user's own configuration, for both sides, of frameworks whose keys are but a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch.engines.registry import engine_infos
from mismatch.errors import MismatchError
from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.config_file import MISSING, ConfigFile, put, resolving
from mismatch.features.presets.rules import table
from mismatch.features.presets.syntaxes import owner, read_any
from mismatch.features.presets.trl import read_trl_config
from mismatch.features.presets.verl import read_verl_config
from mismatch.run.yaml_file import read_mapping
from mismatch.specs import CheckSpec

FLAG = "--framework-config"
MOST_FILES = 64  # that one configuration inherits from; NeMo-RL's own recipes: at most 3
OWN_READERS = ("verl", "trl")
OTHERS = ("skyrl", "nemo-rl", "prime-rl", "slime", "openrlhf")


def read_framework_config(
    path: Path, name: str = "", overrides: Sequence[str] = ()
) -> tuple[str, ConfigFile]:
    """Read a framework's configuration; return whose it is, and what it holds.

    Args:
        name: of the framework; "": told by the file's keys.
        overrides: ``key=value`` over verl's.

    Raises:
        MismatchError: a file that cannot be read, is empty, or is of another framework or of none.
    """
    path = path.expanduser()
    where = f"{FLAG} {path}"
    source = whose = None
    try:
        source = read_any(path, where)
        source = replace(source, tree=composed(path, source.tree, where, [path.resolve()]))
        whose = owner(source)
    except MismatchError:
        if name not in OWN_READERS:  # which say themselves what is wrong
            raise
    found = table("others")[whose].get("name") if whose else None
    if whose and (found is None or (name and found != name)):
        fix = "name the settings yourself: --model, --dtype, --temperature …"
        fix = fix if found is None else f"--framework {found}"
        raise MismatchError(f"{where}: this is a configuration of {whose}, by its keys", fix)
    name = name or found or ""
    if name == "verl":
        return name, read_verl_config(path, overrides)
    if overrides:
        fault = "--framework-override is for verl's configuration"
        raise MismatchError(fault, f"change the value in {path}")
    if name == "trl":
        return name, read_trl_config(path)
    if source is None or not name or not (source.tree or source.left_open):
        what = "no framework is known by its keys" if source and source.tree else "it holds no keys"
        fix = f"name the framework: --framework {', '.join((*OWN_READERS, *OTHERS))}"
        raise MismatchError(f"{where}: {what}", fix)
    for key, value in table(f"{name}_keys").get("defaults", {}).items():
        if source.get(key) is None and key not in source.left_open:
            put(source.tree, key, value)
    return name, resolving(source, where)


def composed(path: Path, tree: dict[str, Any], where: str, read: list[Path]) -> dict[str, Any]:
    """Return a tree over those of the files that its ``defaults`` name, as NeMo-RL merges them.

    ``load_config_with_inheritance`` in ``nemo_rl/utils/config.py`` (017238e): names are relative to
    the file, a later file goes over an earlier one, and ``_override_`` in a section replaces it.
    Files that are not here stay in ``defaults``. Other frameworks' ``defaults`` are left alone.

    Args:
        read: files that were read so far; they become more.

    Raises:
        MismatchError: a file cannot be read, or there are too many, as where they name each other.
    """
    named = tree.get("defaults")
    names = [named] if isinstance(named, str) else named
    yaml = (".yaml", ".yml")
    if not isinstance(names, list) or not names:
        return tree
    if not all(isinstance(name, str) and name.endswith(yaml) for name in names):
        return tree
    whole, absent = dict[str, Any](), []
    for name in names:
        parent = path.parent / name
        if not parent.is_file():
            absent.append(name)
            continue
        read.append(parent)
        if len(read) > MOST_FILES:
            fault = f"{where}: defaults name more than {MOST_FILES} files, one after the other"
            raise MismatchError(fault, "do they name each other?")
        below = read_mapping(parent, f"{where}: {parent}")
        whole = merged(whole, composed(parent, below, where, read))
    own = {key: value for key, value in tree.items() if key != "defaults"}
    return merged(whole, own) | ({"defaults": absent} if absent else {})


def merged(base: dict[str, Any], over: dict[str, Any], top: bool = True) -> dict[str, Any]:
    """Return a tree with another over it: mappings are merged, all else is replaced but by ???."""
    both = dict(base)
    for key, value in over.items():
        old = both.get(key)
        if isinstance(value, dict):
            replaces = top and value.get("_override_", False)
            value = {k: v for k, v in value.items() if not replaces or k != "_override_"}
            old = old if isinstance(old, dict) and not replaces else {}
            both[key] = merged(old, value, False)
        elif value != MISSING or key not in both:
            both[key] = value
    return both


def model_of(name: str, source: ConfigFile) -> str:
    """Return the model that the file names; MismatchError where it names none."""
    keys = table(f"{name}_keys")["model"]
    return source.model(next((key for key in keys if source.get(key) is not None), keys[0]))


def follow_other(
    name: str, source: ConfigFile, spec: CheckSpec, explicit: Collection[str] = ()
) -> FollowedFile:
    """Return the check that a configuration describes; arguments as of :class:`Followed`.

    Raises:
        MismatchError: a value of the wrong type, with the key.
    """
    work = FollowedFile(spec, explicit, source=source, framework=name)
    keys = table(f"{name}_keys")
    work.seen.update(keys["model"])
    if "engine" in keys:
        engine, started = work.value(keys["engine"], "text"), engine_infos()
        if engine in started and started[engine].started:
            work.set(keys["engine"], engine, "engine.engine", engine)
        elif engine is not None and "engine" not in explicit:
            work.not_reproduced.append(f"{keys['engine']} = {engine}: mismatch has no such engine")
    for row in keys.get("fixed", ()):
        work.set("(always)", row["value"], row["to"], row["value"])
    work.rules()
    engine = work.spec.rollout.engine.engine
    own = work.known()
    for row in keys.get("extra", ()):
        at = row["at"]
        inside = source.get(at[:-1]) if at.endswith(".") else source.tree
        options = inside.items() if isinstance(inside, dict) else ()
        start = "" if at.endswith(".") else at
        given = {k.removeprefix(start): v for k, v in options if k.startswith(start)}
        given = {option: v for option, v in given.items() if f"{at}{option}" not in own}
        work.seen.update(f"{at}{option}" for option in given)
        if engine == row["engine"]:
            work.options(at, given)
        elif given:
            gap = f"{at}…: {', '.join(given)} are arguments of {row['engine']}, not of {engine}"
            work.not_reproduced.append(gap)
    work.finish()
    return work
