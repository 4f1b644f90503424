"""Where the mismatch sits."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch.reports.figures import comparable
from mismatch.reports.sections.tokens import of_tokens, places
from tests.reports_fixture import make_empty_report, make_report, make_tokens


def test_every_figure_is_drawn_once_where_there_are_tokens() -> None:
    drawn = [figure.draw() for figure in of_tokens(make_report(), make_tokens()).figures]
    assert len(drawn) == len(set(drawn)) == 4
    assert all(svg.startswith("<svg") for svg in drawn)
    empty, tokens = make_empty_report()
    nothing = of_tokens(empty, tokens)
    assert nothing.figures == ()


def test_places_see_a_planted_contrast() -> None:
    tokens = make_tokens(scale=1.0)
    flipped = tokens["routing_flips"].to_numpy() > 0
    tokens["delta"] = np.where(flipped, 0.5, 0.01)
    said = " ".join(places(comparable(tokens)))
    assert "are off 50× as far as the others" in said
    assert "Early and late tokens of the responses are off alike." in said
    tokens["delta"] = np.where(tokens["position"] > 100, 0.5, 0.01)
    assert "Late tokens" in " ".join(places(comparable(tokens)))


def test_places_without_data_or_mismatch() -> None:
    assert places(comparable(make_empty_report()[1]))[0].startswith("Unknown")
    assert places(make_tokens().assign(delta=0.0)) == [
        "Nowhere: delta is exactly 0 for every token."
    ]


@pytest.mark.parametrize(("unlikely", "sure", "words"), [(0.5, 0.1, "5.0×"), (0.1, 0.5, "0.20×")])
def test_captions_are_of_this_runs_data(unlikely: float, sure: float, words: str) -> None:
    tokens = make_tokens()
    likely = np.exp(tokens["rollout_logprob"].to_numpy()) >= 0.1
    tokens["delta"] = -np.where(likely, sure, unlikely)
    captions = {each.name: each.caption for each in of_tokens(make_report(), tokens).figures}
    assert f"are off {words} as far" in captions["by-probability"]
    assert ("as rounding does" in captions["by-probability"]) == (unlikely > sure)
    assert "none is off by over 2×" in captions["histogram"]
    late = tokens["position"] > tokens["position"].median()
    tokens["delta"] = np.where(late, -1.0, 0.01)
    captions = {each.name: each.caption for each in of_tokens(make_report(), tokens).figures}
    assert "100 % of them lower in training" in captions["histogram"]
    assert "Late tokens" in captions["by-position"]
    tokens["delta"] *= np.where(np.arange(len(tokens)) % 2, 1.0, -1.0)
    captions = {each.name: each.caption for each in of_tokens(make_report(), tokens).figures}
    assert "on both sides" in captions["histogram"]
