"""Saved runs side by side and over time: invented runs of known distance, from two files each."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.pipeline.document import report_to_json
from mismatch.pipeline.saved_runs import load_run
from mismatch.pipeline.side_by_side import SideBySide, side_by_side
from mismatch.reports.html import show_page
from mismatch.reports.saved_runs import beside_page
from mismatch.reports.terminal import print_page
from mismatch.run import store
from tests.command import mismatch
from tests.reports_fixture import make_report, make_tokens
from tests.texts import numbers

HOSTILE = "</script><img src=x onerror=alert(1)>"


made_report = cache(make_report)


def save(
    directory: Path,
    *,
    seed: int = 0,
    scale: float = 1.0,
    tokens: bool = True,
    version: str = "1.0",
    created: str = "2026-01-01T00:00:00+00:00",
    model: str = "toy",
) -> Path:
    """A run of which only report.json and tokens.parquet are left; delta is ``scale`` as large."""
    table = make_tokens(seed)
    table["delta"] *= scale
    table["train_logprob"] = table["rollout_logprob"] + table["delta"]
    table["prompt"] = table["sequence"] % 16
    table["sample"] = table["sequence"] // 16
    table["token_class"] = "word"
    report = made_report()
    delta = table["delta"].to_numpy()
    first = report.comparisons[0]
    metrics = dict(first.metrics)
    for name in ("k3_kl", "logprob_abs_diff_mean"):
        value = METRICS[name](delta=delta)
        metrics[name] = replace(metrics[name], value=value, low=0.9 * value, high=1.1 * value)
    prints = {
        name: {**facts, "engine": "vllm", "version": version} if name == first.rollout else facts
        for name, facts in report.fingerprints.items()
    }
    report = replace(
        report,
        model=model,
        comparisons=(replace(first, metrics=metrics), *report.comparisons[1:]),
        fingerprints=prints,
        run={**report.run, "created": created},
    )
    directory.mkdir(parents=True)
    store.write_json(directory / "report.json", report_to_json(report))
    if tokens:
        store.save_tokens(directory, table)
        (directory / "manifest.json").unlink()
    return directory


def move(result: SideBySide, metric: str, run: int = 1):  # type: ignore[no-untyped-def]
    return next(item for item in result.metrics if item.metric == metric).moves[run]


def test_the_same_tokens_are_paired_and_a_small_change_is_seen(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a"), save(tmp_path / "b", scale=1.1), save(tmp_path / "c")]
    result = side_by_side(paths)
    worse, same = move(result, "k3_kl"), move(result, "k3_kl", 2)
    assert (worse.basis, worse.outcome, worse.significant) == ("paired", "worse", True)
    assert worse.change.low > 0
    assert (same.outcome, same.significant, same.change.value) == ("none", False, 0)
    assert result.outcomes == (None, "worse", "none")
    assert [side.paired for side in result.runs] == [False, True, True]
    better = side_by_side(paths[1::-1])
    assert move(better, "k3_kl").outcome == "better"
    assert move(better, "k3_kl").change.value == -worse.change.value


def test_other_tokens_are_not_paired_and_chance_is_not_a_change(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a", seed=0), save(tmp_path / "b", seed=1)]
    small = side_by_side([*paths, save(tmp_path / "c", seed=2, scale=1.02)])
    assert {move(small, "k3_kl", run).basis for run in (1, 2)} == {"prompts"}
    assert move(small, "logprob_abs_diff_mean", 2).significant is False
    large = side_by_side([paths[0], save(tmp_path / "d", seed=1, scale=3)])
    assert move(large, "logprob_abs_diff_mean").significant


def test_without_tokens_the_intervals_of_the_reports_tell(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a"), save(tmp_path / "b", scale=3, tokens=False)]
    result = side_by_side(paths)
    changed = move(result, "k3_kl")
    assert (changed.basis, changed.p_value, changed.outcome) == ("intervals", None, "worse")
    first, other = (load_run(path).values["k3_kl"] for path in paths)
    assert first.high is not None
    assert other.low is not None
    assert changed.change.low == pytest.approx(
        other.value - first.value - np.hypot(other.value - other.low, first.high - first.value)
    )
    assert any(note.startswith("b ") and "tokens" in note for note in result.notes)
    assert not move(side_by_side([paths[0], save(tmp_path / "c", tokens=False)]),
                    "k3_kl").significant  # fmt: skip


def test_what_differs_is_named_and_other_models_are_said(tmp_path: Path) -> None:
    other = save(tmp_path / "b", version="2.0", model="another")
    result = side_by_side([save(tmp_path / "a"), other])
    assert [(fact.name, fact.values) for fact in result.facts] == [("version", ("1.0", "2.0"))]
    assert any(note.startswith("b ") and "another" in note for note in result.notes)


def test_runs_have_to_be_several_and_different(tmp_path: Path) -> None:
    run = save(tmp_path / "a")
    with pytest.raises(MismatchError, match="different runs"):
        side_by_side([run, tmp_path / "." / "a"])
    with pytest.raises(MismatchError, match="different runs"):
        side_by_side([run])


def test_names_models_and_versions_are_foreign_text(tmp_path: Path) -> None:
    hostile = HOSTILE.replace("/", "")
    paths = [save(tmp_path / "a"), save(tmp_path / hostile, version=HOSTILE, model=HOSTILE)]
    page = beside_page(side_by_side(paths))
    document = show_page(page)
    assert "<img" not in document
    assert "&lt;img" in document
    console = Console(file=io.StringIO(), width=100)
    print_page(page, console)


def test_one_metric_is_written_alike_in_all_runs(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a", scale=0.2), save(tmp_path / "b", scale=3)]
    table = beside_page(side_by_side(paths)).sections[0].tables[0]
    cells = next(row for row in table.cells() if row[0].value == "k3 KL, nats per token")
    texts = [cell.format(cell.value.value) for cell in cells[1:]]  # type: ignore[misc, union-attr]
    assert not any("e" in text for text in texts)
    assert [float(text) for text in texts] == pytest.approx(
        [cell.value.value for cell in cells[1:]], rel=5e-3  # type: ignore[union-attr]
    )  # fmt: skip


# ---------------------------------------------------------------- the command


def test_the_command_writes_and_prints(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", scale=1.1, version="2.0")
    done = mismatch("report", "a", "b", "--out", "page", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "1 WORSE" in last
    assert numbers(last)[:2] == [1, 1]
    assert len(done.stdout.splitlines()) <= 24
    assert "Changes from a" not in done.stdout
    whole = mismatch("report", "a", "b", "--details", cwd=tmp_path).stdout
    assert "Changes from a" in whole
    document = json.loads((tmp_path / "page" / "side-by-side.json").read_text())
    assert document["outcomes"] == [None, "worse"]
    assert (tmp_path / "page" / "side-by-side.html").exists()
    printed = mismatch("report", "a", "b", "--format", "json", cwd=tmp_path)
    assert json.loads(printed.stdout) == document


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument"),
        (("a", "a"), "different runs"),
        (("a", "b", "--names", "verl"), "--names"),
        (("a", "b", "--format", "junit"), "junit"),
        (("a", "--out", "x"), "--out"),
        (("a", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_compared_is_said(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    save(tmp_path / "a")
    done = mismatch("report", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "fix:" in done.stderr


def test_a_file_is_no_run_directory_and_nothing_is_to_be_deleted(tmp_path: Path) -> None:
    run = save(tmp_path / "a")
    done = mismatch("report", run / "report.json", cwd=tmp_path)
    assert done.returncode == 2
    assert f"{run / 'report.json'} is a file" in done.stderr
    assert str(run) in done.stderr.splitlines()[1]
    assert "delete" not in done.stderr


def test_an_old_table_without_prompts_counts_as_none(tmp_path: Path) -> None:
    run = save(tmp_path / "a")
    assert load_run(run).tokens is not None
    table = pd.read_parquet(run / "tokens.parquet")
    assert {"prompt", "delta"} <= set(table.columns)
    (run / "tokens.parquet").unlink()
    assert load_run(run).tokens is None
