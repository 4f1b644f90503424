"""`mismatch metrics`, and `--names` on a run that is there already."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest

from mismatch.analysis.levels import default_thresholds
from mismatch.cli.main import app
from mismatch.metrics import METRICS, framework_formulas
from mismatch.metrics.describe import DIRECTIONS
from mismatch.metrics.framework_names import metric_called
from mismatch.run import store
from tests.command import mismatch
from tests.made_run import make_run


def output_of(*arguments: str) -> str:
    done = mismatch(*arguments)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    return done.stdout


def inside(*arguments: str) -> str:
    """The same without a process of its own; what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert app(list(arguments), standalone_mode=False) == 1  # inconclusive: without a square
    return printed.getvalue()


def test_the_list_has_every_metric_with_unit_kind_and_level():
    text = output_of("metrics")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    for name, metric in METRICS.items():
        assert rows[name][0] == metric.unit.split()[0]
        assert metric.kind in rows[name]
        assert metric.reduction in rows[name]


def test_explaining_one_says_everything():
    text = " ".join(output_of("metrics", "--explain", "k3_kl").split())
    for part in (
        "mean of rho - 1 - delta",
        "delta = train - rollout",
        "low is agreement",
        "nats; 0 and above",
        "one term per action token",
        "95 %, resampling whole prompts",
        "J. Schulman",
        "from mismatch.metrics import k3_kl",
        "verl rollout_corr/k3_kl the same number read in verl 0.9.1,",
        "miles train_rollout_kl mean of per-sequence means; delta clamped to ±20",
        "bf16 MoE healthy ≤ 0.002, unfit > 0.013 our judgement (prime-rl",
        "how much the trainer's policy differs",
    ):
        assert part in text, part


def test_high_is_good_turns_the_bounds():
    text = output_of("metrics", "--explain", "probs_pearson")
    level = default_thresholds()["probs_pearson"]["bf16 MoE"]
    assert f"healthy ≥ {level.healthy:g}, unfit < {level.unfit:g}" in text
    assert DIRECTIONS["high"] in text


def test_only_what_rests_on_delta_has_its_sign():
    sign = "delta = train - rollout"
    assert sign in output_of("metrics", "--explain", "k3_kl")
    assert sign not in output_of("metrics", "--explain", "routing_disagree_layer")


def test_a_metric_without_levels_or_aliases_says_so():
    text = output_of("metrics", "--explain", "ratio_outside_1_02")  # as Python spells it
    assert text.startswith("ratio_outside_1.02:")
    assert "no other framework" in text
    assert "none:" in text


@pytest.mark.parametrize(
    "name",
    ["gen_kl_error", "rollout_corr/k3_kl", "verl rollout_corr/k3_kl", "mis_k3_kl", "K3_KL"],
)
def test_another_frameworks_name_is_understood(name):
    assert output_of("metrics", "--explain", name).startswith("k3_kl:")


def test_the_end_of_a_name_will_do_where_only_one_is_meant():
    assert metric_called("rollout_is_mean") == "ratio_mean"
    assert metric_called("importance_sampling_ratio/MAX") == "ratio_max"
    assert metric_called("rollout_is_eff_sample_size") == "ess_token"
    assert metric_called("mean") is None  # ends names of several
    assert metric_called("is_mean") is None  # no whole part of a name


def test_an_unknown_name_gets_near_ones_and_exit_code_2():
    done = mismatch("metrics", "--explain", "k3kl")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no metric 'k3kl'" in done.stderr
    assert "k3_kl" in done.stderr.partition("did you mean")[2]
    nothing = mismatch("metrics", "--explain", "zzzzzz")
    assert nothing.returncode == 2
    assert "did you mean" not in nothing.stderr


