"""Command lines that cannot be read: the nearest flag or command, each named once, exit code 2."""

from __future__ import annotations

import json

import pytest

from mismatch.cli.flags import Flags
from mismatch.cli.main import Group
from mismatch.cli.to_spec import check_spec, checkpoint_dtype
from mismatch.errors import MismatchError
from mismatch.run.store import write_json
from mismatch.specs import CheckSpec, TrainSpec, spec_hash, to_dict
from tests.cli.test_ranges import run

CASES = {
    "unknown flag": (["check", "--tempertaure", "1"], "--tempertaure", "mean --temperature?"),
    "unknown command": (["chekc"], "chekc", "mean check?"),
    "unknown choice": (["check", "--layout", "pakcing"], "--layout", "mean packing?"),
    "unknown dtype": (["check", "--dtype", "bfloat17"], "--dtype", "mean bfloat16?"),
    "no number": (["check", "--num-prompts", "x"], "--num-prompts", "a whole number"),
    "no time": (["check", "--budget-minutes", "0"], "--budget-minutes", "a number above 0"),
    "no batch": (["check", "--gradients", "0"], "--gradients", "from 1 to"),
    "no requests": (["check", "--server-concurrency", "0"], "--server-concurrency", "from 1 to"),
    "endless": (["check", "--server-timeout", "inf"], "--server-timeout", "above 0"),
    "no value": (["check", "--num-prompts"], "--num-prompts", "mismatch check --help"),
    "no run": (["compare"], "'RUN'", "mismatch compare --help"),
}


LOOPS = {
    "greedy": (["--temperature", "0"], "--temperature 0", "--temperature 1"),
    "one sample": (["--samples-per-prompt", "1"], "several samples", "--samples-per-prompt 4"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_refuses_what_it_cannot_train_on(name, monkeypatch, capsys, tmp_path):
    flags, says, remedy = LOOPS[name]
    out = tmp_path / "run"
    code, _, error = run(["loop", *flags, "--out", str(out)], monkeypatch, capsys)
    assert code == 2
    assert says in error
    assert remedy in error
    assert not out.exists()


SIDES = {  # of a side that the command does not run
    "rollout": ["--python train=x", "--weights train=bf16", "--weights effect=bf16"],
    "sync-probe": ["--python train=x", "--weights train=bf16"],
    "score RUN": ["--python engine=x", "--python vllm=x", "--weights engine=bf16"],
    "score RUN --engine transformers": ["--python train=x", "--weights effect=bf16"],
    "check --server http://127.0.0.1:9": ["--python engine=x", "--weights engine=bf16"],
}


@pytest.mark.parametrize("command", SIDES)
def test_a_flag_of_a_side_that_does_not_run_is_refused(command, monkeypatch, capsys, tmp_path):
    write_json(tmp_path / "spec.json", to_dict(CheckSpec(train=TrainSpec("tiny-gpt-oss"))))
    for given in SIDES[command]:
        line = f"{command.replace('RUN', str(tmp_path))} --model tiny-gpt-oss {given}"
        code, _, error = run(line.split(), monkeypatch, capsys)
        assert code == 2
        assert f"error: {given.partition('=')[0]}=" in error, error


@pytest.mark.parametrize("name", CASES)
def test_refused_with_the_name_and_a_remedy(name, monkeypatch, capsys):
    arguments, culprit, remedy = CASES[name]
    code, _, error = run(arguments, monkeypatch, capsys)
    assert code == 2
    assert error.count(culprit) == 1
    assert remedy in error
    assert "fix:" in error


def test_without_a_command_the_help_is_printed(monkeypatch, capsys):
    code, bare, _ = run([], monkeypatch, capsys)
    assert code == 2
    code, asked, _ = run(["--help"], monkeypatch, capsys)
    assert code == 0
    assert bare == asked


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_questions_to_the_tool_come_before_its_commands(flag, monkeypatch, capsys):
    alone = run([flag], monkeypatch, capsys)
    assert alone[0] == 0
    assert run([flag, "nosuch"], monkeypatch, capsys) == alone


def given(verb, *arguments):
    """The values of all flags that a command line gives."""
    return Group().get_command(None, verb).make_context(verb, [*arguments]).params


def spec_with(*arguments):
    """The spec that a command line means."""
    return check_spec(Flags(given("check", "--nproc-per-node", "1", *arguments)))


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
        ("half", "fp16"),
        ("float32", "fp32"),
        ("float", "fp32"),
        ("auto", "bf16"),
    ],
)
def test_dtypes_may_be_named_as_in_vllm(name, ours, tmp_path, monkeypatch, capsys):
    flags = ["dtype", "train-dtype", "autocast", "head-dtype", "router-dtype"]
    flags += (
        ["master-dtype"] if name != "auto" else []
    )  # there: as it is stored, where no number changes
    specs = [
        spec_with("--model", "tiny-gpt-oss", *(f"--{flag}={dtype}" for flag in flags))
        for dtype in (name, ours)
    ]
    assert specs[0] == specs[1]
    assert spec_hash(specs[0]) == spec_hash(specs[1])
    assert specs[0].rollout.engine.dtype == specs[0].train.autocast == ours


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "float16"}, "fp16"),
        ({"text_config": {"dtype": "float32"}}, "fp32"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "bf16"),
    ],
)
def test_auto_is_the_dtype_of_the_checkpoint(config, dtype, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint_dtype(str(tmp_path), None) == dtype


@pytest.mark.parametrize("config", [{}, {"dtype": "float8_e4m3fn"}])
def test_auto_without_a_dtype_that_runs_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MismatchError, match="auto"):
        checkpoint_dtype(str(tmp_path), None)


def test_a_flag_may_stand_alone():
    for arguments in (["--resume"], ["--resume", "--model", "tiny-gpt-oss"]):
        assert given("check", *arguments)["resume"] == "newest"
    assert given("check", "--resume", "runs/a")["resume"] == "runs/a"
