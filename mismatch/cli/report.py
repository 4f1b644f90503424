"""`mismatch report`: write and print the report of a run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run directory, as `mismatch check` made it.")],
) -> int:
    """Print the report of a run and write its HTML and Markdown again. Exit code as `check`."""
    from rich.console import Console

    from mismatch import store
    from mismatch.levels import exit_code
    from mismatch.reports.build import write_rendered
    from mismatch.reports.document import report_from_json
    from mismatch.reports.terminal import print_report

    document = report_from_json(store.read_json(run / "report.json"))
    write_rendered(run, document, store.load_tokens(run))
    print_report(document, Console(), run)
    code: int = exit_code(document.verdict, "critical")
    return code
