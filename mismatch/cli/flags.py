"""Flags of commands: one table for the command line and ``--config`` files.

Flags of specs are read from the annotations of their fields (mismatch/specs.py); others are listed
here (of any report) and in mismatch/cli/options.py. All become parameters of typer here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TextIO, get_args, get_origin, get_type_hints

import typer

from mismatch.errors import MismatchError, did_you_mean
from mismatch.frameworks import FRAMEWORKS
from mismatch.specs import DTYPES, OUTPUT, Dtype, Flag, MasterDtype, Range

AUTO = "auto"  # a dtype: that of the checkpoint, mismatch/cli/to_spec.py
DTYPE_NAMES = {  # as vLLM spells them
    **{name: name for name in (*DTYPES, AUTO)},
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}
NAMES_OF_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
# What the help shows for a value, by flag or by type.
METAVARS: dict[Any, str] = {
    **dict.fromkeys(("engine_arg", "framework_override", "inject"), "KEY=VALUE"),
    **dict.fromkeys(
        ("prompts", "resume", "scorer_config", "framework_config", "accelerate_config"), "PATH"
    ),
    **dict.fromkeys(("adapter", "train_adapter"), "PATH"),
    "dump_format": "NAME",
    "server": "URL",
    "python": "PATH",
    "weights": "SIDE=FORM",
    int: "N",
    float: "X",
    str: "NAME",
    Path: "PATH",
}
SHORT = {"out": "-o", "quiet": "-q"}
# Defaults of flags, for a shell or a container; who sets it for others must not grant their trust.
VARIABLE, NO_VARIABLE = "MISMATCH_", frozenset(("trust_run",))
REQUIRED = inspect.Parameter.empty


class Flags(dict[str, Any]):
    """Values of all flags of a command, by name.

    Attributes:
        explicit: names that the user set, on the command line or in a ``--config`` file.
        output: where the report goes, where that is not where everything else goes.
    """

    explicit: frozenset[str] = frozenset()
    output: TextIO | None = None

    @property
    def as_json(self) -> bool:
        """Whether a program reads the output."""
        return bool(self.get("format") == "json")

    def pick(self, names: str) -> dict[str, Any]:
        """Return some of them, e.g. as arguments of a spec."""
        return {name: self[name] for name in names.split()}

    def refuse(self, names: Iterable[str], why: str, fix: str) -> None:
        """Refuse the first of these flags that the user set, if any."""
        for name in names:
            if name in self.explicit:
                raise MismatchError(f"{flag_of(name)} {why}", fix)


def flag_of(name: str) -> str:
    """Return a flag as it is typed."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class Option:
    """One flag, or one positional argument.

    Attributes:
        name: with underscores.
        kind: type of its value: bool, int, float, str, Path, a Literal, a list or a tuple of
            them, or one of these and None.
        range: of a number, or of each in a list.
        default: REQUIRED for an argument that has none.
        argument: positional.
        spelling: the flag as typed, where it is not --NAME.
        alone: value of the flag without a value, where it may come alone; "": it may not.
        rare: left out of the help, which names it as a setting for ``--config`` files.
    """

    name: str
    kind: Any
    panel: str
    help: str = ""
    default: Any = None
    range: Range | None = None
    switch: bool = False
    argument: bool = False
    spelling: str = ""
    alone: str = ""
    rare: bool = False

    @property
    def flag(self) -> str:
        return self.spelling or flag_of(self.name)

    @property
    def bare_kind(self) -> Any:
        """The kind without None."""
        parts = get_args(self.kind)
        return parts[0] if NoneType in parts else self.kind

    @property
    def is_list(self) -> bool:
        return get_origin(self.bare_kind) is list

    @property
    def item(self) -> Any:
        """Type of one value."""
        kind = self.bare_kind
        return get_args(kind)[0] if get_origin(kind) in (list, tuple) else kind

    def convert(self, value: Any, where: str) -> Any:
        """Return one value, from text (command line) or from a TOML value.

        Raises:
            MismatchError: it is of another type, no choice of the flag, or outside of its range.
        """
        item, guess = self.item, ""
        wanted = NAMES_OF_TYPES.get(item, "a path")
        if get_origin(item) is Literal:
            names = {name: name for name in get_args(item)}
            names = DTYPE_NAMES if item in (Dtype, MasterDtype) else names
            if isinstance(value, str) and value in names:
                return names[value]
            wanted = f"one of {', '.join(dict.fromkeys(names.values()))}"
            guess = did_you_mean(str(value), names, 1)
        elif item is bool and isinstance(value, bool):
            return value
        elif item in (int, float):
            wanted += f" {self.range}" if self.range is not None else ""
            whole = item is float or not isinstance(value, float)
            if isinstance(value, str | int | float) and not isinstance(value, bool) and whole:
                try:
                    number = item(value)
                except (ValueError, OverflowError):
                    number = None
                if number is not None and (self.range is None or number in self.range):
                    return number
        elif item is not bool and isinstance(value, str | Path):
            return item(value)
        raise MismatchError(f"{where} {value!r} is not {wanted}", f"{guess}write {wanted}")

    def parameter(self, callback: Callable[..., Any] | None = None) -> inspect.Parameter:
        """Return what typer reads.

        Args:
            callback: called with the value before all other flags are read.
        """
        about: dict[str, Any] = {"help": self.help or None, "rich_help_panel": self.panel or None}
        about["hidden"] = self.rare
        if callback is not None:
            about |= {"callback": callback, "is_eager": True}
        if self.item not in (bool, str, Path):
            about["parser"] = lambda text: self.convert(text, self.flag)
        if self.item in (Dtype, MasterDtype):
            about["metavar"] = f"<{'|'.join((*DTYPES, AUTO))}>"
        else:
            about["metavar"] = METAVARS.get(self.name, METAVARS.get(self.item))
        if self.argument:
            about["metavar"] = self.name.upper()
        names = [self.flag] if self.switch or self.spelling or self.name in SHORT else []
        names += [SHORT[self.name]] if self.name in SHORT else []
        if not self.argument and self.name not in NO_VARIABLE:
            about |= {"envvar": f"{VARIABLE}{self.name.upper()}", "show_envvar": False}
        info = typer.Argument(**about) if self.argument else typer.Option(*names, **about)
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[self.kind, info],
        )


