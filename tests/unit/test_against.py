"""A new run against an old one: invented runs of known distance, on the same prompts."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from mismatch.errors import MismatchError
from mismatch.experiments.regression.run_comparison import against
from mismatch.experiments.regression.types import Against, against_to_json, schema
from mismatch.reports import html, markdown
from mismatch.reports.files import against_to_github, against_to_junit, write_page
from mismatch.reports.saved_runs import against_page as page
from mismatch.reports.terminal import print_page
from mismatch.run import store
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec, to_dict
from mismatch.types import Rollout, Routing, Sampling, Scoring
from tests.command import mismatch
from tests.tables import values
from tests.texts import numbers

PROMPTS, SAMPLES, PROMPT, RESPONSE = 16, 4, 3, 24
FACTS = {"engine": "vllm", "version": "1.0", "dtype": "bf16", "versions": {"vllm": "1.0"}}
WEIGHTS = {"model.layers.0.weight": [1, 2, 3], "lm_head.weight": [4, 5, 6]}


def make_run(
    directory: Path,
    *,
    tokens: int = 0,
    spread: float = 0.005,
    noise: int | None = None,
    prompts: int = 0,
    flips: float | None = None,
    weights: dict[str, Any] | None = None,
    law: dict[str, Any] | None = None,
    **facts: Any,
) -> Path:
    """A rollout, its decode scoring and a trainer's, ``spread`` nats apart.

    Args:
        tokens: seed of the sampled tokens; prompts: of the prompts.
        noise: seed of the distance; the tokens' unless given.
        flips: share of (token, layer) whose experts differ; None: no routes.
    """
    n = PROMPTS * SAMPLES
    asked = np.random.default_rng(1000 + prompts).integers(5, 500, (PROMPTS, PROMPT))
    sampled = np.random.default_rng(tokens).integers(5, 500, (n, RESPONSE))
    ids = np.concatenate([np.repeat(asked, SAMPLES, axis=0), sampled], axis=1)
    mask = np.tile(np.arange(PROMPT + RESPONSE) >= PROMPT, n)
    decode = {"mode": "decode", "logprobs_temperature": 1.0, **FACTS, **facts}
    rollout = Rollout(
        token_ids=ids.ravel(),
        offsets=np.arange(n + 1) * (PROMPT + RESPONSE),
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.repeat(np.arange(PROMPTS), SAMPLES),
        finish_reason=("length",) * n,
        sampling=Sampling(max_tokens=RESPONSE, samples_per_prompt=SAMPLES, **(law or {})),
        fingerprint=decode,
    )
    draw = np.random.default_rng(500 + (tokens if noise is None else noise))
    logprobs = -0.2 - np.random.default_rng(tokens).exponential(1.0, n * RESPONSE)
    delta = spread * draw.standard_normal(n * RESPONSE) - spread**2 / 2  # mean ratio 1
    actions = rollout.token_ids[rollout.actions]
    train = {"mode": "train", "dtype": "bf16", "logprobs_temperature": 1.0}
    train["weights"] = WEIGHTS if weights is None else weights
    directory.mkdir(parents=True)
    store.save_rollout(directory, rollout)
    scorings = [
        Scoring("vllm:decode", actions, logprobs, decode),
        Scoring("fsdp", actions, logprobs + delta, train),
    ]
    if flips is not None:
        scorings = [
            replace(scoring, routing=routing)
            for scoring, routing in zip(scorings, routes(rollout, flips, draw), strict=True)
        ]
    for scoring in scorings:
        store.save_scoring(directory, scoring, rollout)
    return directory


def routes(rollout: Rollout, flips: float, draw: Any) -> list[Routing]:
    """Two sides' experts of two layers, 2 of 8; ``flips`` of the sets differ."""
    shape = (len(rollout.token_ids), 2)
    first = draw.integers(0, 4, shape)
    ids = np.stack([first, first + 4], axis=-1).astype(np.uint8)
    other = ids.copy()
    other[..., 1] = np.where(draw.random(shape) < flips, (first + 1) % 4, ids[..., 1])
    present = np.ones(shape[0], bool)
    return [Routing((0, 1), 8, ids_of, present) for ids_of in (ids, other)]


