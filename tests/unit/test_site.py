"""The documentation site: its navigation, links, word limits, and the part that the code makes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from mismatch.analysis.thresholds import COLUMNS
from mismatch.cli.main import summaries
from mismatch.features.presets.rules import NAMES
from mismatch.metrics import METRICS
from mismatch.models import ALIASES
from mismatch.pipeline.document import schema
from tools import annotate_report, site_pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST_WORDS_OF_A_PAGE = 900  # outside tables and code
CATALOGUES = ("reference/", "evidence/gallery.md")  # to look up, not to read: free
MOST_WORDS = 43_800  # of all pages and the README, as `wc -w` counts; whoever cuts lowers it
RECORDS = ("decisions/",)  # not in the navigation, and not counted
LINK = re.compile(r"\]\(([^)\s]+)\)")


def written() -> dict[str, str]:
    """Return the pages that are in git, by their path below docs."""
    return {str(path.relative_to(DOCS)): path.read_text("utf-8") for path in DOCS.rglob("*.md")}


@functools.cache
def site() -> dict[str, str]:
    """Return every page as the site has it."""
    return {path: site_pages.filled(text) for path, text in written().items()} | site_pages.pages()


def in_navigation(entry: Any) -> Iterator[str]:
    """Yield the paths of a part of ``nav``."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        yield from in_navigation(list(entry.values()))
    else:
        for each in entry:
            yield from in_navigation(each)


def without_code(markdown: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", markdown, flags=re.M | re.S)


def words_of(markdown: str) -> int:
    """Count words outside tables and code."""
    prose = re.sub(r"^ *\|.*$", "", without_code(markdown), flags=re.M)
    return sum(any(map(str.isalnum, word)) for word in prose.split())


def anchors(markdown: str) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", without_code(markdown), re.M)
    plain = (re.sub(r"[^\w\s-]", "", LINK.sub("]", title)).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


def test_the_navigation_holds_every_page() -> None:
    named = list(in_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    assert len(named) == len(set(named))
    assert set(named) == {path for path in written() if not path.startswith(RECORDS)}


def test_links_and_their_anchors_resolve() -> None:
    pages, missing = site(), []
    for path, text in pages.items():
        for target in LINK.findall(without_code(text)):
            if re.match(r"[a-z]+:", target):
                continue
            place, _, anchor = unquote(target).partition("#")
            found = (DOCS / path).parent.joinpath(place).resolve() if place else DOCS / path
            name = str(found.relative_to(DOCS)) if found.is_relative_to(DOCS) else ""
            if (name not in pages and not (name and found.is_file())) or (
                anchor and anchor not in anchors(pages[name])
            ):
                missing.append((path, target))
    assert missing == []


def test_links_of_the_repository_s_own_pages_resolve() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        targets = LINK.findall((ROOT / name).read_text("utf-8"))
        paths = [target.partition("#")[0] for target in targets if "://" not in target]
        assert [path for path in paths if path and not (ROOT / path).exists()] == []


def test_pages_that_the_code_names_exist() -> None:
    folders = "start|how-to|explain|reference|evidence|contribute|decisions"
    named = {
        (path.name, found)
        for folder in ("mismatch", "tools", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".toml")
        for found in re.findall(rf"docs/(?:{folders})/[\w-]+\.md", path.read_text("utf-8"))
    }
    assert named
    assert {name for _, name in named if not (ROOT / name).is_file()} == set()


@pytest.mark.parametrize("path", [path for path in written() if not path.startswith(RECORDS)])
def test_a_page_is_short_and_ends_with_what_to_do_next(path: str) -> None:
    text = written()[path]
    assert path.startswith(CATALOGUES) or words_of(text) <= MOST_WORDS_OF_A_PAGE
    assert text.count("**Next:**") == 1
    assert len(text.partition("**Next:**")[2].strip().split("\n\n")) == 1


def test_all_pages_together_stay_short() -> None:
    pages = [text for path, text in written().items() if not path.startswith(RECORDS)]
    pages.append((ROOT / "README.md").read_text("utf-8"))
    assert sum(len(text.split()) for text in pages) <= MOST_WORDS


def test_every_variable_of_ours_has_its_line() -> None:
    page = written()["reference/environment-variables.md"]
    sources = [path.read_text("utf-8") for path in (ROOT / "mismatch").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'"(MISMATCH_[A-Z_]+)"', text)}
    assert read - {"MISMATCH_WORKER", "MISMATCH_SGLANG_ERROR"} <= set(
        re.findall(r"`(MISMATCH_[A-Z_]+)`", page)
    )


def test_every_number_in_a_picture_is_explained_below_it() -> None:
    text = written()["start/read-report.md"]
    for picture in annotate_report.PICTURES:
        _, image, below = text.partition(f"(../images/{picture.name}.png)")
        listed = re.findall(r"^(\d)\. ", below.partition("\n## ")[0], re.M)
        assert image
        assert listed == [str(number) for number, _ in enumerate(picture.places, 1)]
        page = (annotate_report.EXAMPLE / "report.html").read_text("utf-8")
        parts = re.findall(r"#([\w-]+)", " ".join(picture.places))
        assert [part for part in parts if f'id="{part}"' not in page] == []
    drawn = [annotate_report.IMAGES / f"{each.name}.png" for each in annotate_report.PICTURES]
    assert sum(path.stat().st_size for path in drawn) < 600_000


def test_the_reference_holds_what_the_code_has() -> None:
    pages = site()
    assert not any(site_pages.MARK.search(text) for text in pages.values())
    for name, metric in METRICS.items():
        assert f"| `{name}` | {site_pages.escaped(metric.meaning)}" in pages["reference/metrics.md"]
    assert all(column in pages["reference/metrics.md"] for column in COLUMNS)
    for name in summaries():
        assert f"## mismatch {name}\n" in pages["reference/command-line.md"]
    assert "--overlap" in pages["reference/command-line.md"]  # only in --help-all
    for name in ALIASES:
        assert f"| `{name}` |" in pages["reference/models.md"]
    for name in NAMES:
        assert f"### `--framework {name}`" in pages["reference/trainer-presets.md"]
    for item in schema()["$defs"].values():
        for field in item.get("properties", {}):
            assert f"| `{field}` |" in pages["reference/report-json.md"]