def switch(name: str, panel: str, help: str) -> Option:
    """Return a flag that is off until it is given, without a --no-NAME."""
    return Option(name, bool, panel, help, default=False, switch=True)


@cache
def _fields(spec: type) -> Mapping[str, tuple[Option, bool]]:
    """Return the flags of a spec by field, and whether the flag's value is the field's."""
    options: dict[str, tuple[Option, bool]] = {}
    hints = get_type_hints(spec, include_extras=True)
    for field in fields(spec):
        kind, *notes = get_args(hints[field.name]) or (None,)
        for note in notes:
            if isinstance(note, Flag):
                given = {each.name: getattr(note, each.name) for each in fields(note)}
                given["name"] = note.name or field.name
                if same := note.kind is None:
                    given |= {"kind": kind, "default": field.default}
                options[field.name] = Option(**given), same
    return options


def flags_of(spec: type, names: str = "") -> tuple[Option, ...]:
    """Return the flags of a spec's fields, or of those named (separated by spaces)."""
    table = _fields(spec)
    return tuple(table[name][0] for name in names.split() or table)


def spec_values(
    spec: type, flags: Mapping[str, Any], names: str = "", auto: Callable[[], str] | None = None
) -> dict[str, Any]:
    """Return the fields of a spec that the flags of a command set as they are.

    Flags of a special kind are left to the command.

    Args:
        names: of the fields, separated by spaces; "": all.
        auto: the dtype that stands for ``auto``.
    """
    table = _fields(spec)
    values = {}
    for name in names.split() or table:
        option, same = table[name]
        if same and option.name in flags:
            value = flags[option.name]
            is_auto = option.item == Dtype and value == AUTO
            values[name] = auto() if auto is not None and is_auto else value
    return values


# What a command reads and prints, whatever it runs: no flag here needs an engine to be known.
Framework = Literal[tuple(each.id for each in FRAMEWORKS.values() if each.logs)]  # type: ignore[valid-type]
RUN = Option("run", Path, "", "Run directory.", default=REQUIRED, argument=True)
JSON = Option(  # of commands that print no report
    "format", Literal["text", "json"], OUTPUT, "Format on standard output.", default="text"
)
LEVELS = Option("thresholds", Path | None, OUTPUT, "TOML file that overrides levels.")
NAMES_HELP = "Also show a framework's names of the metrics, and how its numbers differ."
NAME_FLAGS = (
    Option("names", Framework | None, OUTPUT, NAMES_HELP),
    switch("details", OUTPUT, "Print every analysis in full."),
    switch("quiet", OUTPUT, "Print only the verdict."),
    Option(
        "format",
        Literal["text", "json", "markdown", "github", "junit", "sarif", "gates"],
        OUTPUT,
        "Format of the report on standard output; everything else goes to standard error.",
        default="text",
    ),
)
LOG_TO = Option(
    "log_to",
    list[str] | None,
    OUTPUT,
    "Send the numbers to wandb, tensorboard, mlflow or trackio; with --names also under those "
    "names, if the number is the same; repeatable.",
)
REQUIRE = Option(
    "require",
    list[str] | None,
    OUTPUT,
    "Exit with 1 unless the run also is this: exact (equal bits); repeatable.",
)
FAIL_ON = Option(
    "fail_on",
    Literal["tolerable", "inconclusive", "unfit", "broken"] | None,
    OUTPUT,
    "Verdict from which the exit code is 1; default: inconclusive, with --depth quick unfit.",
)
