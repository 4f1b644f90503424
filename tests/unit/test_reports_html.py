"""The HTML report and its figures: data, escaping, self-containment, determinism."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from mismatch.reports.html import to_html
from mismatch.reports.sections import tokens as figures
from mismatch.types import Check, NotTested
from tests.reports_fixture import (
    HOSTILE,
    make_empty_report,
    make_failing_report,
    make_report,
    make_tokens,
)
from tests.texts import numbers

TOKEN_LINK = re.compile(r"#(s\d+t\d+|tokens&\S+)")  # of the explorer, whose script follows it
TEMPLATE = "{{ 7 * 7 }}"  # of HOSTILE
VOID = {"meta", "br", "img", "hr", "link", "input"}
TAGS = """
    html head meta title style body header main footer section nav a div span p h1 h2 h3 h4 strong
    small code pre mark bdi i ul li dl dt dd table caption thead tbody tr th td details summary
    figure figcaption svg g path text tspan use defs clippath rect
"""
OF_EXPLORER = "label select option input button b script"
ALLOWED = {*TAGS.split(), *OF_EXPLORER.split()}


class Page(HTMLParser):
    """Tags, attributes and text of a document; complains where tags do not nest."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(document)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def document() -> str:
    tokens = make_tokens()
    return to_html(make_report(tokens), tokens)


@pytest.fixture(scope="module")
def page(document: str) -> Page:
    return Page(document)


def test_the_verdict_comes_first_then_what_to_do_then_the_numbers(page: Page) -> None:
    order = [
        "✓ Healthy",
        "rollout vllm:decode, trainer",
        "Next ",
        "mean |delta|, nats",
        "Noise of this run",
    ]
    places = [page.words.index(text) for text in order]
    assert places == sorted(places)


def test_links_lead_to_sections_of_the_page_and_nowhere_else(document: str) -> None:
    links = re.findall(r'<a href="([^"]*)"', document)
    links = [link for link in links if not TOKEN_LINK.fullmatch(link)]
    assert len(links) >= 6
    for link in links:
        assert f'<section id="{link.removeprefix("#")}">' in document, link


def test_hostile_tokens_are_only_text(page: Page, document: str) -> None:
    assert set(page.tags) <= ALLOWED  # no image, no stylesheet
    assert page.tags.count("script") == 2  # the explorer's, and its data
    assert "<img src=x onerror=alert(1)>" in page.words  # seen, as text
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert TEMPLATE in page.words
    assert "⟨202E⟩gnp.exe" in page.words
    for character in "\x00\x07\x1b\u202e\u202c":
        assert character not in document
    assert len(HOSTILE) == 9


@pytest.mark.slow
def test_hostile_names_are_only_text() -> None:
    attack = '"><script>alert(1)</script>'
    report = make_report()
    hostile = replace(
        report,
        model=attack,
        checks=(Check(attack, "failed", attack, attack),),
        not_tested=(NotTested(attack, attack, attack),),
        fingerprints=report.fingerprints | {attack: {"engine": attack}},
        run=report.run | {"command": attack, "created": attack, "versions": {attack: attack}},
    )
    page = Page(to_html(hostile, make_tokens()))
    assert set(page.tags) <= ALLOWED
    assert page.tags.count("script") == 2
    assert page.words.count("<script>alert(1)</script>") > 6


def test_nothing_is_fetched(page: Page, document: str) -> None:
    fetching = {"src", "srcset", "action", "data", "poster", "background"}
    assert not [item for item in page.attributes if item[1] in fetching]
    links = [value for _, name, value in page.attributes if name in {"href", "xlink:href"}]
    assert all(value.startswith("#") for value in links)
    assert not re.search(r"@import|url\((?!#)", document)
    assert "default-src 'none'" in document


def test_ids_are_unique(page: Page) -> None:
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [value for _, name, value in page.attributes if name == "href"]
    local = {link[1:] for link in links if not TOKEN_LINK.fullmatch(link)}
    assert local <= set(ids)


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(document: str) -> None:
    tokens = make_tokens()
    assert to_html(make_report(tokens), tokens) == document


@pytest.mark.slow
def test_a_user_style_does_not_restyle_the_report(document: str) -> None:
    import matplotlib as mpl

    tokens = make_tokens()
    with mpl.rc_context({"axes.xmargin": 0.4, "xtick.direction": "in", "font.size": 30}):
        assert to_html(make_report(tokens), tokens) == document


@pytest.mark.slow
def test_half_a_million_tokens_stay_small() -> None:
    rng = np.random.default_rng(0)
    base = make_tokens()
    big = pd.concat([base.assign(sequence=base["sequence"] + 64 * i) for i in range(100)])
    big["rollout_logprob"] = -rng.gamma(0.5, 1.5, len(big))
    big["delta"] = 0.3 * rng.standard_normal(len(big))
    big["train_logprob"] = np.minimum(big["rollout_logprob"] + big["delta"], 0)
    assert len(big) > 500_000
    assert len(to_html(make_report(), big).encode()) < 3_000_000


def test_colours_follow_the_scheme(document: str) -> None:
    svg = "".join(re.findall(r"<svg.*?</svg>", document, flags=re.DOTALL))
    assert "var(--accent)" in svg
    assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{3,6}", svg)
    assert "prefers-color-scheme: dark" in document


def test_histogram_counts_every_token_and_is_centred_on_ratio_one() -> None:
    delta = np.array([-0.5, 0.0, 0.0, 0.25, 0.5, 50.0])
    counts, edges = figures.ratio_histogram(delta)
    assert counts.sum() == 6  # beyond the axis: in its last bin
    assert (counts[len(counts) // 2], counts[-1]) == (2, 1)
    assert edges[0] * edges[-1] == pytest.approx(1)
    identical, edges = figures.ratio_histogram(np.zeros(7))
    assert identical.sum() == 7
    assert edges[-1] >= figures.NEAREST  # every band of the field is on the axis


def test_the_histograms_words_are_counts_of_its_ratios() -> None:
    tokens = pd.DataFrame({"delta": np.log([1.0] * 70 + [1.3] * 10 + [3.0] * 10 + [6.0] * 10)})
    counts = figures.beyond(tokens)
    for wanted in ("100 tokens", "30 % lie outside", "20 % over TIS's cap of 2;", "10 % outside"):
        assert wanted in counts
    far = figures.beyond(tokens.assign(delta=-9.0))
    assert len(numbers(far)) == len(numbers(counts)) + 1  # and how many are beyond the axis
    assert numbers(far)[-1] == 100  # the tokens beyond the axis


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_failing_report, make_empty_report])
def test_failing_and_empty_reports_render(make) -> None:  # type: ignore[no-untyped-def]
    report, tokens = make()
    page = Page(to_html(report, tokens))
    assert "Broken" in page.words
    assert report.checks[-1].fix in page.words
    assert ("svg" in page.tags) == bool(report.comparisons)
