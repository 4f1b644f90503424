"""A function of its flags as a command of typer: parameters, ``--config``, ``--print-config``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from mismatch.cli.flags import Flags, Option

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
Verb = Callable[[Flags], int]


def with_flags(*groups: Option | tuple[Option, ...]) -> Callable[[Verb], Callable[..., int]]:
    """Turn ``verb(flags) -> exit code`` into a command that typer understands."""
    options = tuple(_flat(groups))

    def decorate(verb: Verb) -> Callable[..., int]:
        def command(ctx: typer.Context, **values: Any) -> int:
            flags = Flags(values)
            flags.explicit = frozenset(name for name in values if _is_explicit(ctx, name))
            if flags.get("print_config"):
                from mismatch.cli.config import to_toml

                typer.echo(to_toml(options, flags), nl=False)
                return 0
            return verb(flags)

        def read_config(ctx: typer.Context, value: Path | None) -> Path | None:
            if value is not None:
                from mismatch.cli.config import read_config as read

                ctx.default_map = {**(ctx.default_map or {}), **read(value, options)}
            return value

        context = inspect.Parameter("ctx", KEYWORD_ONLY, annotation=typer.Context)
        parameters = [
            option.parameter(read_config if option.name == "config" else None) for option in options
        ]
        # typer reads a command's parameters from its signature.
        command.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
        command.__name__, command.__doc__ = verb.__name__, verb.__doc__
        command.options = options  # type: ignore[attr-defined]
        return command

    return decorate


def _flat(groups: Iterable[Option | tuple[Option, ...]]) -> Iterable[Option]:
    for group in groups:
        yield from (group,) if isinstance(group, Option) else group


def _is_explicit(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP", "ENVIRONMENT")
