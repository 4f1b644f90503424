"""`mismatch kernels`: bad input, a run's report, and a real audit with kernels that misbehave."""

import json
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from mismatch.cli.main import app, main
from mismatch.errors import MismatchError
from mismatch.features.kernels import isolation as supervise
from mismatch.features.kernels.isolation import AuditSpec


def invoke(*arguments):
    done = CliRunner().invoke(app, ["kernels", *arguments], catch_exceptions=False)
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "tiny-gpt-osss"], "model not found"),
        (["--dtype", "fp8"], "--dtype 'fp8'"),
        (["--time-limit", "0"], "--time-limit"),
        (["--only", "experts", "--kernel", "a:b"], "--only experts"),
        (["--only", "attention", "--kernel-experts", "a:b"], "--kernel-experts"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MismatchError, match=words) as caught:
        CliRunner().invoke(app, ["kernels", *arguments], catch_exceptions=False)
    assert caught.value.fix
    assert not list(tmp_path.iterdir())


def test_the_flags_become_what_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(supervise, "run_audit", lambda spec, folder, progress: asked.append(spec))
    arguments = [
        "--kernel",
        "a:b@flash",
        "--kernel-experts",
        "c:d",
        "--name",
        "eager",
        "--seed",
        "7",
    ]
    arguments += ["--dtype", "fp32,bf16", "--dtype", "fp16"]
    with pytest.raises(AttributeError):  # of the report, which is none here
        invoke(*arguments, "--time-limit", "5", "--model", "qwen3-0.6b")
    assert asked == [
        AuditSpec(
            model="Qwen/Qwen3-0.6B",
            names=("eager",),
            kernels=("a:b@flash",),
            expert_kernels=("c:d",),
            dtypes=("fp32", "bf16", "fp16"),
            seed=7,
            limit_s=5.0,
        )
    ]


# ---------------------------------------------------------------- a real audit

MINE = """
    import os, signal
    import torch

    def masked(module, query, key, value, attention_mask, scaling=None, **more):
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * scaling
        return scores.masked_fill(~attention_mask, float("-inf")), value

    def right(module, query, key, value, attention_mask, s_aux=None, **more):
        scores, value = masked(module, query, key, value, attention_mask, **more)
        sinks = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        seen = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (seen @ value).transpose(1, 2), None

    def sinkless(module, query, key, value, attention_mask, **more):
        scores, value = masked(module, query, key, value, attention_mask, **more)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    def dies(*arguments, **more):
        os.kill(os.getpid(), signal.SIGSEGV)

"""
ONLY_FLEX = ("--only", "attention", "--name", "flex_attention", "--dtype", "fp32")
FAST = ("--only", "attention", "--name", "sink-sdpa", "--dtype", "fp32")


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """One audit of a right kernel, one that crashes and a wrong one."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_kernels.py").write_text(textwrap.dedent(MINE))
    names = [f"my_kernels:{name}" for name in ("right", "dies", "sinkless")]
    flags = [text for name in names for text in ("--kernel", name)]
    command = [sys.executable, "-m", "mismatch", "kernels", *FAST, *flags]
    command += ["--out", "out"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    return done, folder / "out"


@pytest.mark.slow
def test_good_and_bad_kernels_are_told_apart_and_a_crash_stops_nothing(audited):
    done, out = audited
    assert done.returncode == 1, done.stdout + done.stderr
    document = json.loads((out / "kernels.json").read_text())
    audits = {audit["name"]: audit for audit in document["audits"]}
    assert audits["sink-sdpa"]["verdict"] == "sound"
    assert audits["my_kernels:right"]["verdict"] == "sound"
    assert "signal 11 (SIGSEGV)" in audits["my_kernels:dies"]["reason"]
    wrong = audits["my_kernels:sinkless"]
    failed = {finding["column"] for finding in wrong["findings"] if finding["outcome"] == "failed"}
    assert {"sinks", "sink_gradient"} <= failed
    assert not failed & {"window", "packing", "offsets", "grouped_queries", "scaling"}
    assert wrong["errors"][0]["gradients"]["sinks"] == 1.0


@pytest.mark.slow
def test_the_last_line_is_the_verdict(audited):
    done, _ = audited
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("verdict: wrong")
    assert "my_kernels:dies: crashed" in last
    assert "my_kernels:sinkless: sinks, output" in last
    assert max(len(row) for row in done.stdout.splitlines()[:-1]) <= 80
    assert "my_kernels:right is" not in done.stdout


@pytest.mark.slow
def test_a_mistake_leaves_nothing_in_the_directory_that_was_asked_for(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(MismatchError, match="is no function"):
        invoke("--kernel", "mismatch.features.kernels.results:ATTENTION_COLUMNS", "--out", str(out))
    assert not out.exists()  # so that the same command, mended, is not refused


@pytest.mark.slow
def test_nothing_audited_is_exit_2(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mismatch", "kernels", *ONLY_FLEX])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "flex_attention" in error
    assert "fix:" in error
    assert "--only" in error
    assert not list(tmp_path.iterdir())
