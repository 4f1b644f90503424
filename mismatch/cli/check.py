"""`mismatch check`: generate, score again, compare, judge."""

from __future__ import annotations

from mismatch.cli.command import with_flags
from mismatch.cli.configuration import configured
from mismatch.cli.flags import Flags
from mismatch.cli.options import CHECK
from mismatch.errors import MismatchError


@with_flags(CHECK)
def check(flags: Flags) -> int:
    """Sample with your engine, re-score with your trainer, judge the difference.

    Exit code 0: healthy or tolerable. 1: inconclusive, unfit or broken. 2: nothing measured.

    Examples:
    mismatch check --model gpt-oss-20b
    mismatch check --model MODEL --fix all --explain
    """
    from mismatch.cli import output, session
    from mismatch.cli.to_spec import check_spec
    from mismatch.doctor.plan import placed, ranks_apart
    from mismatch.pipeline.commands import run_check
    from mismatch.pipeline.preflight import preflight, require_names
    from mismatch.reports.files import write_report

    spec = session.stored_spec(flags)
    if spec is None:
        spec, notes = configured(check_spec(flags), flags)
        for note in notes:
            output.say(note)
        if flags["nproc_per_node"] is None:
            spec = ranks_apart(spec, flags["gpus"])
    levels = session.levels(flags)
    session.require_directory(flags)
    require_names(spec)
    session.warn_of_key(spec.rollout)
    if flags["dry_run"]:
        code = session.dry_run(spec, flags)
        if not flags["gpus"]:  # else this is not the machine
            preflight(spec, reach=False)
        return code
    if flags["gpus"]:
        raise MismatchError("--gpus belongs to a plan", "add --dry-run")
    spec = placed(spec)
    preflight(spec, engine=not session.needs_no_server(flags, spec))
    room = session.room_for(spec, flags["force"])
    run_dir = session.open_run("check", spec, flags)
    narrator = session.narrator()
    report = run_check(spec, run_dir, narrator, levels, session.command(), write_report, room)
    return output.conclude(report, run_dir, flags)
