"""The token explorer in a real browser: what it shows is what the table holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mismatch.reports.html import to_html
from tests.browser.chromium import Browser
from tests.browser.test_html_report import CONTRAST
from tests.explorer_fixture import many
from tests.reports_fixture import HOSTILE, make_failing_report, make_report

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
WORST = (7, 60)  # sequence, row in it
STATE = "document.getElementById('explorer').dataset.ready"
TOKEN = "document.getElementById('explorer').dataset.token"
MATCHES = "+document.getElementById('explorer').dataset.matches"


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    tokens = many(sequences=40)
    texts = tokens["token"].to_numpy(object).copy()
    texts[: len(HOSTILE)] = HOSTILE
    texts[20:23] = ["x" * 100_000, FAMILY, "{{7*7}}"]
    texts[340:342] = [" Forty", "-two"]  # two tokens that a search has to join
    tokens["token"] = texts
    tokens["turn"] = 1 + (np.arange(len(tokens)) % 100 >= 70)
    tokens["token_class"] = np.where(np.arange(len(tokens)) % 10 == 3, "digit", "word")
    row = 100 * WORST[0] + WORST[1]
    tokens.loc[row, "delta"] = -4.0
    for name, share in (("train", 1.0), ("fix", 0.5), ("reference", 0.1)):
        tokens[f"{name}_logprob"] = tokens["rollout_logprob"] + share * tokens["delta"]
    return tokens


@pytest.fixture(scope="module")
def url(table: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explorer") / "report.html"
    path.write_text(to_html(make_report(), table), encoding="utf-8")
    return path.as_uri()


def show(browser: Browser, url: str, link: str = "", **window: Any) -> None:
    browser.open(url + link, **window)
    browser.evaluate("document.getElementById('explorer').closest('details').open = true")
    browser.evaluate("document.getElementById('explorer').scrollIntoView()")
    browser.wait(f"{STATE} === 'yes'")


def press(browser: Browser, *keys: str) -> None:
    for key in keys:
        browser.page.locator("[data-part=list]").press(key)


def choose(browser: Browser, part: str, value: str, event: str = "input") -> None:
    """Set a control, and wait until what it asks for is shown."""
    browser.evaluate(
        f"(() => {{ const node = document.querySelector('[data-part={part}]');"
        f"node.value = {value!r}; document.getElementById('explorer').dataset.ready = 'no';"
        f"node.dispatchEvent(new Event('{event}', {{bubbles: true}})); }})()"
    )
    browser.wait(f"{STATE} === 'yes'")


def card(browser: Browser) -> dict[str, str]:
    pairs = browser.evaluate(
        "[...document.querySelectorAll('[data-part=card] dt')].map("
        "d => [d.textContent, d.nextElementSibling.textContent])"
    )
    return {str(name): str(text) for name, text in pairs}


def address(table: pd.DataFrame, row: int) -> str:
    return f"s{table['sequence'][row]}t{table['position'][row]}"


def test_it_opens_at_the_worst_token_with_its_numbers(
    browser: Browser, url: str, table: pd.DataFrame
) -> None:
    show(browser, url)
    assert browser.problems == []
    assert browser.requests == [url]
    row = int(table["delta"].abs().idxmax())
    assert browser.evaluate(TOKEN) == address(table, row)
    facts = card(browser)
    left = table["rollout_logprob"][row]
    assert float(facts["rollout logprob"].split()[0].replace("−", "-")) == pytest.approx(left, 0.01)
    assert float(facts["train logprob"].split()[0].replace("−", "-")) == pytest.approx(
        left - 4.0, rel=0.01
    )
    assert facts["Δ, ratio"] == f"−4 nats, {math.exp(-4):.4f}×"
    layers = list(table["routing_flipped_layers"][row])
    assert facts["flipped layers"] == (", ".join(map(str, layers)) or "none")
    assert facts["reward"] == str(int(table["reward"][row]))
    assert "Δ −2)" in facts["with a-fix"]
    assert "Δ −0.4)" in facts["float32 logprob"]
    hidden = "getComputedStyle(document.querySelector('.explorer .still')).display"
    assert browser.evaluate(hidden) == "none"


def test_tokens_are_chosen_by_probability_place_prompt_and_reward_and_exported(
    browser: Browser, url: str, table: pd.DataFrame
) -> None:
    show(browser, url)
    place = table.groupby("sequence").cumcount() + 1
    wanted = {
        "chance": ("0.5", np.exp(table["rollout_logprob"]) <= 0.5),
        "from": ("11", place >= 11),
        "to": ("40", place <= 40),
        "prompt": ("2", table["prompt"] == 2),
        "reward": ("0", table["reward"] <= 0),
    }
    for part, (value, fits) in wanted.items():
        choose(browser, part, value)
        # A byte a token: a value beside the bound may fall on its other side.
        assert browser.evaluate(MATCHES) == pytest.approx(fits.sum(), rel=0.02), part
        choose(browser, part, "")
    choose(browser, "least", "3.9")
    with browser.page.expect_download() as asked:
        browser.page.locator("[data-part=export]").click()
    rows = pd.read_csv(asked.value.path())
    far = table[table["delta"].abs() >= 3.9]
    assert len(rows) == len(far) == browser.evaluate(MATCHES)
    assert rows["delta"].to_numpy() == pytest.approx(far["delta"].to_numpy(), rel=0.02)
    choose(browser, "least", "")


def test_keys_walk_by_size_by_token_and_by_sequence(
    browser: Browser, url: str, table: pd.DataFrame
) -> None:
    show(browser, url)
    ranked = table["delta"].abs().sort_values(ascending=False, kind="stable").index
    press(browser, "j", "j")
    assert browser.evaluate(TOKEN) == address(table, ranked[2])
    press(browser, "k")
    assert browser.evaluate(TOKEN) == address(table, ranked[1])
    assert browser.evaluate("location.hash") == "#" + address(table, ranked[1])
    press(browser, "ArrowRight")
    assert browser.evaluate(TOKEN) == address(table, ranked[1] + 1)
    press(browser, "ArrowUp", "ArrowUp", "ArrowUp", "ArrowUp")
    selected = "[...document.querySelectorAll('.strip[aria-selected=true]')].map(r => r.dataset.n)"
    assert browser.evaluate(selected) == [str(WORST[0])]  # the first of the list


def test_a_link_leads_to_its_token_and_a_foreign_one_says_so(
    browser: Browser, url: str, table: pd.DataFrame
) -> None:
    show(browser, url, "#s3t43")
    assert browser.evaluate(TOKEN) == "s3t43"
    current = "document.querySelector('[data-part=body] [aria-current]').textContent"
    assert browser.evaluate(current) == table["token"][340]
    browser.evaluate("location.hash = '#s5t20'")
    browser.wait(f"{TOKEN} === 's5t20'")
    browser.evaluate("location.hash = '#s999t20'")
    browser.wait("document.querySelector('[data-part=count]').textContent.includes('999')")
    links = browser.evaluate("[...document.querySelectorAll('.still a')].map(a => a.hash)")
    assert links[0] == f"#s{WORST[0]}t{WORST[1] + 3}"


def test_filters_leave_what_the_table_says(browser: Browser, url: str, table: pd.DataFrame) -> None:
    show(browser, url)
    choose(browser, "kind", "digit", "change")
    digits = table["token_class"] == "digit"
    assert browser.evaluate(MATCHES) == digits.sum()
    choose(browser, "layer", "6", "change")
    flipped = table["routing_flipped_layers"].map(lambda layers: 6 in layers)
    assert browser.evaluate(MATCHES) == (digits & flipped).sum()
    choose(browser, "turn", "2", "change")
    assert browser.evaluate(MATCHES) == (digits & flipped & (table["turn"] == 2)).sum()
    choose(browser, "turn", "", "change")
    choose(browser, "kind", "", "change")
    choose(browser, "layer", "", "change")
    least = np.sort(table["delta"].abs())[-501:-499].mean()  # among those that are exact
    choose(browser, "least", f"{least:.9f}")
    assert browser.evaluate(MATCHES) == 500


def test_a_group_of_tokens_leads_to_its_tokens(
    browser: Browser, url: str, table: pd.DataFrame
) -> None:
    show(browser, url, "#tokens&kind=digit&from=11")
    fits = (table["token_class"] == "digit") & (table.groupby("sequence").cumcount() >= 10)
    browser.wait(f"{MATCHES} === {fits.sum()}")


def test_a_broken_run_opens_it_at_the_worst_token(
    browser: Browser, table: pd.DataFrame, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(to_html(make_failing_report()[0], table), encoding="utf-8")
    browser.open(path.as_uri())
    browser.wait(f"{STATE} === 'yes'")
    assert browser.evaluate(TOKEN) == address(table, int(table["delta"].abs().idxmax()))
    seen = "document.querySelector('[data-part=%s]').checkVisibility()"
    assert browser.evaluate(seen % "body")
    assert not browser.evaluate(seen % "list")
    browser.page.locator("[data-part=more]").click()
    assert browser.evaluate(seen % "list")
    browser.wait("document.querySelectorAll('.strip').length > 3")
    assert browser.problems == []


def test_search_joins_tokens_and_takes_patterns(browser: Browser, url: str) -> None:
    show(browser, url)
    choose(browser, "text", "forty-TWO")
    assert browser.evaluate(MATCHES) == 2
    assert browser.evaluate(TOKEN) in ("s3t43", "s3t44")
    strips = "[...document.querySelectorAll('.strip')].map(r => r.dataset.n)"
    assert browser.evaluate(strips) == ["3"]  # sequences without a match are not listed
    browser.evaluate("document.querySelector('[data-part=regex]').click()")
    choose(browser, "text", "Fort[a-y]+-tw.")
    assert browser.evaluate(MATCHES) == 2
    browser.evaluate("document.querySelector('[data-part=text]').value = '('")
    browser.evaluate("document.querySelector('[data-part=text]').dispatchEvent(new Event('input'))")
    browser.wait("document.querySelector('[data-part=text]').hasAttribute('aria-invalid')")
    assert browser.problems == []


def test_every_way_to_colour_and_to_sort(browser: Browser, url: str, table: pd.DataFrame) -> None:
    show(browser, url)
    modes = browser.evaluate(
        "[...document.querySelector('[data-part=mode]').options].map(o => o.value)"
    )
    assert modes == ["delta", "ratio", "fix", "cause", "flips", "entropy"]
    seen = set()
    for mode in modes:
        browser.evaluate(
            f"(() => {{ const m = document.querySelector('[data-part=mode]'); m.value = '{mode}';"
            "m.dispatchEvent(new Event('change')); })()"
        )
        seen.add(browser.evaluate("document.querySelector('.strip canvas').toDataURL()"))
    assert len(seen) == len(modes)
    means = table["delta"].abs().groupby(table["sequence"]).mean()
    wanted = {"mean": means.idxmax(), "run": 0, "worst": WORST[0]}
    for sort, first in wanted.items():
        browser.evaluate(
            f"(() => {{ const m = document.querySelector('[data-part=sort]'); m.value = '{sort}';"
            "m.dispatchEvent(new Event('change')); "
            "document.querySelector('[data-part=list]').scrollTop = 0; })()"
        )
        top = "[...document.querySelectorAll('.strip')].find(r => r.style.top === '0px')"
        browser.wait(f"{top} !== undefined")
        assert browser.evaluate(f"{top}.dataset.n") == str(first)


def test_only_what_is_on_the_screen_is_drawn(browser: Browser, url: str) -> None:
    show(browser, url)
    count = "document.querySelectorAll('.strip').length"
    assert browser.evaluate(count) < 25
    browser.evaluate("document.querySelector('[data-part=list]').scrollTop = 1e6")
    last = "[...document.querySelectorAll('.strip')].some(r => parseInt(r.style.top) === 39 * 44)"
    browser.wait(last)
    assert browser.evaluate(count) < 25


def test_prompts_and_likely_tokens_are_shown(browser: Browser, url: str) -> None:
    show(browser, url, "#s0t3")  # the first row has its prompt before it and both sides' outcomes
    assert browser.evaluate("document.querySelector('.explorer .given').textContent") == " q0 is?"
    rows = browser.evaluate(
        "[...document.querySelectorAll('[data-part=card] tbody tr')].map(r => "
        "[...r.children].map(c => c.textContent))"
    )
    assert rows == [["</script>", "0.607", "0"], ["b", "0.050", "0.368"], ["c", "< 0.050", "0.135"]]


def test_hostile_tokens_are_text(browser: Browser, url: str) -> None:
    show(browser, url, "#s0t3")
    shown = browser.evaluate(
        "[...document.querySelectorAll('[data-part=body] b')].map(b => b.textContent)"
    )
    assert shown[0] == HOSTILE[0]
    assert len(shown[20]) == 60  # a token of 100,000 characters
    assert shown[21] == FAMILY
    assert not set("".join(shown)) & set("\u202e\u202c\x1b\x00\x07")
    assert browser.evaluate("document.querySelectorAll('img, iframe').length") == 0
    assert browser.evaluate("document.querySelectorAll('.explorer script').length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") <= 1280
    assert browser.problems == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_can_be_read_and_reached_everywhere(
    browser: Browser, url: str, dark: bool, width: int
) -> None:
    show(browser, url, dark=dark, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    ratio, where = browser.evaluate(
        CONTRAST.replace("span, text", "span, b, bdi, dt, dd, label, button")
    )
    assert ratio >= 4.5, where
    unnamed = browser.evaluate(
        "[...document.querySelectorAll('.explorer select, .explorer input, .explorer button,"
        ".explorer [tabindex]')].filter(n => !(n.closest('label') || n.getAttribute('aria-label')"
        " || n.textContent.trim())).length"
    )
    assert unnamed == 0
    stuck = browser.evaluate(
        "[...document.querySelectorAll('.explorer .live *')].filter(n => "
        "n.scrollHeight > n.clientHeight + 1 && /auto|scroll/.test(getComputedStyle(n).overflowY)"
        " && n.tabIndex < 0).length"
    )
    assert stuck == 0


def test_paper_and_a_page_without_scripts_have_the_table(browser: Browser, url: str) -> None:
    show(browser, url)
    shown = "getComputedStyle(document.querySelector('.explorer %s')).display !== 'none'"
    browser.page.emulate_media(media="print")
    assert browser.evaluate(shown % ".still")
    assert not browser.evaluate(shown % ".live")
    browser.open(url, scripts=False)
    assert browser.evaluate(shown % ".still")
    assert not browser.evaluate(shown % ".live")
    assert browser.evaluate("document.querySelectorAll('.still tbody tr').length") == 12


def test_a_foreign_script_is_refused(browser: Browser, url: str, tmp_path: Path) -> None:
    from urllib.request import urlopen

    with urlopen(url) as file:
        page = file.read().decode()
    forged = tmp_path / "forged.html"
    forged.write_text(page.replace("</body>", "<script>window.hurt = true</script></body>"))
    browser.open(forged.as_uri())
    assert browser.evaluate("window.hurt") is None
    assert len(browser.problems) == 1
