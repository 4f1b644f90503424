"""Where the mismatch sits."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mismatch.reports.formatting import number
from mismatch.reports.sections import tokens as figures
from mismatch.reports.sections.tokens import section
from tests.reports_fixture import make_empty_report, make_report, make_tokens
from tests.texts import numbers


def test_every_figure_is_drawn_once_where_there_are_tokens() -> None:
    drawn = [figure.draw() for figure in section(make_report(), make_tokens()).figures]
    assert len(drawn) == len(set(drawn)) == 2
    assert all(svg.startswith("<svg") for svg in drawn)
    empty, tokens = make_empty_report()
    nothing = section(empty, tokens)
    assert nothing.figures == ()


def test_without_data_or_mismatch_a_sentence_says_so() -> None:
    assert section(*make_empty_report()).sentences[0].startswith("Unknown")
    same = section(make_report(), make_tokens().assign(delta=0.0))
    assert list(same.sentences) == [figures.NOWHERE]


def test_titles_are_findings_of_this_runs_data() -> None:
    tokens = make_tokens()

    def titles() -> dict[str, str]:
        return {each.name: each.title for each in section(make_report(), tokens).figures}

    tokens["delta"] = 0.1
    assert numbers(titles()["histogram"]) == [5_142, 2]  # tokens, and times off: none is
    after = tokens["position"] > tokens["position"].median()
    tokens["delta"] = np.where(after, -1.0, 0.01)
    assert numbers(titles()["histogram"]) == [round(100 * after.mean()), 5_142, 2, 100]
    assert "less likely" in titles()["histogram"]
    assert "one-sided" in titles()["histogram"]
    tokens["delta"] *= np.where(np.arange(len(tokens)) % 2, 1.0, -1.0)
    assert "both ways" in titles()["histogram"]


def test_the_histogram_tells_before_and_after_the_best_fix() -> None:
    tokens = make_tokens()
    tokens["delta"] = np.where(np.arange(len(tokens)) % 4 == 0, -1.0, 0.0)
    tokens["train_logprob"] = tokens["rollout_logprob"] + tokens["delta"]
    before = section(make_report(), tokens).figures[0]
    assert figures.OF_FIX not in before.draw()
    fixed = tokens.assign(fix="attention-sinks", fix_logprob=tokens["rollout_logprob"] + 0.01)
    after = section(make_report(), fixed).figures[0]
    assert after.title.startswith(before.title)
    assert after.title.endswith("attention-sinks none")
    assert figures.OF_FIX in after.draw()
    assert f"{number(0.01)}, largest {number(0.01)}" in after.draw()
    half = fixed.assign(fix_logprob=fixed["rollout_logprob"] + np.arange(len(tokens)) % 2)
    assert section(make_report(), half).figures[0].title.endswith("attention-sinks 50 %")


def test_the_scatter_says_how_far_sure_and_unlikely_tokens_are_off() -> None:
    n = 4 * figures.LEAST
    rollout = np.log(np.where(np.arange(n) % 2, 0.95, 0.05))
    tokens = pd.DataFrame({"rollout_logprob": rollout})
    tokens["delta"] = np.where(np.arange(n) % 2, 0.002, 0.3)
    tokens["train_logprob"] = rollout + tokens["delta"]
    assert numbers(figures.off_by_class(tokens)) == [0.3, 0.1, 0.002, 0.9]
    assert numbers(figures.off_by_class(tokens[:8])) == [0.151]
    assert "<svg" in figures.logprobs(tokens.assign(train_logprob=-99.0)).draw()
