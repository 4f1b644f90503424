"""Every rendering of ten reports, word by word: two saved runs, and eight made by fixtures.

JSON is compared byte by byte; texts by their words, so that white space may move. HTML is compared
by the text a reader sees. After a change that is meant: ``python -m tests.unit.test_goldens``
writes the files anew, and their diff is read by eye.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from mismatch.codec import from_json
from mismatch.pipeline.document import comparisons_to_json, report_from_json, report_to_json
from mismatch.reports.html import to_html
from mismatch.reports.markdown import to_markdown
from mismatch.reports.terminal import print_report
from mismatch.run import store
from mismatch.specs import CheckSpec, spec_hash
from mismatch.types import Report
from tests import reports_fixture
from tests.fixes_fixture import make_table
from tests.kernels_fixture import make_audit_report
from tests.made_run import make_run
from tests.unit.test_triangle import ODD_A, make, shown

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "goldens"
ARTEFACTS = GOLDENS / "artefacts.json"
EXAMPLES = ("tiny-gpt-oss", "tiny-gpt-oss-no-sinks")
EMPTY = '<svg viewBox="0 0 6 4"></svg>'
ReportAndTokens = tuple[Report, pd.DataFrame]


def _example(name: str) -> ReportAndTokens:
    folder = ROOT / "examples" / name
    document = json.loads((folder / "report.json").read_text())
    return report_from_json(document), store.load_tokens(folder)


def _healthy() -> ReportAndTokens:
    tokens = reports_fixture.make_tokens()
    return reports_fixture.make_report(tokens).with_analyses(gradients=None), tokens


def _gradients() -> ReportAndTokens:
    tokens = reports_fixture.make_tokens()
    return reports_fixture.make_report(tokens), tokens


def _fixes() -> ReportAndTokens:
    report, tokens = reports_fixture.make_failing_report()
    return report.with_analyses(fixes=make_table("after-fixes"), gradients=None), tokens


def _kernels() -> ReportAndTokens:
    report, tokens = _healthy()
    return report.with_analyses(kernels=make_audit_report()), tokens


def _engines() -> ReportAndTokens:
    with tempfile.TemporaryDirectory() as folder:
        return shown(make(Path(folder), ODD_A), Path(folder)), reports_fixture.make_tokens()


MAKERS: dict[str, Callable[[], ReportAndTokens]] = {
    "healthy": _healthy,
    "failing": reports_fixture.make_failing_report,
    "empty": reports_fixture.make_empty_report,
    "inconclusive": reports_fixture.make_inconclusive_report,
    "fixes": _fixes,
    "gradients": _gradients,
    "kernels": _kernels,
    "engines": _engines,
    **{f"example-{name}": (lambda name=name: _example(name)) for name in EXAMPLES},
}
SUFFIXES = ("report.json", "md", "terminal.txt", "details.txt", "html.txt")


class _Text(HTMLParser):
    """The words of a page; style sheets and the inside of pictures are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in ("style", "svg", "script")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("style", "svg", "script")

    def handle_data(self, data: str) -> None:
        if not self.hidden and data.strip():
            self.words.append(" ".join(data.split()))


def html_text(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    return "\n".join(parser.words) + "\n"


def _json(document: Any) -> str:
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _terminal(report: Report, details: bool) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=80), "RUN", details=details)
    return out.getvalue()


@cache
def _report_of(name: str) -> ReportAndTokens:
    return MAKERS[name]()


@cache
def rendered(name: str) -> dict[str, str]:
    report, tokens = _report_of(name)
    with pytest.MonkeyPatch.context() as patch:
        # What matplotlib draws is not read here, and takes most of a page's time.
        patch.setattr(
            Figure, "savefig", lambda figure, file, **_: file.write('<svg viewBox="0 0 6 4"></svg>')
        )
        return _rendered(report, tokens)


def _rendered(report: Report, tokens: pd.DataFrame) -> dict[str, str]:
    return {
        "report.json": _json(report_to_json(report)),
        "md": to_markdown(report),
        "terminal.txt": _terminal(report, details=False),
        "details.txt": _terminal(report, details=True),
        "html.txt": html_text(to_html(report, tokens)),
    }


def _same(suffix: str, text: str) -> str:
    return text if suffix.endswith("json") else re.sub(r"\s+", " ", text)


def _golden(name: str, suffix: str) -> Path:
    example = name.removeprefix("example-")
    if suffix == "report.json" and example in EXAMPLES:
        return ROOT / "examples" / example / suffix
    return GOLDENS / f"{name}.{suffix}"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", MAKERS)
def test_rendering_is_the_golden_one(name: str, suffix: str) -> None:
    golden = _golden(name, suffix).read_text("utf-8")
    assert _same(suffix, rendered(name)[suffix]) == _same(suffix, golden)


@pytest.mark.parametrize("name", MAKERS)
def test_comparison_json_is_that_part_of_the_report(name: str) -> None:
    report, _ = _report_of(name)
    golden = json.loads(_golden(name, "report.json").read_text("utf-8"))
    part = {key: golden[key] for key in ("comparisons", "noise_floor")}
    document = comparisons_to_json(report.comparisons, report.noise_floor)
    # Readable names are the report's.
    for pair in [*document["comparisons"], *document["noise_floor"]]:
        names = {name: name.replace(".", "_") for name in pair["metrics"]} | {"kl": "k1_kl"}
        pair["metrics"] = {names[name]: value for name, value in pair["metrics"].items()}
    assert _json(document) == _json(part)


def _artefacts(run_dir: Path) -> dict[str, Any]:
    """The manifest of a made run: checksums depend on the version of pyarrow, so that is told."""
    manifest = json.loads((make_run(run_dir / "run") / "manifest.json").read_text("utf-8"))
    for entry in manifest["artefacts"].values():
        entry.pop("made_with", None)  # versions of this environment
    hashes = {name: spec_hash(from_json(CheckSpec, _run(name)["spec"])) for name in EXAMPLES}
    return {"pyarrow": pa.__version__, "spec_hashes": hashes, **manifest}


def _run(name: str) -> dict[str, Any]:
    document = json.loads(_golden(f"example-{name}", "report.json").read_text("utf-8"))
    return document["run"]


def test_artefacts_are_the_same_bytes_made_by_the_same_hash(tmp_path: Path) -> None:
    """A run of an earlier commit goes on: nothing that resuming compares has changed."""
    golden, now = json.loads(ARTEFACTS.read_text("utf-8")), _artefacts(tmp_path)
    if golden["pyarrow"] != now["pyarrow"]:
        for entry in (*golden["artefacts"].values(), *now["artefacts"].values()):
            entry.update(sha256="", bytes=0, inputs={})
        golden["pyarrow"] = now["pyarrow"]
    assert now == golden


if __name__ == "__main__":
    for maker in MAKERS:
        for suffix, text in rendered(maker).items():
            _golden(maker, suffix).write_text(text, "utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        ARTEFACTS.write_text(_json(_artefacts(Path(scratch))), "utf-8")