def test_json():
    document = json.loads(mismatch("metrics", "--json").stdout)
    assert document["schema"] == "mismatch.metrics/1"
    rows = {row["name"]: row for row in document["metrics"]}
    assert list(rows) == list(METRICS)
    (areal,) = [alias for alias in rows["kl"]["aliases"] if alias["framework"] == "areal"]
    assert areal["sign"] == "opposite"
    assert areal["differs"] is True
    single = json.loads(mismatch("metrics", "--json", "--explain", "ess_seq").stdout)
    assert [row["name"] for row in single["metrics"]] == ["ess_seq"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with noise of 0.3 nats, compared."""
    directory = make_run(tmp_path_factory.mktemp("names") / "run", shift=0.0)
    rollout = store.load_rollout(directory)
    train = store.load_scoring(directory, "fsdp")
    gap = np.random.default_rng(4).normal(0.0, 0.3, len(train.logprobs))
    train.logprobs[:] = store.load_scoring(directory, "transformers:decode").logprobs + gap
    for path in directory.glob("scores/fsdp*"):
        path.unlink()
    from mismatch.specs import CheckSpec
    from tests.made_run import spec

    settings: CheckSpec = spec()
    store.save_scoring(directory, train, rollout, made_by=settings.train)
    shown = inside("compare", str(directory), "--names", "verl")
    assert "rollout_corr/rollout_is_mean" in shown
    assert "In verl" in (directory / "report.html").read_text(encoding="utf-8")
    return directory, gap, rollout.sequence_of_token[rollout.actions]


@pytest.mark.slow
def test_names_on_an_existing_run_in_the_terminal(run):
    directory, gap, sequence = run
    shown = inside("report", str(directory), "--names", "trl")
    section = shown.partition("\nIn TRL")[2].partition("\n\n")[0]
    assert max(map(len, section.splitlines())) <= 80
    theirs = framework_formulas.trl_ratio_max(gap, sequence)
    assert theirs != pytest.approx(float(np.exp(gap.max())), rel=0.01)
    line = next(line for line in section.splitlines() if "importance_sampling_ratio/max" in line)
    assert float(line.split()[-1]) == pytest.approx(theirs, rel=0.01)
    assert "product of" in " ".join(section.split())
    assert "rollout_corr/" not in shown
    assert shown.splitlines()[-1].startswith("verdict: ")


@pytest.mark.slow
def test_names_in_html_and_markdown_and_without_them(run):
    directory, gap, sequence = run
    inside("report", str(directory), "--names", "trl")
    html = (directory / "report.html").read_text(encoding="utf-8")
    markdown = (directory / "report.md").read_text(encoding="utf-8")
    value = f"{framework_formulas.trl_ratio_mean(gap, sequence):.3f}"
    assert value[:4] != f"{np.exp(gap).mean():.3f}"[:4]  # not our number
    for text in (html, markdown):
        assert "In TRL" in text
        assert "rollout_corr/" not in text
        assert "SkyRL policy" not in text
    assert f"sampling/importance_sampling_ratio/mean = {value[:4]}" in html
    assert f"`sampling/importance_sampling_ratio/mean` | {value[:4]}" in markdown
    inside("report", str(directory))
    html = (directory / "report.html").read_text(encoding="utf-8")
    assert "known elsewhere as" in html
    assert "verl rollout_corr/k3_kl" in html
    assert "SkyRL policy/" in html
    assert "known elsewhere" not in (directory / "report.md").read_text(encoding="utf-8")


def test_a_pair_takes_names_with_and_without_a_directory(run, tmp_path):
    directory, _, _ = run
    pair = ("compare", str(directory), "--left", "transformers:decode", "--right", "fsdp")
    assert "mean_seq_mult_prob_error" in inside(*pair, "--names", "nemo-rl")
    inside(*pair, "--names", "nemo-rl", "--out", str(tmp_path / "pair"))
    assert "In NeMo-RL" in (tmp_path / "pair" / "report.html").read_text(encoding="utf-8")


def test_an_unknown_framework_is_refused(run):
    done = mismatch("report", str(run[0]), "--names", "unheard-of")
    assert done.returncode == 2
    assert "verl" in done.stderr
