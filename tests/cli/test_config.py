"""--config: flags as a file."""

import re

import pytest

from mismatch.cli.check import check
from mismatch.cli.command import read_config
from mismatch.cli.main import Group
from mismatch.errors import MismatchError
from tests.command import mismatch

CHECK = ["check", "--model", "tiny-gpt-oss"]


def given(verb: str, *arguments: str) -> dict:
    """The values of all flags that a command line and its file give."""
    return Group().get_command(None, verb).make_context(verb, [*arguments]).params


def test_a_file_gives_what_the_command_line_gives(tmp_path):
    flags = ["--engine-arg", 'a="x\\ty"', "--engine-arg", "b=é", "--no-routing"]
    flags += ["--autocast", "bf16", "--temperature", "1e-05", "--prompts", "a b\\c.jsonl"]
    flags += ["--max-model-len", "512", "--thresholds", "levels.toml", "--layout", "packing"]
    path = tmp_path / "run.toml"
    path.write_text(
        "engine_arg = ['a=\"x\\ty\"', 'b=é']\nrouting = false\nautocast = 'bf16'\n"
        "temperature = 1e-05\nprompts = 'a b\\c.jsonl'\nmax_model_len = 512\n"
        "thresholds = 'levels.toml'\nlayout = 'packing'\n"
    )
    typed, read = given("check", *flags), given("check", "--config", str(path))
    assert read.pop("config") == path
    assert {name: typed[name] for name in read} == read
    assert read["engine_arg"] == ['a="x\\ty"', "b=é"]
    assert read["temperature"] == 1e-5


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "a/b"\nmax-tokens = 7\ntrain_dtype = "fp32"\n')
    values = given("check", "--config", str(path), "--train-dtype", "fp16")
    assert (values["model"], values["max_tokens"]) == ("a/b", 7)
    assert values["train_dtype"] == "fp16"
    assert values["samples_per_prompt"] == 4


def test_every_flag_of_check_can_stand_in_a_file(tmp_path):
    listed = mismatch("check", "--help-all", cwd=tmp_path).stdout
    names = {name.replace("-", "_") for name in re.findall(r"^  --([a-z-]+)", listed, re.M)}
    for name in names - {"config", "help", "json"}:  # how it is printed belongs to the line
        (tmp_path / "run.toml").write_text(f"{name} = {{}}")
        with pytest.raises(MismatchError, match=f"key '{name}': "):
            read_config(tmp_path / "run.toml", check.options)


def test_one_file_serves_several_verbs(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "a/b"\nmicro_batch_tokens = 64\nmax_tokens = 5\n')
    rollout = given("rollout", "--config", str(path))
    score = given("score", "somewhere", "--config", str(path))
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
