"""The command `mismatch`."""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from mismatch.errors import INSTALL_SCORE, MismatchError, did_you_mean
from mismatch.plugins import features, find_command, load
from mismatch.version import __version__

# The core's commands by what one wants, in the order of the help. Each lives in the module of its
# name, imported when it is run; those of features follow in the group that they name.
GROUPS = {
    "Check and its results": {
        "check": "Sample with your engine, re-score with your trainer, judge the difference.",
        "rollout": "Sample in the engine; score later, here or elsewhere.",
        "score": "Score the tokens of a run under FSDP2.",
        "compare": "Compare a run again, or any two scorings of the same tokens.",
        "report": "Print a run's report, or several runs side by side.",
    },
    "Dig deeper": {"fixes": "List the fixes that a check can try, or show one of them."},
    "Before upgrades": {},
    "Information": {
        "metrics": "List every metric.",
        "explain": "What a metric, check, cause, fix or word means; works offline.",
        "demo": "Open the report of a broken run, which ships with mismatch.",
    },
}
CORE = {name: summary for names in GROUPS.values() for name, summary in names.items()}
HELP_ALL = "--help-all"
HELP_NAMES = {"help_option_names": ["-h", "--help"]}
MOST_FLAGS = 30  # a command with more shows these alone in --help, and all in --help-all
COMMON = frozenset(
    {
        *("model", "prompts", "num_prompts", "samples_per_prompt", "max_tokens", "temperature"),
        *("python", "engine", "engine_arg", "server", "framework", "framework_config", "scorer"),
        *("nproc_per_node", "attention", "depth", "fix", "explain", "budget_minutes", "resume"),
        *("out", "format", "fail_on", "dry_run", "gpus", "help"),
    }
)
RESUME = "continue where it stopped: the same command with --resume"
# Other commands keep finished work themselves, or start again.
RESUMABLE = ("check", "rollout", "loop")
USAGE = 2
INTERRUPTED = 130  # what shells and typer make of a KeyboardInterrupt


def summaries() -> dict[str, str]:
    """Return every command with its line of the help: the core's, then those of features."""
    added = {each.name: each.summary for feature in features() for each in feature.commands}
    return CORE | added


class Command(TyperCommand):
    """A command with its flags in panels, examples at the end, and flags that may come alone.

    Where a command has many flags, ``--help`` shows the common flags and ``--help-all`` all.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        alone = {option.flag: option.alone for option in self.callback.options if option.alone}  # type: ignore[union-attr]
        following = [*args[1:], "-"]
        args = [
            f"{text}={alone[text]}" if text in alone and after.startswith("-") else text
            for text, after in zip(args, following, strict=False)
        ]
        if HELP_ALL in args:
            ctx.meta[HELP_ALL] = True
            args = ["--help"]
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        from mismatch.reports.documentation import linked

        self.help = linked(self.help or "")
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from mismatch.reports.documentation import linked

        sections: dict[str, list[tuple[str, str]]] = {}
        rows = [(each, row) for each in self.get_params(ctx) if (row := each.get_help_record(ctx))]
        short = len(rows) > MOST_FLAGS and not ctx.meta.get(HELP_ALL)
        for parameter, row in rows:
            if parameter.param_type_name == "argument":
                title = "Arguments"
            elif short and parameter.name not in COMMON:
                continue
            else:
                title = getattr(parameter, "rich_help_panel", None) or "Options"
            sections.setdefault(title, []).append(row)
        if short:
            sections["Options"].append((HELP_ALL, f"Show all {len(rows)} flags."))
        rare = [option for option in self.callback.options if option.rare]  # type: ignore[union-attr]
        if rare and not short:
            names = ", ".join(option.name for option in rare)
            about = f"{names} (also as flags); docs/reference/command-line.md"
            sections["Settings of a --config file"] = [(f"{len(rare)} more", about)]
        for title, lines in sections.items():
            with formatter.section(title):
                formatter.write_dl([(names, linked(about)) for names, about in lines])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            for example in (self.epilog or "").splitlines():
                formatter.write(f"  {example.strip()}\n")


class Group(TyperGroup):
    """The commands, imported when they are needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(summaries())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        place = f"mismatch.cli.{cmd_name}:{cmd_name}"
        if cmd_name not in CORE:
            command = find_command(cmd_name)
            if command is None:
                near = did_you_mean(cmd_name, summaries(), 1)
                fault = f"No such command: {cmd_name}"
                raise MismatchError(fault, f"{near}mismatch --help lists every command")
            place = command.function
        function, single = load(place), typer.Typer(add_completion=False, rich_markup_mode=None)
        about, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
        single.command(
            cmd_name, cls=Command, help=about, epilog=examples, context_settings=HELP_NAMES
        )(function)
        return typer.main.get_command(single)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from mismatch.reports.documentation import site

        if site():
            formatter.write(f"\nDocumentation: {site()}\n")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups = {title: [*names.items()] for title, names in GROUPS.items()}
        for command in (command for feature in features() for command in feature.commands):
            groups.setdefault(command.group, []).append((command.name, command.summary))
        for title, commands in groups.items():
            with formatter.section(title):
                formatter.write_dl(commands)


