"""What curves of known shape are said to show, and the page of them."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch.features.loop.judge import (
    Arm,
    Claim,
    LoopReport,
    SeedRun,
    at_end,
    claims,
    loop_to_json,
    reward_fall,
    running,
)
from mismatch.features.loop.section import PANELS, page, section
from mismatch.features.loop.spec import Checked
from mismatch.reports.html import show_page
from tests.tables import values
from tests.texts import numbers

STEPS = 20


def run(seed: int, reward: list[float], **curves: list[float]) -> SeedRun:
    flat = dict.fromkeys(PANELS, [0.001] * len(reward)) | {"ess_seq": [0.9] * len(reward)}
    columns = flat | {"step": list(range(len(reward))), "reward": reward} | curves
    return SeedRun(seed, {name: tuple(map(float, v)) for name, v in columns.items()})


RISE = np.linspace(0.4, 0.7, STEPS).tolist()
COLLAPSE = [*np.linspace(0.4, 0.6, 10), *np.linspace(0.6, 0.1, 10)]


def test_a_fall_is_named_at_its_step_and_a_rise_is_none() -> None:
    falls = reward_fall(run(0, COLLAPSE))
    assert falls is not None
    smooth = running(np.array(COLLAPSE))
    assert smooth[:falls].max() - smooth[falls] > 0.1 >= smooth[:falls].max() - smooth[falls - 1]
    assert reward_fall(run(0, RISE)) is None
    assert reward_fall(run(0, RISE[:2])) is None


def report(*rewards: tuple[str, list[list[float]]]) -> LoopReport:
    arms = [
        Arm(name, tuple(run(seed, values) for seed, values in enumerate(seeds)))
        for name, seeds in rewards
    ]
    return LoopReport("m", "vllm", tuple(arms))


def claimed(*rewards: tuple[str, list[list[float]]]) -> Claim:
    (claim,) = claims(report(*rewards))
    return claim


def test_a_claim_is_made_only_where_several_seeds_agree() -> None:
    both = claimed(("bad", [COLLAPSE, COLLAPSE]), ("good", [RISE, RISE]))
    assert (both.better, both.worse, both.agree) == ("good", "bad", True)
    last = np.subtract(RISE, COLLAPSE)[-5:]
    assert both.differences == pytest.approx([last.mean()] * 2)
    assert both.errors == pytest.approx([last.std(ddof=1) / 5**0.5] * 2)
    assert not claimed(("a", [COLLAPSE, RISE]), ("b", [RISE, COLLAPSE])).agree
    assert not claimed(("bad", [COLLAPSE]), ("good", [RISE])).agree
    assert [*claims(report(("one", [RISE])))] == []
    shaky = [value + (0.2 if step % 2 else -0.19) for step, value in enumerate(RISE)]
    noise = claimed(("shaky", [shaky, shaky]), ("steady", [RISE, RISE]))
    assert min(noise.differences) > 0  # every seed leads, by less than its steps' noise
    assert not noise.agree
    late = [*RISE[:10], *RISE]
    longer = claimed(("short", [RISE[:5], RISE[:5]]), ("long", [late, late]))
    assert longer.differences == (0.0, 0.0)  # as far as both went
    assert not longer.agree


def test_the_page_says_where_the_reward_falls_and_with_how_many_seeds() -> None:
    both = report(("as-is", [COLLAPSE, COLLAPSE]), ("attention-sinks", [RISE, RISE]))
    at = reward_fall(both.arms[0].runs[0])
    told = page(both).lead
    assert numbers(told) == [at, at]
    assert told.index("as-is") < told.index("attention-sinks")
    mixed = report(("as-is", [COLLAPSE, RISE]), ("attention-sinks", [RISE, RISE]))
    assert numbers(page(mixed).lead) == [at, 1, 2]  # one of two seeds: no claim, and not hidden
    assert "no arm" not in page(mixed).lead
    one = report(("as-is", [COLLAPSE, COLLAPSE]), ("seq-tis", [COLLAPSE]))
    assert "seq-tis" not in page(one).lead  # one seed claims nothing beside several


def test_an_arm_is_one_row_with_the_range_of_its_seeds() -> None:
    both = report(("as-is", [COLLAPSE, RISE]), ("attention-sinks", [RISE, RISE]))
    (table,) = page(both).sections[0].tables
    rows = values(table)
    assert [row["arm"] for row in rows] == ["as-is", "attention-sinks"]
    ends = [at_end(run, "reward") for run in both.arms[0].runs]
    found = numbers(str(rows[0]["reward"]))
    assert found == pytest.approx([sum(ends) / 2, min(ends), max(ends)], rel=0.01)


def test_the_page_holds_six_pictures_and_every_run() -> None:
    loop_report = report(("as-is", [COLLAPSE]), ("attention-sinks", [RISE]))
    text = show_page(page(loop_report))
    assert text.count("<svg") == 6
    assert text.count("attention-sinks") > 6
    assert text.count(page(loop_report).lead) == 1  # said once
    document = loop_to_json(loop_report)
    assert document["found"]["as-is"]["0"]["reward_fall"] == reward_fall(
        loop_report.arms[0].runs[0]
    )
    short = loop_to_json(report(("as-is", [COLLAPSE[:1]])))
    assert short["found"]["as-is"]["0"]["reward_fall"] is None


def test_the_page_says_what_a_check_found_before_the_first_step() -> None:
    arms = tuple(Arm(name, (run(0, RISE),)) for name in ("attention-sinks", "as-is", "seq-tis"))
    checked = Checked(64, 4, {"as-is": "broken", "attention-sinks": "healthy"})
    with_check, without = (
        section(LoopReport("m", "vllm", arms, {}, found)) for found in (checked, None)
    )
    verdicts = [row["check before"] for row in values(with_check.tables[0])]
    assert verdicts == ["HEALTHY", "BROKEN", "–"]  # no check measured seq-tis
    (before,) = (column for column in with_check.tables[0].columns if "check" in column.title)
    assert numbers(before.detail) == [64, 4]
    assert "check before" not in values(without.tables[0])[0]
