"""One self-contained HTML file, no request; for phones, dark screens and paper too.

The only scripts are those that ship with the package, each allowed by its SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.attempts import Attempts
from mismatch.reports.documentation import address
from mismatch.reports.formatting import MARKS, line, packaged
from mismatch.reports.section import Page, Section, Widget, cell_interval, cell_text
from mismatch.reports.sections import page
from mismatch.types import Report
from mismatch.version import __version__

if TYPE_CHECKING:
    import pandas as pd
    from jinja2 import Template


PART = 1 << 16  # characters of data per element: a browser's parser rests between elements


def to_html(
    report: Report,
    tokens: pd.DataFrame,
    framework: str | None = None,
    attempts: Attempts | None = None,
    directory: Path | None = None,
) -> str:
    """Return the report as one HTML document. The same input gives the same bytes.

    Args:
        tokens: one row per action token, as in tokens.parquet.
        framework: whose names the metrics have in the column of aliases; None: everybody's.
        attempts: keeps sections that raised.
        directory: of the run, for commands.
    """
    return show_page(page(report, tokens, framework, attempts).placed(directory))


def show_page(shown: Page) -> str:
    """Return a page with its verdict first, a list of contents, and every section."""
    widgets = list(_widgets(shown.sections))
    names = [widget.name for widget in widgets]
    copied = any(answer.flags or answer.settings for answer in shown.answers)
    scripts = {name: script(name) for name in (*(("copy",) if copied else ()), *names)}
    return template("page.html").render(
        page=shown,
        version=__version__,
        css="".join(packaged(name) for name in ("report.css", *(f"{name}.css" for name in names))),
        widgets=widgets,
        scripts=scripts,
        hashes=" ".join(f"'sha256-{_digest(script)}'" for script in scripts.values()),
    )


def _widgets(sections: Iterable[Section]) -> Iterator[Widget]:
    for section in sections:
        if section.widget is not None:
            if "<" in section.widget.data:
                raise ValueError(f"the data of {section.widget.name} could end its element")
            yield section.widget
        yield from _widgets(section.parts)


def script(name: str) -> str:
    """Return the script of a widget, as pages hold it."""
    text: str = _unbroken(packaged(f"{name}.js").strip())
    return text


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def template(name: str) -> Template:
    """Return a packaged page; every value that is put into it is escaped."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(packaged),
        autoescape=True,  # every value is foreign until proved otherwise
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_unbroken,
    )
    environment.filters["line"] = line
    environment.filters["parts"] = lambda text: [
        text[start : start + PART] for start in range(0, len(text), PART)
    ]
    environment.globals.update(marks=MARKS, cell_text=cell_text, cell_interval=cell_interval)
    environment.globals["address"] = lambda page: address(page)
    environment.filters["percent"] = lambda share: f"{100 * share:.2f}%"
    return environment.get_template(name)


def _unbroken(value: Any) -> Any:
    """No line break between a number and its percent sign. Keeps markup what it is."""
    return value.replace(" %", "\u00a0%") if isinstance(value, str) else value
