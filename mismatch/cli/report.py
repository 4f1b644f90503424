"""`mismatch report`: write and print the report of a run again."""

from __future__ import annotations

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags
from mismatch.cli.options import FAIL_ON, NAME_FLAGS, RUN


@with_flags(RUN, NAME_FLAGS, FAIL_ON)
def report(flags: Flags) -> int:
    """Print the report of a run, write its HTML and Markdown again.

    Refused where a scoring is newer than the report: `mismatch compare RUN` judges it. Exit code as
    `check`. A run that cannot be written is printed all the same.
    """
    from mismatch.cli import session
    from mismatch.errors import MismatchError
    from mismatch.pipeline.document import report_from_json
    from mismatch.reports.files import require_fresh, write_rendered
    from mismatch.run import store

    run, names = flags["run"], flags["names"]
    require_fresh(run)
    document = report_from_json(store.load_document(run, "report.json"))
    tokens = store.load_tokens(run)
    try:
        write_rendered(run, document, tokens, names)
    except MismatchError as error:
        session.say(
            f"note: the HTML and Markdown report could not be written: {error.message}; "
            "for these copy the run to a directory that can be written"
        )
        return session.conclude(document, None, flags, tokens)
    return session.conclude(document, run, flags, tokens)
