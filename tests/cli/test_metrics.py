"""`mismatch metrics`, and `--names` on a run that is there already."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest

from mismatch.cli.main import app
from mismatch.metrics import METRICS
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


def test_the_list_has_every_metric_with_unit_kind_and_level(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = output_of("metrics")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    for name, metric in METRICS.items():
        assert rows[name][0] == metric.unit.split()[0]
        assert metric.kind in rows[name]
        assert metric.reduction in rows[name]


def test_json():
    document = json.loads(mismatch("metrics", "--format", "json").stdout)
    assert document["schema"] == "mismatch.metrics/2"
    rows = {row["name"]: row for row in document["metrics"]}
    assert list(rows) == list(METRICS)
    (areal,) = [alias for alias in rows["kl"]["aliases"] if alias["framework"] == "areal"]
    assert areal["sign"] == "opposite"
    assert areal["differs"] is True
    assert "Terms hold" not in rows["ratio_mean"]["formula"]  # how it is computed
    assert "delta²/2," in rows["k2_kl"]["formula"]


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
    return directory


@pytest.mark.slow
def test_names_on_an_existing_run_in_the_terminal(run):
    shown = inside("report", str(run), "--names", "trl")
    section = shown.partition("\nIn TRL")[2].partition("\n\n")[0]
    assert max(map(len, section.splitlines())) <= 80
    line = next(line for line in section.splitlines() if "importance_sampling_ratio/max" in line)
    assert line.split()[-1] == "no"
    line = next(line for line in section.splitlines() if "sampling_logp_difference/max" in line)
    assert line.split()[-1] == "yes"
    assert "product of" in " ".join(section.split())
    assert "rollout_corr/" not in shown
    assert shown.splitlines()[-1].startswith("verdict: ")


@pytest.mark.slow
def test_names_in_html_and_markdown_and_without_them(run):
    directory = run
    inside("report", str(directory), "--names", "trl")
    html = (directory / "report.html").read_text(encoding="utf-8")
    markdown = (directory / "report.md").read_text(encoding="utf-8")
    for text in (html, markdown):
        assert "In TRL" in text
        assert "rollout_corr/" not in text
        assert "SkyRL policy" not in text
    assert "`sampling/importance_sampling_ratio/mean` | no" in markdown
    inside("report", str(directory))
    assert "In TRL" not in (directory / "report.html").read_text(encoding="utf-8")


def test_a_pair_takes_names_with_and_without_a_directory(run, tmp_path):
    pair = ("compare", str(run), "--left", "transformers:decode", "--right", "fsdp")
    assert "token_mult_prob_error" in inside(*pair, "--names", "nemo-rl")
    inside(*pair, "--names", "nemo-rl", "--out", str(tmp_path / "pair"))
    assert "In NeMo-RL" in (tmp_path / "pair" / "report.html").read_text(encoding="utf-8")


def test_an_unknown_framework_is_refused(run):
    done = mismatch("report", str(run), "--names", "unheard-of")
    assert done.returncode == 2
    assert "verl" in done.stderr
