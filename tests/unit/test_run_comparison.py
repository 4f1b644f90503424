"""Saved runs compared: invented runs of known distance, from report.json and tokens.parquet."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from rich.console import Console

from mismatch.analysis.thresholds import default_thresholds
from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.pipeline.document import report_to_json
from mismatch.pipeline.run_comparison import Move, RunComparison, against, compare_runs
from mismatch.pipeline.saved_runs import judged_again, load_run
from mismatch.pipeline.tokens import arrow_lists
from mismatch.reports import html, markdown
from mismatch.reports.ci_formats import runs_to_github, runs_to_junit
from mismatch.reports.saved_runs import runs_page
from mismatch.reports.terminal import print_page
from mismatch.run import store
from mismatch.types import Check, CheckStatus, Status
from tests.command import mismatch
from tests.reports_fixture import LAYERS, make_report, make_tokens, square_of
from tests.texts import numbers

HOSTILE = "</script><img src=x onerror=alert(1)>[bold]|`x`\x1b[31m"

made_report = cache(make_report)


def save(
    directory: Path,
    *,
    seed: int = 0,
    scale: float = 1.0,
    spikes: int = 0,
    flips: float | None = None,
    prompts: int = 16,
    asked: int = 0,
    tokens: bool = True,
    status: Status = "healthy",
    version: str = "1.0",
    model: str = "toy",
    weights: str = "w",
    temperature: float = 1.0,
    platform: str = "Linux",
    gap: float = 2e-7,
) -> Path:
    """A run of which only report.json and tokens.parquet are left; delta is ``scale`` as large.

    Args:
        spikes: prompts with one token that is 2 nats off.
        flips: share of (token, layer) whose experts differ.
        asked: number of the prompts' texts.
    """
    table = make_tokens(seed)
    table["prompt"] = table["sequence"] % prompts
    table["sample"] = table["sequence"] // prompts
    table["token_class"] = "word"
    first_rows = table.groupby("sequence").cumcount() == 0
    offsets = np.concatenate([[0], np.cumsum(first_rows.to_numpy())])
    texts = [f"{asked}-{prompt}" for prompt in table["prompt"][first_rows]]
    table["context"] = arrow_lists(texts, offsets, "string")
    table["delta"] *= scale
    for prompt in range(spikes):
        table.loc[table.index[table["prompt"] == prompt][5], "delta"] = 2.0
    table["train_logprob"] = table["rollout_logprob"] + table["delta"]
    report = made_report()
    first = report.comparisons[0]
    metrics, routing = dict(first.metrics), dict(first.routing)
    delta = table["delta"].to_numpy()
    for name in ("k3_kl", "logprob_abs_diff_mean"):
        value = METRICS[name](delta=delta)
        metrics[name] = replace(metrics[name], value=value, low=0.9 * value, high=1.1 * value)
    if flips is not None:
        drawn = np.random.default_rng(seed + 50).binomial(LAYERS, flips, len(table))
        table["routing_flips"] = drawn.astype("int64")
        name = "routing_disagree_layer"
        routing[name] = replace(routing[name], value=float(drawn.mean() / LAYERS))
    given = {
        first.rollout: {"engine": "vllm", "version": version},
        first.train: {"weights": weights},
    }
    planted: dict[Status, CheckStatus] = {"broken": "failed", "tolerable": "warning"}
    checks = report.checks
    if status in planted:
        checks += (Check("planted", planted[status], f"it is {status}"),)
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "max_tokens": 128}
    report = replace(
        report,
        model=model,
        checks=checks,
        comparisons=(replace(first, metrics=metrics, routing=routing), *report.comparisons[1:]),
        fingerprints={
            name: facts | given.get(name, {}) for name, facts in report.fingerprints.items()
        },
        run={
            "created": "2026-01-01T00:00:00+00:00",
            "platform": platform,
            "spec": {"rollout": {"sampling": sampling}},
        },
    ).with_analyses(square=square_of(gap=gap))
    report = replace(report, verdict=judged_again(report))
    directory.mkdir(parents=True)
    store.write_json(directory / "report.json", report_to_json(report))
    if tokens:
        store.save_tokens(directory, table)
    return directory


def move(result: RunComparison, metric: str = "k3_kl", run: int = 1) -> Move:
    found = next(item for item in result.metrics if item.metric == metric).moves[run]
    assert found is not None
    return found


def judged(result: RunComparison) -> tuple[Any, bool]:
    """The outcome of the second run, and whether the gate fails."""
    assert result.gate is not None
    return result.outcomes[1], result.gate.fails


def reason(result: RunComparison) -> str:
    assert result.gate is not None
    return result.gate.reason


# ---------------------------------------------------------------- what moved


def test_the_same_tokens_are_paired_and_a_small_change_is_seen(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a"), save(tmp_path / "b", scale=1.1), save(tmp_path / "c")]
    result = compare_runs(paths)
    worse, same = move(result), move(result, run=2)
    assert (worse.basis, worse.outcome, worse.significant) == ("paired", "worse", True)
    assert worse.change.low is not None
    assert worse.change.low > 0
    assert (same.outcome, same.significant, same.change.value) == ("none", False, 0)
    assert (same.p_value, result.outcomes) == (1.0, (None, "worse", "none"))
    assert [side.paired for side in result.runs] == [False, True, True]
    assert result.runs[1].engine_max == 0  # the trainer alone moved
    better = move(compare_runs(paths[1::-1]))
    assert (better.outcome, better.change.value) == ("better", -worse.change.value)


def test_other_tokens_are_compared_by_prompt_and_chance_is_no_change(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a"), save(tmp_path / "b", seed=1), save(tmp_path / "c", seed=2)]
    result = compare_runs(paths)
    assert {move(result, run=run).basis for run in (1, 2)} == {"prompts"}
    assert result.outcomes == (None, "none", "none")
    large = compare_runs([paths[0], save(tmp_path / "d", seed=1, scale=3)])
    assert (large.outcomes[1], move(large, "logprob_abs_diff_mean").significant) == ("worse", True)
    assert large.runs[1].engine_max is None
    alone = compare_runs([paths[0], save(tmp_path / "e", seed=1, scale=3, asked=1)])
    assert move(alone).p_value is None  # no prompt is in both
    assert any(numbers(note) == [16, 16, 0] for note in alone.notes)


def test_without_tokens_the_intervals_of_the_reports_decide(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a"), save(tmp_path / "b", scale=3, tokens=False)]
    result = compare_runs(paths)
    changed = move(result)
    assert (changed.basis, changed.p_value, changed.outcome) == ("intervals", None, "worse")
    first, other = (load_run(path).values["k3_kl"] for path in paths)
    assert first.high is not None
    assert other.low is not None
    assert changed.change.low == pytest.approx(
        other.value - first.value - np.hypot(other.value - other.low, first.high - first.value)
    )
    assert any(note.startswith("b ") and "tokens" in note for note in result.notes)
    same = compare_runs([paths[0], save(tmp_path / "c", tokens=False)])
    assert not move(same).significant


@pytest.mark.slow
def test_equal_engines_are_seldom_called_different(tmp_path: Path) -> None:
    """20 pairs of runs of one distribution: at 5 % one is expected to differ by chance."""
    runs = [save(tmp_path / f"r{seed}", seed=seed) for seed in range(40)]
    outcomes = [against(runs[i], runs[i + 1]).outcomes[1] for i in range(0, 40, 2)]
    assert outcomes.count("none") >= 16


def test_what_differs_is_named_and_other_models_are_said(tmp_path: Path) -> None:
    first = save(tmp_path / "a")
    other = save(tmp_path / "b", version="2.0", model="another", weights="x", platform="Mac")
    result = compare_runs([first, other])
    assert [(fact.where, fact.name, fact.values) for fact in result.facts] == [
        ("engine", "version", ("1.0", "2.0")),
        ("machine", "platform", ("Linux", "Mac")),
    ]
    assert any(note.startswith("b ") and "another" in note for note in result.notes)


def test_runs_have_to_be_several_and_different(tmp_path: Path) -> None:
    run = save(tmp_path / "a")
    for paths in ([run, tmp_path / "." / "a"], [run]):
        with pytest.raises(MismatchError, match="different runs"):
            compare_runs(paths)


# ---------------------------------------------------------------- a new run against an old one


def test_a_run_at_a_larger_distance_fails_and_the_reverse_is_better(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old"), save(tmp_path / "new", seed=1, scale=2)
    assert judged(against(old, new)) == ("worse", True)
    assert judged(against(new, old)) == ("better", False)


def test_worse_within_the_margin_does_not_fail(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old"), save(tmp_path / "new", scale=1.03)  # k3 grows by 6 %
    result, strict = against(old, new), against(old, new, margin=0.005)
    assert (judged(result), judged(strict)) == (("worse", False), ("worse", True))
    assert (move(result).beyond, move(strict).beyond) == (False, True)
    assert (numbers(reason(result))[-1], numbers(reason(strict))[-1]) == (10, 0.5)
    assert (runs_page(result).tone, runs_page(strict).tone) == ("warn", "critical")


def test_a_broken_run_fails_even_where_nothing_moved(tmp_path: Path) -> None:
    old = save(tmp_path / "old")
    broken = save(tmp_path / "new", seed=1, status="broken", gap=1e-3)
    result = against(old, broken)
    assert judged(result) == ("none", True)
    assert f"broken: {result.runs[1].reason}; " in reason(result)
    gaps = {item.scoring: item.standings for item in result.square if item.evidence == "gap"}
    assert gaps["vllm:fp32"] == ("within", "beyond")
    assert "square" in {section.id for section in runs_page(result).sections}
    assert "old one" in reason(against(save(tmp_path / "before", status="broken"), broken))


def test_a_run_that_is_only_tolerable_fails_where_that_is_asked(tmp_path: Path) -> None:
    old, new = (save(tmp_path / str(seed), seed=seed, status="tolerable") for seed in (0, 1))
    assert judged(against(old, new)) == ("none", False)
    assert judged(against(old, new, fail_on="tolerable")) == ("none", True)


def test_levels_of_the_user_judge_the_runs_again(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old"), save(tmp_path / "new", seed=1)
    levels = default_thresholds()
    strict = {
        metric: {name: replace(level, healthy=0.0, unfit=1e-12) for name, level in columns.items()}
        for metric, columns in levels.items()
        if metric == "k3_kl"
    }
    assert judged(against(old, new, thresholds=levels)) == ("none", False)
    result = against(old, new, thresholds=strict)
    assert (judged(result), result.runs[1].status) == (("none", True), "unfit")


def test_experts_decide_as_well_and_two_directions_are_mixed(tmp_path: Path) -> None:
    old = save(tmp_path / "old", flips=0.02)
    result = against(old, save(tmp_path / "new", seed=1, flips=0.06))
    assert judged(result) == ("worse", True)
    routing = move(result, "routing_disagree_layer")
    assert routing.beyond
    assert routing.change.value == pytest.approx(0.04, abs=0.015)
    assert move(result).outcome == "none"
    mixed = against(old, save(tmp_path / "both", seed=1, flips=0.06, scale=0.5))
    assert judged(mixed) == ("mixed", True)
    assert reason(mixed).startswith("routing_disagree_layer")
    assert "; better: k3_kl" in reason(mixed)


def test_a_k3_that_grew_manyfold_in_a_few_prompts_is_not_passed_over(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old"), save(tmp_path / "new", seed=1, spikes=3)
    result = against(old, new)
    moved = move(result)
    assert moved.p_value is not None
    assert moved.p_value > 0.05
    assert (moved.outcome, *judged(result)) == ("undecided", "undecided", True)


@pytest.mark.parametrize(("prompts", "enough"), [(6, False), (7, True)])
def test_too_few_prompts_to_find_anything_are_refused(
    tmp_path: Path, prompts: int, enough: bool
) -> None:
    """All three metrics are far worse on every prompt: no result could be clearer."""
    old = save(tmp_path / "old", scale=0.1, flips=0.02, prompts=prompts)
    new = save(tmp_path / "new", seed=1, scale=3, flips=0.6, prompts=prompts)
    if not enough:
        with pytest.raises(MismatchError, match=r"\b6 .*\b7 "):
            against(old, new)
        return
    result = against(old, new)
    assert judged(result) == ("worse", True)
    assert {moved.outcome for _, moved in result.second_moves()} == {"worse"}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"asked": 1}, r"\b16, .*\b16, .*\b0"),
        ({"weights": "x"}, "other weights"),
        ({"weights": "x", "model": "another"}, "another model"),
        ({"temperature": 0.7}, r"temperature 1 .*0\.7"),
        ({"tokens": False}, "no table of tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(
    tmp_path: Path, other: dict[str, Any], named: str
) -> None:
    old, new = save(tmp_path / "old"), save(tmp_path / "new", seed=1, **other)
    with pytest.raises(MismatchError, match=named) as caught:
        against(old, new)
    assert caught.value.fix
    if other.get("tokens", True):  # side by side, by the same rule
        result = compare_runs([old, new])
        assert result.outcomes == (None, "not comparable")
        assert not [move for line in result.metrics if (move := line.moves[1]) and move.significant]
        assert any(caught.value.fix in note for note in result.notes)
        assert runs_page(result).word == "not comparable"
        assert "not comparable" in repr(result)


@pytest.mark.parametrize("name", ["report.json", "tokens.parquet"])
def test_a_damaged_run_is_refused_with_its_file(tmp_path: Path, name: str) -> None:
    old, new = save(tmp_path / "old"), save(tmp_path / "new", seed=1)
    damaged = (old / name).read_bytes()
    (old / name).write_bytes(damaged[: len(damaged) // 2])
    with pytest.raises(MismatchError, match=name) as caught:
        against(old, new)
    assert caught.value.fix


# ---------------------------------------------------------------- how it is written


def test_machines_fail_where_the_command_fails(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old"), save(tmp_path / "new", seed=1, scale=3)
    for result, failing in ((against(old, new), True), (against(new, old), False)):
        suite = ElementTree.fromstring(runs_to_junit(result))
        failures = {case.get("name") for case in suite if case.find("failure") is not None}
        beyond = {item.metric for item, moved in result.second_moves() if moved.beyond}
        assert failures == (beyond | {"against"} if failing else set())
        assert suite.get("failures") == str(len(failures))
        assert int(suite.get("tests", 0)) == 1 + len(list(result.second_moves()))
        last = runs_to_github(result).splitlines()[-1]
        assert last.startswith("::error" if failing else "::no")


def test_names_models_and_versions_are_foreign_text(tmp_path: Path) -> None:
    evil = HOSTILE.replace("/", "")
    old = save(tmp_path / evil, version=HOSTILE, model=HOSTILE)
    new = save(tmp_path / "new", seed=1, model=HOSTILE)
    for result in (compare_runs([old, new]), against(old, new), against(new, old)):
        shown = runs_page(result)
        document, text = html.show_page(shown), markdown.show_page(shown)
        console = Console(width=100, record=True, file=io.StringIO())
        print_page(shown, console)
        terminal = console.export_text()
        assert "\x1b" not in terminal + document + text
        assert "[bold]" in terminal
        assert "<img" not in document
        assert "\\<img" in text
        assert document == html.show_page(shown)


def test_one_metric_is_written_alike_in_all_runs(tmp_path: Path) -> None:
    paths = [save(tmp_path / "a", scale=0.2), save(tmp_path / "b", scale=3)]
    table = runs_page(compare_runs(paths)).sections[0].tables[0]
    cells = next(row for row in table.cells() if row[0].value == "k3 KL, nats per token")
    texts = [cell.format(cell.value.value) for cell in cells[1:]]  # type: ignore[misc, union-attr]
    assert not any("e" in text for text in texts)
    values = [cell.value.value for cell in cells[1:]]  # type: ignore[union-attr]
    assert [float(text) for text in texts] == pytest.approx(values, rel=5e-3)


# ---------------------------------------------------------------- the commands


def test_report_writes_and_prints_several_runs(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", scale=1.1, version="2.0")
    done = mismatch("report", "a", "b", "--out", "page", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "1 WORSE" in last
    assert numbers(last)[:2] == [1, 1]
    assert len(done.stdout.splitlines()) <= 25
    assert "Changes from a" not in done.stdout
    assert "Changes from a" in mismatch("report", "a", "b", "--details", cwd=tmp_path).stdout
    document = json.loads((tmp_path / "page" / "side-by-side.json").read_text())
    assert (document["outcomes"], document["gate"]) == ([None, "worse"], None)
    assert (tmp_path / "page" / "side-by-side.html").exists()
    printed = mismatch("report", "a", "b", "--format", "json", cwd=tmp_path)
    assert json.loads(printed.stdout) == document


@pytest.mark.slow
def test_compare_writes_prints_and_ends_with_the_gates_code(tmp_path: Path) -> None:
    for name, given in {
        "old": {},
        "new": {"seed": 1, "scale": 3.0},
        "again": {},
        "other": {"asked": 1},
    }.items():
        save(tmp_path / name, **given)  # type: ignore[arg-type]
    worse = mismatch("compare", "new", "--against", "old", "--out", "out", cwd=tmp_path)
    assert worse.returncode == 1, worse.stderr
    verdict, outcome, _, metric, *_ = worse.stdout.splitlines()[-1].split()
    assert (verdict, outcome, metric.strip(",;")) == ("verdict:", "WORSE", "k3_kl")
    files = {path.name for path in (tmp_path / "out").glob("against.*")}
    assert files == {"against.html", "against.json", "against.md"}
    assert mismatch("compare", "old", "--against", "new", cwd=tmp_path).returncode == 0
    equal = mismatch("compare", "again", "--against", "old", cwd=tmp_path)
    assert equal.returncode == 0, equal.stderr
    assert "NO SIGNIFICANT DIFFERENCE" in equal.stdout.splitlines()[-1]
    refused = mismatch("compare", "other", "--against", "old", cwd=tmp_path)
    assert refused.returncode == 2
    assert numbers(refused.stderr)[:3] == [16, 16, 0]  # prompts there, here and in both
    call = ("compare", "again", "--against", "old", "--format")
    assert json.loads(mismatch(*call, "json", cwd=tmp_path).stdout)["outcomes"] == [None, "none"]
    assert ElementTree.fromstring(mismatch(*call, "junit", cwd=tmp_path).stdout).tag == "testsuite"
    assert mismatch(*call, "markdown", cwd=tmp_path).stdout.startswith("### ")


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
def test_what_report_cannot_do_is_said(
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


def test_the_example_workflow_uses_commands_and_flags_that_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "ci.md").read_text(encoding="utf-8")
    blocks = [block.split("```")[0] for block in page.split("```yaml\n")[1:]]
    workflow = next(yaml.safe_load(block) for block in blocks if "jobs:" in block)
    steps = workflow["jobs"]["mismatch"]["steps"]
    lines = [line.strip() for step in steps for line in step.get("run", "").splitlines()]
    calls = [line.split() for line in lines if line.startswith("mismatch ")]
    assert {call[1] for call in calls} == {"check", "compare"}
    for call in calls:
        usage = mismatch(call[1], "--help").stdout
        for word in call:
            assert not word.startswith("--") or word in usage, word
