"""Where the mismatch sits."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch.reports.contrasts import late, unlikely
from mismatch.reports.figures import comparable
from mismatch.reports.sections.tokens import of_tokens, places
from tests.reports_fixture import make_empty_report, make_report, make_tokens


def test_every_figure_is_drawn_once_where_there_are_tokens() -> None:
    drawn = [figure.draw() for figure in of_tokens(make_report(), make_tokens()).figures]
    assert len(drawn) == len(set(drawn)) == 2
    assert all(svg.startswith("<svg") for svg in drawn)
    empty, tokens = make_empty_report()
    nothing = of_tokens(empty, tokens)
    assert nothing.figures == ()


def test_places_see_a_planted_contrast() -> None:
    tokens = make_tokens(scale=1.0)
    flipped = tokens["routing_flips"].to_numpy() > 0
    tokens["delta"] = np.where(flipped, 0.5, 0.01)
    said = " ".join(places(comparable(tokens)))
    assert "their error is 50× that of the rest" in said
    assert not late(comparable(tokens)).sentence.startswith("Grows")  # type: ignore[union-attr]
    tokens["delta"] = np.where(tokens["position"] > 100, 0.5, 0.01)
    assert late(comparable(tokens)).sentence.startswith("Grows")  # type: ignore[union-attr]


def test_places_without_data_or_mismatch() -> None:
    assert places(comparable(make_empty_report()[1]))[0].startswith("Unknown")
    assert places(make_tokens().assign(delta=0.0)) == [
        "Nowhere: delta is exactly 0 for every token."
    ]


@pytest.mark.parametrize(
    ("unsure", "sure", "start"),
    [(0.5, 0.1, "Unlikely tokens (p < 0.1) have 5.0×"), (0.1, 0.5, "Unusual: confident tokens")],
)
def test_sentences_are_of_this_runs_data(unsure: float, sure: float, start: str) -> None:
    tokens = make_tokens()
    likely = np.exp(tokens["rollout_logprob"].to_numpy()) >= 0.1
    tokens["delta"] = -np.where(likely, sure, unsure)
    contrast = unlikely(tokens)
    assert contrast is not None
    assert contrast.sentence.startswith(start)
    assert "5.0×" in contrast.sentence
    assert contrast.ratio == pytest.approx(unsure / sure)


def test_titles_are_findings_of_this_runs_data() -> None:
    tokens = make_tokens()

    def titles() -> dict[str, str]:
        return {each.name: each.title for each in of_tokens(make_report(), tokens).figures}

    tokens["delta"] = 0.1
    assert titles()["histogram"].startswith("No token of 5,142")
    after = tokens["position"] > tokens["position"].median()
    tokens["delta"] = np.where(after, -1.0, 0.01)
    assert "100 % of these are less likely in training: one-sided" in titles()["histogram"]
    assert titles()["by-position"].startswith("Grows with position")
    tokens["delta"] *= np.where(np.arange(len(tokens)) % 2, 1.0, -1.0)
    assert "both ways" in titles()["histogram"]
