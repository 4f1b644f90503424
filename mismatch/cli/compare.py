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
            help="Directory for the report of --left against --right.", rich_help_panel=OUTPUT
        ),
    ] = None


@with_flags(
    RunArgument, OtherRun, SideFlags, ExitFlags, LevelFlags, ForecastFlags, NamesFlags, ConfigFlags
)
def compare(flags: Flags) -> int:
    """Compare again what a run holds, or any two scorings of the same tokens.

    RUN alone: comparison.json and the report are made anew. RUN RUN2, or --left and --right: two
    scorings side by side, delta = right - left. Exit code as `check`.
    """
    from mismatch.cli import session
    from mismatch.cli.to_spec import positive
    from mismatch.pipeline import run_compare

    run, levels = flags["run"], session.levels(flags)
    length = positive(flags, "forecast_length") if "forecast_length" in flags.given else None
    if flags["other"] is None and not flags["left"] and not flags["right"]:
        report = run_compare(run, session.narrator(), levels, session.command(), length)
        return session.conclude(report, run, flags)
    from mismatch.reports.pair import build_pair, write_pair
    from mismatch.runs import new_directory

    other = flags["other"] or run
    names = (flags["left"] or "fsdp", flags["right"] or "fsdp")
    report, tokens = build_pair(run, other, names, levels, session.command(), length)
    out = None if flags["out"] is None else new_directory(flags["out"], "pair")
    if out is not None:
        write_pair(out, report, tokens)
    return session.conclude(report, out, flags, None if out is not None else tokens)
