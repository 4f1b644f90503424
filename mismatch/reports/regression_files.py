"""What ``mismatch compare NEW --against OLD --out DIR`` leaves."""

from __future__ import annotations

from pathlib import Path

from mismatch.experiments.regression.types import SCHEMA, Against, against_to_json
from mismatch.run import manifest, store


def write_against(directory: Path, made: Against) -> None:
    """Write against.html, against.md, and last against.json: where that is, the rest is.

    Raises:
        MismatchError: the directory cannot be written.
    """
    from mismatch.reports.against import to_html, to_markdown

    for name, text in (("against.html", to_html(made)), ("against.md", to_markdown(made))):
        store.write_text(directory / name, text)
        manifest.record(directory, name, "")
    store.save_document(directory, "against.json", against_to_json(made), schema=SCHEMA)