COMPLETE = "_MISMATCH_COMPLETE"  # set by the shell's completion script
COMPLETION_FLAGS = (["--install-completion"], ["--show-completion"])
app = typer.Typer(
    name="mismatch",
    cls=Group,
    invoke_without_command=True,
    # Its flags import pydantic (0.1 s), so they are there only where completion is asked for.
    add_completion=COMPLETE in os.environ or sys.argv[1:2] in COMPLETION_FLAGS,
    add_help_option=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Do the inference engine and the trainer give the same tokens the same probabilities? "
    "Measure it before the run: mismatch check --model MODEL\n\n"
    "Shell completion: mismatch --install-completion",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mismatch {__version__}")
        raise typer.Exit


def _print_help(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(ctx.get_help())
        raise typer.Exit


# --help is a flag of our own because typer's, when it is absent, imports pydantic.
@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Show the version."
        ),
    ] = False,
    help: Annotated[
        bool,
        typer.Option(
            "--help", "-h", callback=_print_help, is_eager=True, help="Show this message and exit."
        ),
    ] = False,
) -> int:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    return USAGE


def main() -> NoReturn:
    """Exit codes: 0 healthy or tolerable, 1 inconclusive or worse, 2 no verdict, 130 Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):  # of another encoding, or strings of half a character
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # TERM and HUP end the tool as Ctrl-C does: through every `finally`, so that no worker is left.
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        # Names that could be written into no report: of another encoding, or half a character.
        for text in (*sys.argv[1:], os.path.abspath(os.curdir)):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                encoding = sys.getfilesystemencoding()
                fault = f"{text!a} is no text in the encoding of this locale, {encoding}"
                fix = "export LC_ALL=C.UTF-8 (or PYTHONUTF8=1), and use names in UTF-8"
                raise MismatchError(fault, fix) from error
        code = app(prog_name="mismatch", standalone_mode=False)
    except MismatchError as error:
        _complain(error.message, error.fix)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as end:  # after a completion; or nobody reads the output (mismatch … | head)
        sys.exit(USAGE if end.code else 0)
    except OSError as error:
        _complain(str(error), "check the path, its permissions and the free disk space")
    except Exception as error:
        _complain_of(error)
    if code == INTERRUPTED:
        resumable = any(command in RESUMABLE for command in sys.argv[1:2])
        fix = RESUME if resumable else "run the same command again"
        _complain("interrupted; every process that was started has been ended", fix, INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _complain_of(error: Any) -> NoReturn:
    """Say what typer cannot read; any other error is a bug of this tool.

    Python itself would exit with 1, which is the code of a verdict.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers"):
        _complain(f"{error.name} is not installed", INSTALL_SCORE)
    if not hasattr(error, "format_message"):  # usage errors of typer have one
        from mismatch.reports.formatting import plain_lines
        from mismatch.run.provenance import redact

        said = redact("".join(traceback.format_exception(error)))
        print(plain_lines(said), file=sys.stderr, end="")
        fault = f"unexpected {type(error).__name__}: this is a bug in mismatch"
        _complain(f"{fault}; please report it with the traceback", "")
    context = getattr(error, "ctx", None)
    verb = next((text for text in sys.argv[1:2] if text in summaries()), "")
    command = f"mismatch {verb}".strip() if context is None else context.command_path
    near = getattr(error, "possibilities", None)  # unknown flags: the nearest first
    message = f"{error.message}. Did you mean {near[0]}?" if near else error.format_message()
    _complain(message, f"{command} --help lists every option")


def _complain(message: str, fix: str, code: int = USAGE) -> NoReturn:
    from mismatch.reports.documentation import linked
    from mismatch.reports.formatting import plain_lines
    from mismatch.run.provenance import redact

    print(f"error: {linked(plain_lines(redact(message)))}", file=sys.stderr)
    if fix:
        print(f"  fix: {linked(plain_lines(redact(fix)))}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
