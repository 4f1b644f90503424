"""Where a documentation site exists, a report leads into it for every cause, check and metric."""

from __future__ import annotations

import re
import tomllib
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mismatch.analysis.catalogue import catalogue
from mismatch.cli import main
from mismatch.cli.main import app
from mismatch.engines.sglang import INFO
from mismatch.metrics import METRICS
from mismatch.reports import documentation
from mismatch.reports.formatting import wording
from mismatch.reports.html import to_html
from mismatch.version import INSTALLED_FROM
from tests.report_makers import EXAMPLES, MAKERS
from tools import set_addresses, site_pages

DOCS = Path(__file__).parents[2] / "docs"
SITE = "https://docs.example/"


def text_of(page: str) -> str:
    made = site_pages.pages()
    return made.get(page) or site_pages.filled((DOCS / page).read_text("utf-8"))


def test_every_cause_check_and_metric_has_its_place() -> None:
    assert {documentation.of_cause(id) for id in catalogue()} <= set(site_pages.pages())
    checks = text_of("reference/checks.md")
    assert all(f'<a id="{id}"></a>' in checks for id in wording("checks"))
    metrics = text_of("reference/metrics.md")
    assert all(f'<a id="{name}"></a>' in metrics for name in METRICS)


@pytest.mark.parametrize("name", MAKERS)
def test_what_each_check_asks_is_written_down(name: str) -> None:
    report, _ = MAKERS[name]()
    assert {check.id for check in report.checks} <= set(wording("checks"))


def test_a_page_leads_to_places_that_exist(monkeypatch: Any) -> None:
    report, tokens = MAKERS[f"example-{EXAMPLES[-1]}"]()
    assert 'href="https://' not in to_html(report, tokens)  # a source is named, not linked
    monkeypatch.setattr(documentation, "site", lambda: SITE)
    targets = set(re.findall(rf'href="{SITE}([^"]*)"', to_html(report, tokens)))
    pages = {target.partition("/#")[0].rstrip("/") for target in targets}
    assert {"reference/checks", "reference/metrics"} < pages
    assert any(page.startswith("reference/causes/") for page in pages)
    for target in targets - {""}:
        path, _, anchor = target.partition("#")
        page = text_of(f"{path.rstrip('/')}.md")
        assert not anchor or f'<a id="{anchor}"></a>' in page, target


def test_a_release_carries_the_addresses_of_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyproject.toml", "mkdocs.yml"):
        (tmp_path / name).write_text((DOCS.parent / name).read_text("utf-8"), "utf-8")
    assert set_addresses.main("Owner/name", tmp_path) == 0
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    assert urls["Documentation"] == "https://owner.github.io/name/"
    assert (
        yaml.safe_load((tmp_path / "mkdocs.yml").read_text("utf-8"))["site_url"]
        == (urls["Documentation"])
    )
    assert set_addresses.main("Owner/name", tmp_path) == 2  # once only
    assert set_addresses.main("no repository", tmp_path) == 2

    installed = Message()
    for label, url in urls.items():
        installed["Project-URL"] = f"{label}, {url}"
    monkeypatch.setattr(documentation, "metadata", lambda _: installed)
    documentation.site.cache_clear()
    try:
        assert documentation.address("index.md") == urls["Documentation"]
        assert CliRunner().invoke(app, ["--help"]).stdout.rstrip().endswith(urls["Documentation"])
    finally:
        documentation.site.cache_clear()


def test_help_and_errors_of_a_release_name_the_site_and_those_of_a_checkout_its_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        with pytest.raises(SystemExit):
            main._complain("no such field", "docs/how-to/recorded-runs.md lists them")
        helped = CliRunner().invoke(app, ["check", "--help-all"]).stdout
        return capsys.readouterr().err + "".join(helped.split())

    files = said()
    named = set(re.findall(r"docs/[\w/-]+\.md", files))
    assert {"docs/how-to/recorded-runs.md", "docs/how-to/servers.md"} <= named
    assert all((DOCS.parent / name).is_file() for name in named)
    monkeypatch.setattr(documentation, "site", lambda: SITE)
    links = said()
    assert not re.findall(r"docs/[\w/-]+\.md", links)
    assert f"{SITE}how-to/servers/" in links


def test_the_workflows_set_the_addresses_before_they_build() -> None:
    for name, builds in (("release", "-m build"), ("docs", "make docs"), ("docs", "gh-deploy")):
        text = (DOCS.parent / ".github" / "workflows" / f"{name}.yml").read_text("utf-8")
        before = text[: text.index(builds)].rpartition("actions/checkout")[2]
        assert 'tools/set_addresses.py "$GITHUB_REPOSITORY"' in before, builds


@pytest.mark.parametrize("page", ["start/install", "how-to/sglang", "how-to/monitor", "how-to/ci"])
def test_a_fresh_environment_is_given_what_can_be_installed(page: str) -> None:
    """The distribution's name resolves only after the first release, or where it is installed."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    given = re.findall(r"pip install '?((?:\./mismatch|train-infer-mismatch)[^\s'`]*)", text)
    assert given
    assert all(each.partition("[")[0] == INSTALLED_FROM for each in given)


def test_the_action_installs_its_own_checkout() -> None:
    action = yaml.safe_load((DOCS.parent / "action.yml").read_text("utf-8"))
    assert action["inputs"]["install"]["default"] == ""
    assert '"${PACKAGE:-$GITHUB_ACTION_PATH}"' in action["runs"]["steps"][0]["run"]
    assert f"{INSTALLED_FROM}[sglang]" in INFO.install_hint
