"""`mismatch report`: print a run's report again, or several runs side by side."""

from __future__ import annotations

from pathlib import Path

from mismatch.cli.command import with_flags
from mismatch.cli.flags import FAIL_ON, LOG_TO, NAME_FLAGS, REQUIRE, Flags, Option
from mismatch.errors import MismatchError
from mismatch.specs import OUTPUT

RUNS = Option("runs", list[Path] | None, "", "Run directory, or several.", argument=True)
SEVERAL = (Option("out", Path | None, OUTPUT, "Directory for the page of several runs."),)
OF_ONE = ("names", "log_to", "fail_on", "require")  # flags of one run's report
USE = "mismatch report RUN, or mismatch report A B C"


@with_flags(RUNS, SEVERAL, NAME_FLAGS, LOG_TO, FAIL_ON, REQUIRE)
def report(flags: Flags) -> int:
    """Print the report of a run and write its HTML and Markdown again, or show several runs.

    With one RUN: the stored verdict. It is refused if a scoring is newer than the report, or if the
    report contradicts itself. `mismatch compare RUN` judges the scorings again.
    Exit code as `check`. A read-only run is still printed.

    With A B C: side by side, from report.json and tokens.parquet only. Significant changes from A
    are marked, paired if the tokens are the same. Exit code 0; `compare NEW --against OLD` judges.

    Examples:
    mismatch report runs/A --details
    mismatch report runs/A runs/B --out page
    """
    from mismatch.cli import output
    from mismatch.pipeline.saved_runs import REPORT, called_unverified, load_report
    from mismatch.reports.files import judged_here, require_fresh, write_rendered
    from mismatch.run import store
    from mismatch.run.manifest import damage_named

    runs = flags["runs"] or []
    if len(runs) != 1:
        flags.refuse(OF_ONE, "is for the report of one run", USE)
        if flags["format"] in ("github", "junit", "sarif", "gates"):
            fault = f"--format {flags['format']} is for the report of one run"
            raise MismatchError(fault, USE)
        if not runs:
            raise MismatchError("Missing argument 'RUN'", USE)
        from mismatch.pipeline.run_comparison import compare_runs
        from mismatch.reports.saved_runs import runs_page

        with damage_named(f"a report of {', '.join(map(str, runs))}"):
            result = compare_runs(runs)
            output.conclude_page(runs_page(result), result.to_json(), flags)
        return 0
    flags.refuse(["out"], "is for several runs", USE)
    run = runs[0]
    require_fresh(run)
    document = load_report(run)
    document = document if judged_here(run) else called_unverified(document)
    tokens = store.load_tokens(run)
    with damage_named(run / REPORT):  # its reader cannot know what every section needs
        try:
            write_rendered(run, document, tokens, flags["names"])
        except MismatchError as error:
            output.say(
                f"note: the HTML and Markdown report could not be written: {error.message}; "
                "for these copy the run to a directory that can be written"
            )
            return output.conclude(document, None, flags)
        return output.conclude(document, run, flags, written=True)
