"""`mismatch compare`: the numbers of scorings that lie there, of one run or of two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatch.cli.flags import Flags, with_flags
from mismatch.cli.options import (
    OUTPUT,
    ConfigFlags,
    ExitFlags,
    ForecastFlags,
    LevelFlags,
    NamesFlags,
    RunArgument,
)


class OtherRun:
    other: Annotated[
        Path | None,
        typer.Argument(help="A second run of the same tokens: its scoring against the first's."),
    ] = None


class SideFlags:
    left: Annotated[
        str | None,
        typer.Option(help="Scoring of the first run; default: fsdp.", rich_help_panel=OUTPUT),
    ] = None
    right: Annotated[
        str | None,
        typer.Option(
            help="Scoring of the second run (or of the first); default: fsdp.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the report of two scorings, or of --against.",
            rich_help_panel=OUTPUT,
        ),
    ] = None


class AgainstFlags:
    against: Annotated[
        Path | None,
        typer.Option(
            help="An older run of the same model and prompts: is RUN worse than it?",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    margin: Annotated[
        float,
        typer.Option(
            help="Share by which RUN may be worse than --against before that fails.",
            rich_help_panel=OUTPUT,
        ),
    ] = 0.1


@with_flags(
    RunArgument,
    OtherRun,
    AgainstFlags,
    SideFlags,
    ExitFlags,
    LevelFlags,
    ForecastFlags,
    NamesFlags,
    ConfigFlags,
)
def compare(flags: Flags) -> int:
    """Compare again what a run holds, or any two scorings of the same tokens.

    RUN alone: comparison.json and the report are made anew. RUN RUN2, or --left and --right: two
    scorings side by side, delta = right - left. Exit code as `check`.

    RUN --against OLD: a new run against an old one, each with tokens of its own, for upgrades.
    Exit code 0: not worse by more than --margin. 1: worse, or critical. 2: not comparable.
    """
    from mismatch.cli import session
    from mismatch.cli.to_spec import positive
    from mismatch.pipeline.commands import run_compare
    from mismatch.reports.files import write_report

    run, levels = flags["run"], session.levels(flags)
    if flags["against"] is not None:
        return _against(flags)
    length = positive(flags, "forecast_length") if "forecast_length" in flags.given else None
    if flags["other"] is None and not flags["left"] and not flags["right"]:
        report = run_compare(
            run, session.narrator(), levels, session.command(), length, write_report
        )
        return session.conclude(report, run, flags)
    from mismatch.pipeline.scoring_pair import build_pair
    from mismatch.reports.files import write_pair
    from mismatch.run.directory import new_directory

    other = flags["other"] or run
    names = (flags["left"] or "fsdp", flags["right"] or "fsdp")
    report, tokens = build_pair(run, other, names, levels, session.command(), length)
    out = None if flags["out"] is None else new_directory(flags["out"], "pair")
    if out is not None:
        write_pair(out, report, tokens)
    return session.conclude(report, out, flags, None if out is not None else tokens)


def _against(flags: Flags) -> int:
    from rich.console import Console

    from mismatch.cli import session
    from mismatch.errors import MismatchError
    from mismatch.experiments.regression.measure import against
    from mismatch.reports.against_terminal import print_against
    from mismatch.reports.regression_files import write_against
    from mismatch.run.directory import new_directory

    new, old = flags["run"], flags["against"]
    clash = [name for name in ("other", "left", "right", "names") if flags[name]]
    if clash:
        raise MismatchError(
            f"--against compares two whole runs: {', '.join(clash)} has no place in it",
            "mismatch compare NEW --against OLD",
        )
    if not flags["margin"] >= 0:
        raise MismatchError(f"--margin is {flags['margin']:g}", "use a share, 0 or more: 0.1")
    if new.resolve() == old.resolve():
        raise MismatchError(f"{new} against itself", "mismatch compare NEW --against OLD")
    fail_on = flags["fail_on"].value
    thresholds = session.levels(flags)
    made = against(old, new, margin=flags["margin"], thresholds=thresholds, fail_on=fail_on)
    out = None if flags["out"] is None else new_directory(flags["out"], "against")
    if out is not None:
        write_against(out, made)
    print_against(made, Console(), out)
    return int(made.fails)
