"""A user's own configuration, for both sides, of frameworks whose keys are but a table."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mismatch.engines.registry import engine_infos
from mismatch.errors import MismatchError
from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.config_file import ConfigFile, put, resolving
from mismatch.features.presets.rules import table
from mismatch.features.presets.syntaxes import owner, read_any
from mismatch.specs import CheckSpec

FLAG = "--framework-config"
OTHERS = ("skyrl", "nemo-rl", "prime-rl", "slime", "openrlhf")


def read_framework_config(named: str) -> tuple[str, Path, ConfigFile | None]:
    """Read ``[NAME:]FILE``; return the framework, the file, and what it holds.

    Returns:
        the last is None for verl and TRL, which read the file themselves.

    Raises:
        MismatchError: a file that cannot be read, is empty, or is of another framework or of none.
    """
    name, colon, rest = named.partition(":")
    if not colon or name not in ("verl", "trl", *OTHERS):
        name, rest = "", named
    path = Path(rest).expanduser()
    where = f"{FLAG} {named}"
    if name == "trl":
        return name, path, None
    source = read_any(path, where)
    whose = owner(source)
    found = table("others")[whose].get("name") if whose else None
    if whose and (found is None or (name and found != name)):
        fix = "name the settings yourself: --model, --dtype, --temperature …"
        fix = fix if found is None else f"leave the name out: {FLAG} {rest}"
        raise MismatchError(f"{where}: this is a configuration of {whose}, by its keys", fix)
    name = name or found or ""
    if not name or not (source.tree or source.left_open):
        what = "no framework is known by its keys" if source.tree else "it holds no keys"
        fix = f"name the framework, {FLAG} NAME:FILE: verl, trl, {', '.join(OTHERS)}"
        raise MismatchError(f"{where}: {what}", fix)
    if name == "verl":
        return name, path, None
    for key, value in table(f"{name}_keys").get("defaults", {}).items():
        if source.get(key) is None and key not in source.left_open:
            put(source.tree, key, value)
    return name, path, resolving(source, where)


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
