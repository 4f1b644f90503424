"""`mismatch locate`: at which module do engine and trainer part?"""

from __future__ import annotations

from pathlib import Path

from mismatch.cli.command import with_flags
from mismatch.cli.flags import JSON, RUN, Flags, Option, switch
from mismatch.cli.options import TRUST_RUN
from mismatch.specs import MANY, OUTPUT, Range

WHAT = "What to record"
SEQUENCES_HELP = "Sequences of the run: the worst half, and others at random."
FLAGS = (
    Option("sequences", int, WHAT, SEQUENCES_HELP, default=8, range=Range(1, MANY)),
    Option(
        "max_sequence_tokens",
        int,
        WHAT,
        "Tokens of each sequence, from its beginning; memory and disk grow with it.",
        default=512,
        range=Range(2, MANY),
    ),
)
EXACT = switch(
    "exact", WHAT, "Compare both sides' modules by their bits, and name the first unequal one."
)
DETAILS = switch("details", OUTPUT, "Every module of every layer.")


@with_flags(RUN, FLAGS, EXACT, DETAILS, JSON, TRUST_RUN)
def locate(flags: Flags) -> int:
    """Name the first module where a side of a run differs from float32.

    Engine, trainer and plain forwards run on some of the run's tokens while every module is
    recorded. A module is a source if its error on the same input exceeds what its precision costs.

    Exit code 0: no source. 1: a source was found, or a side is off without a source. 2: nothing
    was recorded.

    With --exact: 0: all modules of engine and trainer are bitwise equal. 1: one is not.

    Examples:
    mismatch locate runs/A
    mismatch locate runs/A --sequences 16 --details
    mismatch locate runs/A --exact
    """
    from mismatch.cli import output, session
    from mismatch.features.locate import exact
    from mismatch.features.locate.judge import judge, to_document
    from mismatch.features.locate.recording import locate_exact, locate_in
    from mismatch.features.locate.section import section
    from mismatch.pipeline.saved_runs import load_report
    from mismatch.reports.files import write_report
    from mismatch.run import store
    from mismatch.run.directory import at_work, is_own, load_spec
    from mismatch.run.trust import require_trust

    run: Path = flags["run"]
    spec = load_spec(run)
    require_trust(run, spec, flags["trust_run"] or is_own(run))
    narrator = session.narrator(silent=flags.as_json)
    size = {"sequences": flags["sequences"], "tokens": flags["max_sequence_tokens"]}
    if flags["exact"]:
        with at_work(run, "locate", spec, session.command()):
            found = locate_exact(run, spec, narrator, **size)
        if (run / "report.json").exists():
            write_report(run, load_report(run).with_analyses(locate_exact=found),
                         store.load_tokens(run))  # fmt: skip
        ending = exact.judge(found), exact.to_document(found), run, exact.FILE, flags
        return output.conclude_alone(exact.section(found), *ending)
    with at_work(run, "locate", spec, session.command()):
        location = locate_in(run, spec, narrator, **size)
    if (run / "report.json").exists():
        write_report(run, load_report(run).with_analyses(locate=location), store.load_tokens(run))
    verdict, file = judge(location), "locate.json"
    return output.conclude_alone(
        section(location), verdict, to_document(location), run, file, flags
    )
