"""What commands print: notes, and at the end a report, a page or a section, with the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from mismatch.analysis.levels import exit_code, fails_on
from mismatch.analysis.plugins import analyses
from mismatch.cli.flags import Flags
from mismatch.errors import MismatchError
from mismatch.plugins import load
from mismatch.reports import files, markdown, terminal
from mismatch.reports.files import write_page
from mismatch.reports.formatting import plain_lines
from mismatch.reports.section import Page, Section
from mismatch.reports.sections import page
from mismatch.run import store
from mismatch.types import Judged, Report


def say(text: str, stderr: bool = False) -> None:
    Console(stderr=stderr).print(plain_lines(text), highlight=False, markup=False, soft_wrap=True)


def conclude(report: Report, run_dir: Path | None, flags: Flags, written: bool = False) -> int:
    """Print the report; the verdict is its last line. Return the exit code.

    Args:
        written: whether the run's HTML and Markdown hold the names of ``--names`` already.
    """
    framework = flags.get("names")
    if framework is not None and run_dir is not None and not written:
        files.write_rendered(run_dir, report, store.load_tokens(run_dir), framework)
    if flags.get("log_to"):
        from mismatch.reports.sinks import send

        for note in send(flags["log_to"], report, run_dir, framework):
            print(f"warning: {plain_lines(note)}", file=sys.stderr)
    quick = bool(report.run.get("spec", {}).get("quick"))
    gate = fails_on(flags["fail_on"], quick)
    code: int = exit_code(report.verdict, gate, report.checks)
    for reason in lacking(report, flags.get("require") or ()):
        code = code or 1
        print(f"required: {plain_lines(reason)}", file=sys.stderr)
    details = bool(flags.get("details"))
    writers = {
        "json": lambda: files.to_json(report),
        "markdown": lambda: markdown.to_markdown(report, framework, details),
        "github": lambda: load("mismatch.reports.ci_formats:to_github")(report, bool(code)),
        "junit": lambda: load("mismatch.reports.ci_formats:to_junit")(report, bool(code)),
        "sarif": lambda: load("mismatch.reports.ci_formats:to_sarif")(report, bool(code)),
        "gates": lambda: load("mismatch.reports.ci_formats:to_gates")(report),
    }
    _show(lambda: page(report, framework=framework), run_dir, flags, writers)
    return code


def require_known(names: Iterable[str]) -> None:
    """Refuse what no analysis can be asked for.

    Raises:
        MismatchError: with the names that there are.
    """
    known = [each.id for each in analyses() if each.lacks]
    for name in names:
        if name not in known:
            fault = f"--require {name}: nothing of that name is measured"
            raise MismatchError(fault, f"use one of {', '.join(known)}" if known else "")


def lacking(report: Report, names: Iterable[str]) -> Iterator[str]:
    """Yield why a report is not what ``--require`` asks for."""
    require_known(names)
    for analysis in (each for each in analyses() if each.id in names):
        result = report.result(analysis.id)
        why = "it was not measured" if result is None else analysis.call("lacks", result, report)
        if why:
            yield f"{analysis.id}: {why}"


def conclude_page(
    shown: Page,
    document: dict[str, Any],
    flags: Flags,
    machines: Mapping[str, Callable[[], str]] | None = None,
) -> None:
    """Write a page that is no report of one run to ``--out``; show it as ``--format`` asks.

    Args:
        document: its numbers, with their schema.
        machines: ``--format`` -> what writes it, of those that only some pages have.

    Raises:
        MismatchError: a directory that cannot be written.
    """
    from mismatch.run.directory import new_directory

    out = None if flags["out"] is None else new_directory(flags["out"], shown.file)
    if out is not None:
        write_page(out, shown, document)
    writers = {
        "json": lambda: json.dumps(document, indent=1, allow_nan=False) + "\n",
        "markdown": lambda: markdown.show_page(shown),
        **(machines or {}),
    }
    _show(lambda: shown, out, flags, writers)


def conclude_alone(
    shown: Section,
    verdict: Judged,
    document: dict[str, Any],
    out: Path | None,
    file: str,
    flags: Flags,
) -> int:
    """Print what a command measures that makes no whole report, or its numbers; the exit code.

    Args:
        out, file: where its files are, and the one to open.
    """
    if flags.as_json:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        terminal.print_alone(shown, verdict, Console(), out, file, bool(flags.get("details")))
    return verdict.code


def _show(
    page_of: Callable[[], Page],
    out: Path | None,
    flags: Flags,
    writers: Mapping[str, Callable[[], str]],
) -> None:
    """Write what ``--format`` asks for, or print the page or, with ``--quiet``, its end."""
    output, form = flags.output or sys.stdout, flags.get("format", "text")
    if form != "text":
        output.write(writers[form]())
    elif flags.get("quiet"):
        terminal.print_tail(page_of(), Console(file=output))
    else:
        terminal.print_page(page_of(), Console(file=output), out, bool(flags.get("details")))
