"""One quantity has one value on a page, wherever it is shown and however it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from mismatch.reports.section import Section, cell_text
from mismatch.reports.sections import page, square
from mismatch.types import Estimate, Report
from tests.report_makers import EXAMPLES, MAKERS, report_of

NUMBER = r"(−?[\d,]*\.?\d+(?:e-?\d+)?)( %)?"
# Quantity -> how a sentence says it, of the headline's two sides.
SAID = {
    "logprob_abs_diff_mean": rf"mean \|delta\| {NUMBER} nats",
    "k3_kl": rf"(?:^|[;.] )[kK]3 (?:from )?{NUMBER}",
    "exact_kl": rf"exact KL: {NUMBER} nats",
    "clip_fraction": rf"would clip {NUMBER} of tokens",
    "ess_seq": rf"weights keep {NUMBER} of the batch",
    "ratio_outside_2": rf"{NUMBER} of tokens differ by more",
    "routing_disagree_layer": rf"{NUMBER} of choices differ",
    "routing_near_tie_flipped": rf"[rR]ounding explains {NUMBER}(?: \([^)]*\))? of the",
}


def walk(sections: tuple[Section, ...]) -> Iterator[Section]:
    for section in sections:
        yield section
        yield from walk(tuple(section.parts))


def read(text: str, share: bool) -> tuple[float, float]:
    """Return the number of a text, and half a unit of its last digit."""
    plain = text.replace("−", "-").replace(",", "")
    mantissa, _, exponent = plain.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    scale = 100.0 if share else 1.0
    return float(plain) / scale, 0.5 * unit / scale


def shown(report: Report) -> Iterator[tuple[str, str, bool]]:
    """Yield (metric, number, whether in percent) of every place of a page that says a metric."""
    whole = page(report)
    sections = list(walk(whole.sections))
    texts = [whole.lead, whole.reason, *(answer.text for answer in whole.answers)]
    texts += [text for part in sections for text in part.sentences]
    texts += [text for part in sections for figure in part.figures for text in (figure.title,)]
    for metric, words in SAID.items():
        for text in texts:
            for found in re.finditer(words, text):
                yield metric, found[1], bool(found[2])
    estimates = report.comparisons[0].metrics | report.comparisons[0].routing
    tables = [table for part in sections for table in part.tables]
    for table in [*tables, *([whole.table] if whole.table else [])]:
        for row in table.cells():
            for cell, column in zip(row, table.columns, strict=True):
                for metric in SAID:
                    if isinstance(cell.value, Estimate) and cell.value == estimates.get(metric):
                        found = re.match(NUMBER, cell_text(cell, column))
                        assert found is not None
                        yield metric, found[1], bool(found[2])


@pytest.mark.parametrize("name", [*(f"example-{name}" for name in EXAMPLES), "healthy"])
def test_a_page_has_one_value_for_a_quantity(name: str) -> None:
    report, _ = report_of(name)
    estimates = report.comparisons[0].metrics | report.comparisons[0].routing
    places = list(shown(report))
    assert len({metric for metric, _, _ in places}) >= 4
    for metric, text, share in places:
        value, room = read(text, share)
        assert value == pytest.approx(estimates[metric].value, abs=1.01 * room), (metric, text)
        assert "e" not in text, "a table writes it without a power of ten"


def test_the_planted_second_value_is_found() -> None:
    report, _ = report_of("healthy")
    mean = report.comparisons[0].metrics["logprob_abs_diff_mean"].value
    found = re.search(SAID["logprob_abs_diff_mean"], f"mean |delta| {1.2 * mean:.3g} nats")
    assert found is not None
    value, room = read(found[1], bool(found[2]))
    assert value != pytest.approx(mean, abs=room)


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_a_fault_is_not_called_rounding_and_no_title_is_of_a_side_pass(name: str) -> None:
    report, _ = report_of(name)
    result = report.result("square")
    if result is None:
        return
    beyond = {finding.scoring for finding in result.findings if finding.standing == "beyond"}
    for text in square.sentences(result):
        assert "round" not in text or not any(scoring in text for scoring in beyond)
    headline = {report.comparisons[0].rollout, report.comparisons[0].train}
    for figure in square.section(result, report).figures:
        assert any(side in figure.title for side in headline)
        assert ":regrouped" not in figure.title