def row(result: Against, metric: str = "k3_kl") -> Any:
    return next(r for r in result.rows if r.metric == metric)


# ---------------------------------------------------------------- what moved


def test_a_run_that_doubles_the_distance_is_worse_and_the_reverse_better(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", tokens=1, spread=0.005)
    new = make_run(tmp_path / "new", tokens=2, spread=0.01)
    worse, better = against(old, new), against(new, old)
    assert (worse.outcome, worse.fails) == ("worse", True)
    assert (better.outcome, better.fails) == ("better", False)
    assert not worse.same_tokens
    change = row(worse, "logprob_abs_diff_mean").change
    assert change.low < 0.005 * np.sqrt(2 / np.pi) < change.high  # E|N(0, s)| = s √(2 / π)
    assert row(better).change.value == pytest.approx(-row(worse).change.value)


@pytest.mark.slow
def test_equal_engines_are_seldom_told_apart(tmp_path: Path) -> None:
    """20 pairs of runs of the same law: at 5 % one is expected to differ by chance."""
    runs = [make_run(tmp_path / f"r{seed}", tokens=seed) for seed in range(40)]
    outcomes = [against(runs[i], runs[i + 1]).outcome for i in range(0, 40, 2)]
    assert outcomes.count("none") >= 16


def test_the_same_tokens_are_paired(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", spread=0.005)
    new = make_run(tmp_path / "new", spread=0.0052)  # the same noise, a little larger
    result = against(old, new)
    apart = against(old, make_run(tmp_path / "apart", tokens=9, spread=0.0052))
    assert result.same_tokens
    assert result.same_sequences == PROMPTS * SAMPLES
    paired, difference = (
        row(compared, "logprob_abs_diff_mean").change for compared in (result, apart)
    )
    assert paired.high - paired.low < (difference.high - difference.low) / 5
    assert result.engines is not None
    assert result.engines.metrics["logprob_abs_diff_max"].value == 0  # only the trainer moved
    assert result.engines.sampled_by_left
    assert apart.engines is None
    assert apart.same_sequences == 0


def test_worse_within_the_margin_does_not_fail(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", spread=0.005)
    new = make_run(tmp_path / "new", spread=0.0052)  # k3 grows by 8 %
    result, strict = against(old, new, margin=0.1), against(old, new, margin=0.005)
    assert (result.outcome, result.fails) == ("worse", False)
    assert not any(row.beyond for row in result.rows)
    assert any(row.beyond for row in strict.rows)
    assert (numbers(result.reason)[-1], numbers(strict.reason)[-1]) == (10, 0.5)
    moved = page(strict).sections[0]
    assert moved.notes[0].endswith("Margin: 0.5 %.")
    tones = [{item["name"]: cells[-1].tone for item, cells in
              zip(values(table), table.cells(), strict=True)}
             for each in (result, strict) for table in page(each).sections[0].tables]  # fmt: skip
    assert [tone["k3_kl"] for tone in tones] == ["warn", "critical"]
    assert (page(result).tone, page(strict).tone) == ("warn", "critical")
    assert (strict.outcome, strict.fails) == ("worse", True)


def test_a_critical_run_fails_even_where_nothing_moved(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", tokens=1, spread=0.6)
    new = make_run(tmp_path / "new", tokens=2, spread=0.6)
    result = against(old, new)
    assert result.outcome == "none"
    assert result.fails
    assert result.new.verdict.status == result.old.verdict.status == "broken"
    assert result.reason.endswith(f"{result.new.verdict.reason}")
    assert "old one" in result.reason


def test_a_run_that_only_warns_fails_where_that_is_asked(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", tokens=1, spread=0.027)
    new = make_run(tmp_path / "new", tokens=2, spread=0.027)
    result, strict = against(old, new), against(old, new, fail_on="tolerable")
    assert result.new.verdict.status in ("tolerable", "inconclusive")
    assert (result.outcome, result.fails, strict.fails) == ("none", False, True)


def test_one_metric_up_and_another_down_is_mixed(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", tokens=1, spread=0.01, flips=0.02)
    result = against(old, make_run(tmp_path / "new", tokens=2, spread=0.005, flips=0.06))
    assert (result.outcome, result.fails) == ("mixed", True)
    assert result.reason.startswith("routing_disagree_layer")
    assert "; better: k3_kl" in result.reason


@pytest.mark.parametrize(("prompts", "enough"), [(6, False), (7, True)])
def test_too_few_prompts_to_find_anything_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: int, enough: bool
) -> None:
    """All three metrics are far worse on every prompt: no result could be clearer."""
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", prompts)
    old = make_run(tmp_path / "old", tokens=1, spread=0.001, flips=0.02)
    new = make_run(tmp_path / "new", tokens=2, spread=0.01, flips=0.6)
    if enough:
        result = against(old, new)
        assert (result.outcome, result.fails) == ("worse", True)
        assert {r.outcome for r in result.rows if r.p_value is not None} == {"worse"}
    else:
        with pytest.raises(MismatchError, match=r"\b6 .*\b7 "):
            against(old, new)


def test_identical_runs_do_not_differ(tmp_path: Path) -> None:
    result = against(make_run(tmp_path / "old"), make_run(tmp_path / "new"))
    assert result.outcome == "none"
    assert {r.change.value for r in result.rows} == {0.0}
    assert row(result).p_value == 1.0


# ---------------------------------------------------------------- what changed, and what is refused


def test_versions_and_settings_are_named(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", tokens=1)
    new = make_run(
        tmp_path / "new", tokens=2, version="1.1", versions={"vllm": "1.1"}, attention="FLASH",
        speculation=None,
    )  # fmt: skip
    changes = {(c.where, c.name): (c.old, c.new) for c in against(old, new).changed}
    assert changes == {
        ("engine", "version"): ("1.0", "1.1"),
        ("engine", "versions.vllm"): ("1.0", "1.1"),
        ("engine", "attention"): ("–", "FLASH"),
    }


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"prompts": 1}, r"\b16, .*\b16, .*\b0"),
        ({"weights": WEIGHTS | {"lm_head.weight": [0, 0, 0]}}, "other weights.*lm_head.weight"),
        ({"weights": {"another.weight": [1, 2, 3]}}, "another model"),
        ({"law": {"temperature": 0.7}}, r"temperature 1 .*0\.7"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(
    tmp_path: Path, other: dict[str, Any], named: str
) -> None:
    old, new = make_run(tmp_path / "old"), make_run(tmp_path / "new", tokens=2, **other)
    with pytest.raises(MismatchError, match=named):
        against(old, new)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def older(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"schema": "mismatch.rollout/0"}), path)


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("rollout.parquet", cut, "rollout.parquet"),
        ("scores/fsdp.parquet", cut, "fsdp.parquet"),
        ("scores/vllm-decode.parquet", Path.unlink, "vllm-decode.parquet does not exist"),
        ("rollout.parquet", older, "rollout.parquet"),
    ],
)
def test_an_old_run_that_is_damaged_or_of_another_schema_is_refused_with_its_file(
    tmp_path: Path, name: str, damage: Any, named: str, verified: bool
) -> None:
    old, new = make_run(tmp_path / "old"), make_run(tmp_path / "new", tokens=2)
    damage(old / name)
    if not verified:
        (old / "manifest.json").unlink()
    with pytest.raises(MismatchError, match=named) as caught:
        against(old, new)
    assert caught.value.fix
    if damage is older and not verified:
        assert "mismatch.rollout/0" in caught.value.message


@pytest.mark.parametrize("journal", [None, "[]", '{"schema": "mismatch.run/0"}', '{"schema'])
def test_a_run_that_does_not_say_its_machine_is_compared_without_it(
    tmp_path: Path, journal: str | None
) -> None:
    old, new = make_run(tmp_path / "old"), make_run(tmp_path / "new", tokens=2)
    noted = {"created": "2026-01-01", "platform": "Linux", "versions": {}, "verb": "check"}
    noted |= {"spec_hash": "0", "command": "mismatch check", "finished": None}
    (new / "run.json").write_text(json.dumps({"schema": "mismatch.run/1", "invocations": [noted]}))
    if journal is not None:
        (old / "run.json").write_text(journal)
    result = against(old, new)
    note = "the machine: not compared, since the old run does not say what it ran on (run.json)"
    assert note in result.notes
    assert result.changed == ()
    noted["platform"] = "Another"
    (old / "run.json").write_text(json.dumps({"schema": "mismatch.run/1", "invocations": [noted]}))
    (change,) = against(old, new).changed
    assert (change.where, change.old, change.new) == ("machine", "Another", "Linux")


def test_a_metric_of_one_run_alone_is_said(tmp_path: Path) -> None:
    old, new = make_run(tmp_path / "old"), make_run(tmp_path / "new", tokens=2)
    routed = make_run(tmp_path / "routed", tokens=2, flips=0.1)
    metric = "routing_disagree_layer"
    (note,) = [note for note in against(old, routed).notes if note.startswith(f"{metric}: ")]
    assert "new" in note
    result = against(old, new)
    assert not any(metric in note for note in result.notes)
    assert metric not in {r.metric for r in result.rows}


def test_other_experts_decide_as_well(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", tokens=1, flips=0.02)
    result = against(old, make_run(tmp_path / "new", tokens=2, flips=0.06))
    assert (result.outcome, result.fails) == ("worse", True)
    assert row(result, "routing_disagree_layer").beyond
    assert row(result).outcome == "none"
    assert row(result, "routing_disagree_layer").change.value == pytest.approx(0.04, abs=0.015)


# ---------------------------------------------------------------- how it is written


def test_the_document_obeys_its_schema(tmp_path: Path) -> None:
    old, new = make_run(tmp_path / "old", tokens=1), make_run(tmp_path / "new", tokens=2)
    result = against(old, new)
    write_page(tmp_path, page(result), against_to_json(result))
    document = json.loads((tmp_path / "against.json").read_text())
    jsonschema.validate(document, schema())
    assert document["metrics"]["k3_kl"]["outcome"] == "none"
    assert document["metrics"]["logprob_abs_diff_max"]["change"]["low"] is None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"more": 1}, schema())


