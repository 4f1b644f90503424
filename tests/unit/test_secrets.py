"""Secrets of many kinds are planted everywhere, and a whole run directory is searched for them."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from mismatch.cli.session import command
from mismatch.cli.to_spec import _engine_arg
from mismatch.errors import MismatchError
from mismatch.reports.files import write_report
from mismatch.run import provenance as provenance_module
from mismatch.run import store
from mismatch.run.directory import Journal, new_directory
from mismatch.run.messages import write_error
from mismatch.run.provenance import provenance, redact
from mismatch.types import NotTested

from ..made_run import make_run, rollout, scoring, spec
from .test_launch import python, run_worker

PLANTED = {
    "hub": "hf_AbCdEfGhIjKlMnOpQrStUv",
    "openai": "sk-proj-0123456789abcdefABCDEF",
    "github": "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "gitlab": "glpat-0123456789abcdefXYZ",
    "aws": "AKIA0123456789ABCDEF",
    "google": "AIza0123456789abcdefghijABCDEFGHIJ01234",
    "slack": "xoxb-0123456789-abcdef",
    "jwt": "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2lnbmF0dXJl",
    "password in an address": "https://user:hunter2secret@host/x",
    "parameter of an address": "https://host/x?api_key=parametersecret",
    "bearer": "Bearer c29tZXRva2VuMTIz",
    "environment": "correct horse battery staple",
    "private key": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n",
}
# What must not be found anywhere.
SECRETS = [
    *(PLANTED[name] for name in list(PLANTED)[:8]),
    *("hunter2secret", "parametersecret", "c29tZXRva2VuMTIz", PLANTED["environment"]),
    "MIIEvQIBADANBgkq",
]
ALL = "; ".join(PLANTED.values())
LINE = ALL.replace("\n", "")  # logs are looked at line by line


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_SECRET", PLANTED["environment"])
    for name in ("VLLM_S3_URL", "SGLANG_PROXY_PASSWD", "TORCH_AUTH", "NCCL_X_PASS", "VLLM_X"):
        monkeypatch.setenv(name, ALL.replace("\n", " "))
    monkeypatch.setenv("VLLM_HOST_IP", "10.11.12.13")
    monkeypatch.setenv("TORCH_HOME", "/home/alice/torch")


def everything(folder) -> str:
    """All bytes of a run, Parquet headers in plain."""
    texts = []
    for path in folder.rglob("*"):
        if path.is_file():
            texts.append(path.read_bytes().decode("latin-1"))
        if path.suffix == ".parquet" and path.parent.name == "scores":
            texts.append(json.dumps(store.scoring_header(folder, path.stem), default=str))
    return "\n".join(texts)


def test_no_secret_is_in_a_run_directory(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    asked, tokens = spec(), rollout()
    monkeypatch.setattr(sys, "argv", ["mismatch", "check", "--note", ALL, "--hf-token", "hunter2x"])
    Journal(run, "check", asked, command()).save()
    leaky = scoring("told", tokens, 0.0)
    leaky.fingerprint["note"] = ALL
    store.save_scoring(run, leaky, tokens)
    write_error(run, "train", MismatchError(ALL, ALL))
    with pytest.raises(MismatchError) as caught:
        run_worker("engine", python(f"print({LINE!r}); raise SystemExit(1)"), run)
    from mismatch.pipeline.build import build_report

    report, table = build_report(run, asked)
    report.run["command"] = ALL
    report = replace(report, not_tested=(*report.not_tested, NotTested(ALL, ALL, ALL)))
    write_report(run, report, table)
    text = everything(run) + redact(caught.value.message)
    assert not [secret for secret in (*SECRETS, "hunter2x") if secret in text]
    assert "***" in text


def test_provenance_tells_no_host_no_user_and_no_secret():
    facts = json.dumps(provenance("mismatch"))
    assert not [secret for secret in SECRETS if secret in facts]
    for private in ("10.11.12.13", "alice"):
        assert private not in facts


@pytest.mark.parametrize(
    "text",
    ["hf_token=abcabc", "api-key=18273645", "password=hunter2x", f"note={PLANTED['openai']}"],
)
def test_a_secret_as_an_engine_argument_is_refused_and_not_repeated(text):
    with pytest.raises(MismatchError) as caught:
        _engine_arg(text)
    assert text.partition("=")[2] not in str(caught.value)


HARMLESS = [
    "--max-tokens 128 --micro-batch-tokens=4096",
    '{"token_ids": [1, 2], "pad_token": "<pad>", "key": "value"}',
    "http://127.0.0.1:8000/v1?config_format=json",
    "risk-weighted-averages-of-tokens and task-specific-something-long",
    "user@example.com",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


@pytest.mark.parametrize("name", PLANTED)
def test_every_kind_is_known(name):
    assert not [secret for secret in SECRETS if secret in redact(f"a {PLANTED[name]} b")]


# ---------------------------------------------------------------- directories


def test_a_new_run_is_its_owners_alone(tmp_path):
    directory = new_directory(tmp_path / "deep" / "run", "m")
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_commands_that_begin_at_once_get_directories_of_their_own(tmp_path, monkeypatch):
    code = (
        "import os, time\n"
        "from mismatch.run.directory import new_directory\n"
        "time.sleep(max(0, {at} - time.time()))\n"
        "print(new_directory(None, 'm'))\n"
    )
    import time

    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", code.format(at=time.time() + 2)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    names = [process.communicate()[0].strip() for process in started]
    assert len(set(names)) == 6, names
    assert all(names)


def test_a_run_is_made_again_where_a_copy_lost_its_mode(tmp_path):
    run = make_run(tmp_path / "run")
    copy = shutil.copytree(run, tmp_path / "copy")
    assert store.load_rollout(copy).token_ids.size


# ---------------------------------------------------------------- variables that a YAML names


@pytest.fixture
def verl_of_defaults(tmp_path, monkeypatch):
    """What the adapter reads of verl before it builds anything: its defaults."""
    pytest.importorskip("omegaconf", reason="client: no omegaconf")
    room = tmp_path / "packages/verl/trainer/config"
    room.mkdir(parents=True)
    for folder in (room, room.parent, room.parent.parent):
        (folder / "__init__.py").touch()
    defaults = "actor_rollout_ref: {model: {path: x}, actor: {strategy: fsdp}}\n"
    (room / "_generated_ppo_trainer.yaml").write_text(defaults)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setattr(provenance_module, "RESOLVED", set())
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


def test_a_worker_hides_what_a_yaml_takes_from_the_environment(
    tmp_path, monkeypatch, verl_of_defaults
):
    from mismatch.trainers.verl import composed

    monkeypatch.setenv("SOME_API_KEY", "secret-by-its-name")
    monkeypatch.setenv("DATABASE", "private-by-its-place")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("actor_rollout_ref: {actor: {strategy: '${oc.env:DATABASE}'}}\n")
    strategy = composed(str(recipe)).actor.strategy
    assert strategy == "private-by-its-place"
    write_error(tmp_path, "adapter", MismatchError(f"actor.strategy is {strategy}"))
    assert strategy not in (tmp_path / "errors" / "adapter.json").read_text()
    recipe.write_text("actor_rollout_ref: {actor: {strategy: '${oc.env:SOME_API_KEY}'}}\n")
    with pytest.raises(MismatchError, match="SOME_API_KEY") as caught:
        composed(str(recipe))
    assert "secret-by-its-name" not in str(caught.value)
