"""What docs/evidence/loop.md says of the demonstration is what its curves say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mismatch.features.loop.judge import Arm, LoopReport, SeedRun
from mismatch.features.loop.section import page as show
from mismatch.features.loop.spec import LoopSpec, settings
from tools.loop_page import DOCUMENT, EXAMPLE, PICTURE, merged, read, short, text


def test_the_demonstration_is_written_from_its_curves() -> None:
    report = read(EXAMPLE / "loop.json")
    page = DOCUMENT.read_text("utf-8")
    assert text(report) in page
    assert all(arm.runs for arm in report.arms)
    assert merged([report, report]) == report
    assert f"images/{PICTURE.name}" in page
    assert PICTURE.exists()
    lead = show(report).lead
    for arm in report.arms:
        if len(arm.runs) < 2:  # one seed claims nothing
            assert arm.name not in lead


def test_the_demonstration_says_its_settings() -> None:
    check = read(EXAMPLE / "loop.json").settings["check"]
    page = DOCUMENT.read_text("utf-8")
    for side, flag in ((check["rollout"]["engine"], "--dtype"), (check["train"], "--train-dtype")):
        assert f"{flag} {side['dtype']}" in page
        assert side["model"] == "tiny-gpt-oss"
    assert f"--attention {check['train']['attention']}" in page


def runs(arm: str, rewards: list[float], seed: int = 0, **fields: object) -> LoopReport:
    curves = {"step": tuple(map(float, range(len(rewards)))), "reward": tuple(rewards)}
    asked = replace(LoopSpec(), **fields)  # type: ignore[arg-type]
    runs_of_arm = Arm(arm, (SeedRun(seed, curves),))
    return LoopReport("m", "vllm", (runs_of_arm,), settings(asked))


def test_runs_with_one_beginning_are_put_together() -> None:
    half, whole = runs("seq-tis", [0.5, 0.6]), runs("seq-tis", [0.5, 0.6, 0.7], steps=9)
    other = runs("seq-tis", [0.25], seed=1)
    first = runs("as-is", [0.5])
    for order in ([half, whole, first, other], [whole, other, half, first]):
        joined = merged(order)
        assert [(arm.name, len(arm.runs)) for arm in joined.arms] == [("as-is", 1), ("seq-tis", 2)]
        assert joined.arms[1].runs[0].steps == joined.settings["steps"] == 3


def test_runs_that_are_not_of_one_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"clip: 0\.2 .*0\.3"):
        merged([runs("as-is", [0.5]), runs("tis", [0.5], clip=0.3)])
    with pytest.raises(ValueError, match=r"tis, .*\b0, .*\b0\.4"):
        merged([runs("as-is", [0.5]), runs("tis", [0.4])])
    # Another sampler may begin with another reward.
    assert len(merged([runs("as-is", [0.5]), runs("engine-fp32", [0.4])]).arms) == 2


def test_numbers_are_shortened_wherever_they_stand() -> None:
    assert short({"a": [0.123456789, {"b": (1.0, None, "x", 3)}]}) == {
        "a": [0.12346, {"b": [1.0, None, "x", 3]}]
    }