def test_machines_fail_where_the_command_fails(tmp_path: Path) -> None:
    old, new = (
        make_run(tmp_path / "old", tokens=1),
        make_run(tmp_path / "new", tokens=2, spread=0.05),
    )
    for result, failing in ((against(old, new), True), (against(new, old), False)):
        suite = ElementTree.fromstring(against_to_junit(result))
        failures = {case.get("name") for case in suite if case.find("failure") is not None}
        beyond = {r.metric for r in result.rows if r.beyond}
        assert failures == (beyond | {"against"} if failing else set())
        assert suite.get("failures") == str(len(failures))
        assert int(suite.get("tests", 0)) == 1 + sum(r.outcome is not None for r in result.rows)
        assert (
            against_to_github(result).splitlines()[-1].startswith("::error" if failing else "::no")
        )


def test_formats_of_a_comparison_stand_alone_on_standard_output(tmp_path: Path) -> None:
    make_run(tmp_path / "old", tokens=1)
    make_run(tmp_path / "new", tokens=2)
    call = ("compare", "new", "--against", "old", "--format")
    assert json.loads(mismatch(*call, "json", cwd=tmp_path).stdout)["outcome"] == "none"
    assert ElementTree.fromstring(mismatch(*call, "junit", cwd=tmp_path).stdout).tag == "testsuite"
    assert mismatch(*call, "markdown", cwd=tmp_path).stdout.startswith("### ")


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", tokens=1, attention="<script>alert(1)</script>|`x`")
    result = against(old, make_run(tmp_path / "new", tokens=2))
    document, text = html.show_page(page(result)), markdown.show_page(page(result))
    assert "<script>" not in document
    assert "&lt;script&gt;" in document
    assert "\\<script\\>" in text
    assert document == html.show_page(page(result))


