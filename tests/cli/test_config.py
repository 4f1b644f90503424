"""--config and --print-config: flags as a file, both ways."""

import tomllib
from pathlib import Path

import pytest

from tests.command import mismatch

CHECK = ["check", "--model", "tiny-gpt-oss"]


def printed(*arguments: str, cwd: Path) -> dict:
    done = mismatch(*arguments, "--print-config", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return tomllib.loads(done.stdout)


def test_a_printed_config_read_again_prints_itself(tmp_path):
    flags = ["--engine-arg", 'a="x\\ty"', "--engine-arg", "b=é", "--no-routing"]
    flags += ["--autocast", "bf16", "--temperature", "1e-05", "--prompts", "a b\\c.jsonl"]
    flags += ["--max-model-len", "512", "--thresholds", "levels.toml", "--layout", "packing"]
    first = mismatch(*CHECK, *flags, "--print-config", cwd=tmp_path).stdout
    (tmp_path / "run.toml").write_text(first)
    second = mismatch("check", "--config", "run.toml", "--print-config", cwd=tmp_path)
    assert second.stdout == first, second.stderr
    values = tomllib.loads(first)
    assert values["engine_arg"] == ['a="x\\ty"', "b=é"]
    assert values["temperature"] == 1e-5
    assert values["routing"] is False
    assert values["prompts"] == "a b\\c.jsonl"
    assert list(tmp_path.iterdir()) == [tmp_path / "run.toml"], "nothing may start"


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    text = 'model = "a/b"\nmax-tokens = 7\ntrain_dtype = "fp32"\nno_such = 1\n'
    (tmp_path / "run.toml").write_text(text.replace("no_such = 1\n", ""))
    values = printed("check", "--config", "run.toml", "--train-dtype", "fp16", cwd=tmp_path)
    assert (values["model"], values["max_tokens"]) == ("a/b", 7)
    assert values["train_dtype"] == "fp16"
    assert values["samples_per_prompt"] == 4


def test_every_flag_of_check_can_stand_in_a_file(tmp_path):
    import re

    listed = mismatch("check", "--help-all", cwd=tmp_path).stdout
    names = {name.replace("-", "_") for name in re.findall(r"^  --([a-z-]+)", listed, re.M)}
    text = mismatch(*CHECK, "--print-config", cwd=tmp_path).stdout
    in_file = set(re.findall(r"^(?:# )?(\w+) (?:=|is not set)", text, re.M))
    assert in_file == names - {"config", "print_config", "help"}


def test_one_file_serves_several_verbs(tmp_path):
    (tmp_path / "run.toml").write_text('model = "a/b"\nmicro_batch_tokens = 64\nmax_tokens = 5\n')
    rollout = printed("rollout", "--config", "run.toml", cwd=tmp_path)
    score = printed("score", "somewhere", "--config", "run.toml", cwd=tmp_path)
    assert rollout["max_tokens"] == 5
    assert "micro_batch_tokens" not in rollout
    assert score["micro_batch_tokens"] == 64
    assert score["model"] == "a/b"


CASES = {
    "missing": (None, "absent.toml"),
    "not TOML": ("model = ", "not TOML"),
    "typo": ('atention = "eager"', "did you mean attention"),
    "key of no verb": ("zzzz = 1", "unknown key 'zzzz'"),
    "text for a number": ('num-prompts = "many"', "key 'num-prompts': 'many' is not a whole"),
    "fraction for a whole number": ("max_tokens = 1.5", "key 'max_tokens'"),
    "truth for a number": ("max_tokens = true", "key 'max_tokens'"),
    "number for a truth": ("routing = 1", "true or false"),
    "unknown choice": ('dtype = "fp8"', "bf16, fp16, fp32"),
    "number in a list": ("engine_arg = [1]", "1 is not a string"),
    "no time": ("budget_minutes = 0", "0 is not a number above 0"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_file_is_refused_with_file_key_and_fix(name, tmp_path):
    text, expected = CASES[name]
    path = tmp_path / ("run.toml" if text is not None else "absent.toml")
    if text is not None:
        path.write_text(text)
    done = mismatch(*CHECK, "--config", str(path), cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert str(path) in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_print_config_shows_no_password() -> None:
    from typer.testing import CliRunner

    from mismatch.cli.main import app

    line = ["check", "--print-config", "--server", "http://me:hunter2@host:1/v1"]
    output = CliRunner().invoke(app, line).output
    assert 'server = ["http://***@host:1/v1"]' in output
    assert "hunter2" not in output
