"""`mismatch compare`: the numbers of scorings that lie there, of one run or of two."""

from __future__ import annotations

from pathlib import Path

from mismatch.cli.command import with_flags
from mismatch.cli.flags import FAIL_ON, LEVELS, LOG_TO, NAME_FLAGS, REQUIRE, RUN, Flags, Option
from mismatch.cli.options import CONFIG
from mismatch.errors import MismatchError
from mismatch.specs import OUTPUT, Range

OTHER_HELP = "A second run of the same tokens, to compare with the first run."
OTHER_RUN = Option("other", Path | None, "", OTHER_HELP, argument=True)
AGAINST_HELP = "An older run of the same model and prompts: is RUN worse than it?"
MARGIN_HELP = "Share by which RUN may be worse than --against (0.1: 10 %)."
AGAINST = (
    Option("against", Path | None, OUTPUT, AGAINST_HELP),
    Option("margin", float, OUTPUT, MARGIN_HELP, default=0.1, range=Range(0, 1000)),
)
SIDES = (
    Option("left", str | None, OUTPUT, "Scoring of the first run; default: fsdp."),
    Option(
        "right", str | None, OUTPUT, "Scoring of the second run (or of the first); default: fsdp."
    ),
    Option(
        "out", Path | None, OUTPUT, "Directory for the report of two scorings, or of --against."
    ),
)


@with_flags(RUN, OTHER_RUN, AGAINST, SIDES, FAIL_ON, REQUIRE, LEVELS, NAME_FLAGS, LOG_TO, CONFIG)
def compare(flags: Flags) -> int:
    """Compare a run again, or any two scorings of the same tokens.

    With one RUN: write comparison.json and the report again. With RUN RUN2, or --left and --right:
    compare two scorings, delta = right - left. Exit code as `check`.

    With RUN --against OLD: compare a new run with an old run that has other tokens (upgrades). Exit
    code 0: not worse by more than --margin. 1: worse, undecided, or itself bad. 2: not comparable.

    Examples:
    mismatch compare runs/A
    mismatch compare runs/NEW --against runs/OLD
    """
    from mismatch.cli import output, session
    from mismatch.pipeline.commands import run_compare
    from mismatch.pipeline.run_comparison import against
    from mismatch.pipeline.scoring_pair import build_pair
    from mismatch.reports import ci_formats
    from mismatch.reports.files import require_fresh, write_pair, write_report
    from mismatch.reports.saved_runs import runs_page
    from mismatch.run.directory import new_directory
    from mismatch.run.manifest import damage_named

    run, levels = flags["run"], session.levels(flags)
    if flags["against"] is not None:
        old, usage = flags["against"], "mismatch compare NEW --against OLD"
        whole = ("other", "left", "right", "names", "log_to", "require")
        clash = [name for name in whole if flags[name]]
        if clash:
            fault = f"--against compares two whole runs: {', '.join(clash)} has no place in it"
            raise MismatchError(fault, usage)
        if run.resolve() == old.resolve():
            raise MismatchError(f"{run} against itself", usage)
        for each in (old, run):
            require_fresh(each)
        if flags["format"] in ("sarif", "gates"):
            fault = f"--format {flags['format']} is for the report of one run"
            raise MismatchError(fault, usage)
        gate, margin = flags["fail_on"] or "unfit", flags["margin"]
        with damage_named(f"the report of {old} or of {run}"):
            result = against(old, run, margin=margin, thresholds=levels, fail_on=gate)
        machines = {
            "github": lambda: ci_formats.runs_to_github(result),
            "junit": lambda: ci_formats.runs_to_junit(result),
        }
        output.conclude_page(runs_page(result), result.to_json(), flags, machines)
        return int(result.gate is not None and result.gate.fails)
    flags.refuse(["margin"], "without --against", "mismatch compare NEW --against OLD")
    if flags["other"] is None and not flags["left"] and not flags["right"]:
        report = run_compare(run, session.narrator(), levels, session.command(), write_report)
        return output.conclude(report, run, flags)
    other = flags["other"] or run
    names = (flags["left"] or "fsdp", flags["right"] or "fsdp")
    report, tokens = build_pair(run, other, names, levels, session.command())
    out = None if flags["out"] is None else new_directory(flags["out"], "pair")
    if out is not None:
        report = write_pair(out, report, tokens)
    return output.conclude(report, out, flags)
