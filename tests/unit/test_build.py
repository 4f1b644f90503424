"""The report of artefacts that lie there, where some of them cannot be compared or written."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch.cli.main import app
from mismatch.pipeline.build import build_report
from mismatch.reports.files import write_report
from mismatch.run import store
from mismatch.types import Report, Scoring
from tests.made_run import make_run, rollout, scoring, spec
from tests.texts import numbers

NAMES = ("transformers:prefill", "fp32", "reference:fp32")


def add(run: Path, name: str, *bad: float, entropy: float | None = None) -> None:
    """One more scoring, the values ``bad`` first; ``entropy`` everywhere."""
    samples = rollout()
    scores: Scoring = scoring(name, samples, shift=0.01)
    if name.endswith(":prefill"):
        scores = replace(scores, fingerprint=scores.fingerprint | {"mode": "prefill"})
    scores.logprobs[: len(bad)] = bad
    if entropy is not None:
        scores = replace(scores, entropy=np.full(len(scores.logprobs), entropy))
    store.save_scoring(run, scores, samples)


def report_of(run: Path) -> Report:
    return build_report(run, replace(spec(), noise_floor=True))[0]


def pairs(report: Report) -> list[tuple[str, str]]:
    pairs = [(c.rollout, c.train) for c in report.comparisons]
    return [*pairs, *((pair.left, pair.right) for pair in report.noise_floor)]


def mentioned(report: Report, name: str) -> list[str]:
    return [entry.reason for entry in report.not_tested if entry.what == name]


@pytest.mark.parametrize("name", NAMES)
def test_a_scoring_beside_the_headline_that_is_not_finite_is_left_out_and_fails_its_check(
    name: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    for scored in NAMES:
        add(run, scored)
    sound = report_of(run)
    assert any(name in pair for pair in pairs(sound))
    assert not mentioned(sound, name)
    add(run, name, np.nan, -np.inf)
    report = report_of(run)
    assert pairs(report) == [pair for pair in pairs(sound) if name not in pair]
    assert report.comparisons[0] == sound.comparisons[0]
    assert report.verdict.judgements == sound.verdict.judgements
    checks = [{check.id: check.status for check in built.checks} for built in (sound, report)]
    assert checks[0]["passes-finite"] == "passed"
    assert checks[1]["passes-finite"] == "failed"
    (reason,) = mentioned(report, name)
    assert "logprobs" in reason
    assert numbers(reason)[-2:] == [2, 96]


def test_entropies_that_are_not_finite_are_no_reason_to_fail_either(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add(run, "fp16", entropy=np.nan)
    report = report_of(run)
    assert pairs(report) == [("transformers:decode", "fsdp")]
    (reason,) = mentioned(report, "fp16")
    assert "entropies" in reason
    assert numbers(reason)[-2:] == [96, 96]


def printed(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of `mismatch report`."""
    code = app(["report", str(run)], standalone_mode=False)
    return code, capsys.readouterr().out


def reported_run(directory: Path, shift: float) -> Path:
    run = make_run(directory, shift=shift)
    write_report(run, *build_report(run, spec()))
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "code"), [(0.0, 1), (1.0, 1)])
def test_the_report_of_a_run_that_cannot_be_written_is_printed(
    shift: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = reported_run(tmp_path / "run", shift)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    exit_code, output = printed(run, capsys)
    assert exit_code == code
    lines = output.strip().splitlines()
    status = json.loads((run / "report.json").read_text())["verdict"]["status"]
    assert lines[-1].startswith(f"verdict: {status.upper()}")
    (note,) = [line for line in lines if line.startswith("note: ")]
    assert all(form in note for form in ("HTML", "Markdown"))
    assert os.strerror(errno.EROFS) in note
    assert not any(str(run) in line for line in lines if line != note)  # nothing lies there
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_that_can_be_written_gets_its_report_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = reported_run(tmp_path / "run", 0.0)
    (run / "report.html").unlink()
    code, output = printed(run, capsys)
    assert code == 1  # nothing is known of a side that might be broken
    assert "note: " not in output
    assert (run / "report.html").read_text().startswith("<!")


def test_a_router_that_the_trainer_cannot_read_is_said(tmp_path: Path) -> None:
    """Without the sentence, a report without routing would look like one with nothing to say."""
    run, samples = make_run(tmp_path / "run"), rollout()
    assert not mentioned(report_of(run), "routing disagreement")
    blind = scoring("fsdp", samples, shift=0.01)
    reason = "not supported: no topk call in its router"
    store.save_scoring(
        run,
        replace(blind, fingerprint=blind.fingerprint | {"moe": True, "routing": reason}),
        samples,
    )
    (entry,) = mentioned(report_of(run), "routing disagreement")
    assert reason in entry


def test_what_the_trainer_says_it_lacks_is_in_the_report(tmp_path: Path) -> None:
    run, samples = make_run(tmp_path / "run"), rollout()
    lacks = [{"what": "routing disagreement", "reason": "verl returns none", "how": ""}]
    facts = scoring("fsdp", samples, shift=0.01)
    facts = replace(facts, fingerprint=facts.fingerprint | {"not_tested": lacks})
    store.save_scoring(run, facts, samples)
    (entry,) = mentioned(report_of(run), "routing disagreement")
    assert "verl" in entry


def test_missing_routes_are_said_where_nobody_gave_a_reason(tmp_path: Path) -> None:
    run, samples = make_run(tmp_path / "run"), rollout()
    blind = scoring("fsdp", samples, shift=0.01)
    store.save_scoring(
        run,
        replace(blind, fingerprint=blind.fingerprint | {"moe": True, "routing": "captured"}),
        samples,
    )
    (entry,) = mentioned(report_of(run), "routing disagreement")
    assert "fsdp" in entry
