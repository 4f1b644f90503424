"""A user's own configuration, for both sides, of frameworks whose keys are but a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from mismatch.engines.registry import engine_infos
from mismatch.errors import MismatchError
from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.config_file import ConfigFile, put, resolving
from mismatch.features.presets.rules import table
from mismatch.features.presets.syntaxes import owner, read_any
from mismatch.features.presets.trl import read_trl_config
from mismatch.features.presets.verl import read_verl_config
from mismatch.specs import CheckSpec

FLAG = "--framework-config"
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
