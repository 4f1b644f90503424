"""What a screen reader says of every picture: values, not the kind of chart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure as Drawing

from mismatch.features.loop import section as loop
from mismatch.features.loop.judge import LoopReport, SeedRun
from mismatch.reports import sections
from mismatch.reports.section import Figure, Section
from tests.report_makers import EMPTY, MAKERS
from tests.unit.test_loop_page import runs

ROOT = Path(sections.__file__).parent
NAMED = re.compile(r'Figure\(\s*f?"([^"]+)"')


def figures(parts: Iterable[Section]) -> Iterator[Figure]:
    for part in parts:
        yield from part.figures
        yield from figures(part.parts)


def trained() -> LoopReport:
    """A loop with three steps of every column."""
    report = runs("plain", [0.1, 0.5, 0.2])
    curves = dict.fromkeys(loop.PANELS, (0.1, 0.5, 0.2)) | {"step": (0.0, 1.0, 2.0)}
    return replace(report, arms=(replace(report.arms[0], runs=(SeedRun(0, curves),)),))


def every_figure() -> Iterator[Figure]:
    for maker in MAKERS.values():
        report, tokens = maker()
        yield from figures(sections.page(report, tokens).sections)
    yield from figures([loop.section(trained())])


def test_every_picture_says_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drawing, "savefig", lambda figure, file, **_: file.write(EMPTY))
    titles = {figure.name: re.search("<title[^>]*>(.*?)</title>", figure.draw(), re.DOTALL)
            for figure in every_figure()}  # fmt: skip
    for name, title in titles.items():
        assert title is not None, name
        assert re.findall(r"\d", re.sub(r"\bp99\b|\bk3\b", "", title[1])), (name, title[1])
    sources = [*ROOT.glob("*.py"), ROOT.parent / "saved_runs.py"]
    sources += (ROOT.parents[1] / "features").glob("*/section.py")
    figures = [name for path in sources for name in NAMED.findall(path.read_text("utf-8"))]
    assert len(figures) >= 8
    for name in figures:  # no picture of the package is left out
        pattern = re.sub(r"\{[^}]*\}", ".+", name)
        assert any(re.fullmatch(pattern, drawn) for drawn in titles), name
