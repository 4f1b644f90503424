"""Commands from groups of flags: one signature, one `Flags` object."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

Verb = Callable[["Flags"], int]


class Flags(dict[str, Any]):
    """Values of all flags of a verb, by name.

    Attributes:
        given: the names that the user set, on the command line or in a ``--config`` file.
    """

    given: frozenset[str] = frozenset()

    def pick(self, names: str) -> dict[str, Any]:
        """Some of them, e.g. as arguments of a spec."""
        return {name: self[name] for name in names.split()}


def with_flags(*groups: type) -> Callable[[Verb], Callable[..., int]]:
    """Turn ``verb(flags) -> exit code`` into a command that typer understands."""

    def decorate(verb: Verb) -> Callable[..., int]:
        def command(ctx: typer.Context, **values: Any) -> int:
            flags = Flags(values)
            flags.given = frozenset(name for name in values if _given(ctx, name))
            if flags.get("print_config"):
                from mismatch.cli.config import to_toml
                from mismatch.engines.servers.address import redacted

                shown = dict(flags)
                if flags.get("server"):  # a password typed into an address stays off the screen
                    shown["server"] = [redacted(one) for one in flags["server"]]
                typer.echo(to_toml(groups, shown), nl=False)
                return 0
            return verb(flags)

        parameters = [_parameter("ctx", typer.Context)]
        for group in groups:
            for name, hint in get_type_hints(group, include_extras=True).items():
                if name == "config":
                    hint = _reading(hint, groups)
                parameters.append(
                    _parameter(name, hint, getattr(group, name, inspect.Parameter.empty))
                )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        command.__name__, command.__doc__ = verb.__name__, verb.__doc__
        return command

    return decorate


def _parameter(name: str, hint: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=hint)


def _given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP", "ENVIRONMENT")


def _reading(hint: Any, groups: tuple[type, ...]) -> Any:
    """``--config`` is read before all other flags and becomes their defaults."""
    kind, option = hint.__origin__, hint.__metadata__[0]

    def read(ctx: typer.Context, value: Any) -> Any:
        if value is not None:
            from mismatch.cli.config import read_config

            ctx.default_map = {**(ctx.default_map or {}), **read_config(value, groups)}
        return value

    eager = typer.Option(
        help=option.help, rich_help_panel=option.rich_help_panel, is_eager=True, callback=read
    )
    return Annotated[kind, eager]
