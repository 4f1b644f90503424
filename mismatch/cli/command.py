"""A function of its flags as a command of typer: its parameters and ``--config``.

In a ``--config`` file keys are the flags' names with dashes or underscores. A file may serve
several commands: keys of flags that another command has are passed over.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import typer

from mismatch.cli.flags import JSON, NO_VARIABLE, Flags, Option, flag_of
from mismatch.errors import MismatchError, did_you_mean
from mismatch.run.files import read_regular

Verb = Callable[[Flags], int]
PROJECT = "pyproject.toml"
EXPLICIT = ("COMMANDLINE", "DEFAULT_MAP", "ENVIRONMENT")  # where click read a value


def with_flags(*groups: Option | tuple[Option, ...]) -> Callable[[Verb], Callable[..., int]]:
    """Turn ``verb(flags) -> exit code`` into a command that typer understands."""
    options: list[Option] = []
    for group in groups:
        options += (group,) if isinstance(group, Option) else group

    def decorate(verb: Verb) -> Callable[..., int]:
        def command(ctx: typer.Context, **values: Any) -> int:
            flags = Flags(values)
            sources = {name: ctx.get_parameter_source(name) for name in values}
            flags.explicit = frozenset(n for n, at in sources.items() if at and at.name in EXPLICIT)
            if flags.get("log_to"):  # a tracker's client is missed before anything is run
                from mismatch.reports.sinks import require_clients

                require_clients(flags["log_to"])
            if flags.get("require"):
                from mismatch.cli.output import require_known

                require_known(flags["require"])
            quiet = flags.get("quiet")
            if JSON in options or (not quiet and flags.get("format", "text") == "text"):
                return verb(flags)
            flags.output = sys.stdout  # for the report alone
            with (
                open(os.devnull, "w") as nothing,
                redirect_stdout(nothing if quiet else sys.stderr),
            ):
                return verb(flags)

        def take_config(ctx: typer.Context, value: Path | None) -> Path | None:
            values = project_config(options) if value is None else read_config(value, options)
            if values and value is None:
                typer.echo(f"{PROJECT} sets {', '.join(map(flag_of, values))}", err=True)
            ctx.default_map = {**(ctx.default_map or {}), **values}
            return value

        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("ctx", kind, annotation=typer.Context)]
        for option in options:
            parameters.append(option.parameter(take_config if option.name == "config" else None))
        # typer reads a command's parameters from its signature.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__name__, command.__doc__ = verb.__name__, verb.__doc__
        command.options = tuple(options)  # type: ignore[attr-defined]
        return command

    return decorate


def read_config(path: Path, options: Iterable[Option]) -> dict[str, Any]:
    """Return the flags that a file sets, for the command that has ``options``.

    Raises:
        MismatchError: no readable TOML, a key that no command knows (with the nearest flag), or a
            value of the wrong type (with the key).
    """
    fixes = "give a readable TOML file: --config FILE", 'a line looks like: attention = "eager"'
    return _values(_toml(path, f"config file {path}", fixes), f"config file {path}", options)


def project_config(options: Iterable[Option]) -> dict[str, Any]:
    """Return the flags that ``[tool.mismatch]`` of the working directory's pyproject.toml sets.

    Raises:
        MismatchError: as :func:`read_config`.
    """
    path = Path(PROJECT)
    if not path.exists():
        return {}
    source, fix = f"{path}, [tool.mismatch]", "correct it, or start in another directory"
    data = _toml(path, PROJECT, (fix, fix))
    for name in ("tool", "mismatch"):
        data = data.get(name, {})
        if not isinstance(data, dict):
            raise MismatchError(f"{source}: {name} is no table", fix)
    values = _values(data, source, options)
    if refused := NO_VARIABLE & values.keys():
        fault = f"{path} sets {flag_of(min(refused))}, which trusts what others wrote"
        raise MismatchError(fault, "type it with the command")
    return values


def _toml(path: Path, source: str, fixes: tuple[str, str]) -> dict[str, Any]:
    """Read a file; ``fixes``: of one that cannot be read, and of one that is no TOML."""
    import tomllib

    try:
        return tomllib.loads(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise MismatchError(f"{source}: {error.strerror}", fixes[0]) from error
    except (ValueError, RecursionError) as error:
        raise MismatchError(f"{source} is not TOML: {error}", fixes[1]) from error


def _values(data: dict[str, Any], source: str, options: Iterable[Option]) -> dict[str, Any]:
    """Return the flags among ``options`` that a table sets; ``source`` is named in errors."""
    from mismatch.cli.options import CHECK  # imports what every flag of a check needs

    own = {o.name: o for o in options if not o.argument and o.name != "config"}
    known = {option.name: option for option in CHECK} | own
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in known:
            guess = did_you_mean(name, known, most=1)
            fault = f"{source}: unknown key {key!r}"
            raise MismatchError(fault, f"{guess}mismatch check --help-all lists all of them")
        if name in values:
            fault = f"{source}: {name} is there twice, with - and with _"
            raise MismatchError(fault, "drop one of them")
        option, where = known[name], f"{source}, key {key!r}:"
        # Most files name one engine: a string is a list of one.
        items = value if option.is_list and isinstance(value, list) else [value]
        read = [option.convert(item, where) for item in items]
        values[name] = read if option.is_list else read[0]
    return {name: value for name, value in values.items() if name in own}