def test_names_of_runs_models_and_versions_are_foreign_text(tmp_path: Path) -> None:
    evil = "[bold]<i>x</i>\x1b[31m"
    old = make_run(tmp_path / evil.replace("/", ""), tokens=1)
    new = make_run(tmp_path / "new", tokens=2, version=evil, model=f"m{evil}")
    for result in (against(old, new), against(new, old)):
        console = Console(width=80, record=True, file=io.StringIO())
        print_page(page(result), console)
        terminal = console.export_text()
        document = html.show_page(page(result))
        assert "\x1b" not in terminal + document + markdown.show_page(page(result))
        assert "[bold]" in terminal
        assert "<i>" not in document
        *lines, _ = terminal.splitlines()
        assert max(map(len, lines)) <= 80


def test_the_page_has_every_metric_and_the_verdict(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", tokens=1, spread=0.005)
    result = against(old, make_run(tmp_path / "new", tokens=2, spread=0.01))
    shown = page(result)
    assert (shown.word, shown.tone, shown.reason) == ("worse", "critical", result.reason)
    rows = {item["name"]: item for item in values(shown.sections[0].tables[0])}
    for r in result.rows:
        item = rows[r.metric]
        assert (item["old"], item["new"], item["change"]) == (r.old, r.new, r.change)
    assert [item["p"] for item in rows.values()].index("") == 2  # those that decide come first


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    result = against(make_run(tmp_path / "old"), make_run(tmp_path / "new"))
    broken = replace(result.rows[0], new=replace(result.rows[0].new, value=float("inf")))
    document = against_to_json(replace(result, rows=(broken,)))
    assert document["metrics"][broken.metric]["new"]["value"] is None


# ---------------------------------------------------------------- the command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return mismatch("compare", *arguments)


@pytest.mark.slow
def test_exit_codes_and_what_is_written(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", tokens=1, spread=0.005)
    new = make_run(tmp_path / "new", tokens=2, spread=0.01)
    worse = command(str(new), "--against", str(old), "--out", str(tmp_path / "out"))
    assert worse.returncode == 1, worse.stderr
    verdict, outcome, _, metric, *_ = worse.stdout.splitlines()[-1].split()
    assert (verdict, outcome, metric.strip(",;")) == ("verdict:", "WORSE", "k3_kl")
    assert {path.name for path in (tmp_path / "out").glob("against.*")} == {
        *("against.html", "against.json", "against.md"),
    }
    assert command(str(old), "--against", str(new)).returncode == 0
    again = make_run(tmp_path / "again", tokens=1, spread=0.005)  # the same version and seed
    equal = command(str(again), "--against", str(old))
    assert equal.returncode == 0, equal.stderr
    assert "NO SIGNIFICANT DIFFERENCE" in equal.stdout.splitlines()[-1]
    other = make_run(tmp_path / "other", prompts=3)
    refused = command(str(other), "--against", str(old))
    assert refused.returncode == 2
    assert numbers(refused.stderr)[:3] == [16, 16, 0]  # prompts there, here and in both


# ---------------------------------------------------------------- the example workflow


def workflow() -> dict[str, Any]:
    text = (Path(__file__).parents[2] / "docs" / "ci.md").read_text(encoding="utf-8")
    block = text.split("```yaml\n")[1].split("```")[0]
    return yaml.safe_load(block)


def test_the_example_workflow_uses_commands_and_flags_that_exist() -> None:
    steps = workflow()["jobs"]["mismatch"]["steps"]
    lines = [line.strip() for step in steps for line in step.get("run", "").splitlines()]
    calls = [line.split() for line in lines if line.startswith("mismatch ")]
    assert {call[1] for call in calls} == {"check", "compare"}
    for call in calls:
        usage = mismatch(call[1], "--help").stdout
        for word in call:
            assert not word.startswith("--") or word in usage, word


# ---------------------------------------------------------------- the passes beside the headline


def with_square(run: Path, seed: int, **sizes: float) -> Path:
    """A run with its float32 passes: each scoring is float32 plus rounding of one size, nats."""
    make_run(run, tokens=seed)
    rollout, rng = store.load_rollout(run), np.random.default_rng(seed)
    exact = store.load_scoring(run, "vllm:decode").logprobs
    spec = CheckSpec(rollout=RolloutSpec(engine=EngineSpec(model="m")), train=TrainSpec(model="m"))
    store.write_json(run / "spec.json", to_dict(spec))
    facts = {"device": "cpu", "logprobs_temperature": 1.0, "model": "m", "weights": WEIGHTS}
    modes = {"vllm:decode": "decode", "vllm:fp32": "prefill", "fsdp": "train"}
    modes |= {"fsdp:fp32": "train32", "reference:fp32": "reference", "plain:bf16": "plain"}
    ids = rollout.token_ids[rollout.actions]
    for name, mode in modes.items():
        dtype = "fp32" if name.endswith("fp32") else "bf16"
        size = sizes.get(mode, 2e-7 if dtype == "fp32" else 0.005)
        given = FACTS | facts | {"mode": mode, "dtype": dtype, "world_size": 2}
        noise = size * rng.normal(size=len(ids))
        store.save_scoring(run, Scoring(name, ids, exact + noise, given), rollout)
    return run


def test_a_new_run_whose_engine_is_off_in_float32_fails_though_no_metric_moved(tmp_path: Path):
    old = with_square(tmp_path / "old", 1)
    new = with_square(tmp_path / "new", 2, prefill=1e-3)
    result, sound = against(old, new), against(old, with_square(tmp_path / "again", 3))
    assert (result.outcome, result.fails, result.new.verdict.status) == ("none", True, "broken")
    assert (sound.outcome, sound.fails, sound.new.verdict.correctness.status) == (
        "none",
        False,
        "healthy",
    )
    gaps = {r.scoring: r for r in result.square if r.evidence == "gap"}
    assert (gaps["vllm:fp32"].before, gaps["vllm:fp32"].after) == ("within", "beyond")
    assert "square" in {section.id for section in page(result).sections}
    jsonschema.validate(against_to_json(result), schema())


def test_a_run_without_float32_passes_is_said_and_not_healthy(tmp_path: Path) -> None:
    old = with_square(tmp_path / "old", 1)
    result = against(old, make_run(tmp_path / "new", tokens=2))
    assert result.new.verdict.status == "inconclusive"
    assert [note for note in result.notes if "square" in note and "new run" in note]
    assert not result.fails  # --fail-on inconclusive asks for more
    assert against(old, tmp_path / "new", fail_on="inconclusive").fails


def test_a_new_run_whose_gradient_pass_has_nan_fails(tmp_path: Path) -> None:
    old, new = (with_square(tmp_path / name, seed) for name, seed in (("old", 1), ("new", 2)))
    rollout, train = store.load_rollout(new), store.load_scoring(new, "fsdp")
    broken = train.logprobs.copy()
    broken[:50] = np.nan
    store.save_scoring(new, replace(train, name="fsdp:grad", logprobs=broken), rollout)
    result = against(old, new)
    assert (result.fails, result.new.verdict.status) == (True, "broken")


def test_a_k3_that_grew_manyfold_in_a_few_prompts_is_not_passed_over(tmp_path: Path) -> None:
    old, new = (make_run(tmp_path / name, tokens=seed) for name, seed in (("old", 1), ("new", 2)))
    rollout = store.load_rollout(new)
    train = store.load_scoring(new, "fsdp")
    spiked = train.logprobs.copy()
    spiked[[7 + 96 * prompt for prompt in (0, 4, 9)]] += 2.0  # a token in each of three prompts
    store.save_scoring(new, replace(train, logprobs=spiked), rollout)
    result = against(old, new)
    assert row(result).new.value > 10 * row(result).old.value
    assert row(result).p_value > 0.05
    assert (row(result).outcome, result.outcome, result.fails) == ("undecided", "undecided", True)
