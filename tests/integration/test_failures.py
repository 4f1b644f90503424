"""What goes wrong in the middle of a check: a clear error, exit code 2, no process left behind."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from mismatch.models import EMBEDDED

from ..command import mismatch
from ..conftest import grid
from ..limited import mounted
from .conftest import SMALL, TINY_RUN, TINY_SAMPLING, check_command, run_check

pytestmark = pytest.mark.slow
QUICK = (*SMALL, "--engine", "transformers")


def start(directory: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        check_command(directory, *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


ENGINE, TRAINER = "jobs/engine.json", "jobs/train.json"
HANDED_ON = "jobs/train-go.json"  # the engine is done


def workers_of(directory: Path, session: str) -> list[psutil.Process]:
    """Worker processes of this run, by their job file."""
    processes = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if any(str(directory) in part and part.endswith(session) for part in command):
            processes.append(process)
    return processes


def wait_for_workers(directory: Path, session: str, count: int) -> list[psutil.Process]:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        processes = workers_of(directory, session)
        if len(processes) >= count:
            return processes
        time.sleep(0.05)
    raise AssertionError(f"{session} never started")


def wait_for_file(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.05)


def wait_for_artefact(run: Path, name: str) -> None:
    """Wait until the run's list names it: the file is there a moment before."""
    manifest = run / "manifest.json"
    wait_for_file(manifest)
    end = time.monotonic() + 120
    while name not in json.loads(manifest.read_text())["artefacts"]:
        assert time.monotonic() < end, f"{name} was never recorded"
        time.sleep(0.05)


def assert_ended(process: subprocess.Popen[str], directory: Path, *expected: str) -> None:
    output, _ = process.communicate(timeout=540)
    assert process.returncode == (130 if "interrupted" in expected else 2), output
    assert "Traceback" not in output.split("its last lines")[0]
    for text in expected:
        assert text in output, output
    time.sleep(0.5)
    left = [p for session in (ENGINE, TRAINER) for p in workers_of(directory, session)]
    assert not left, left
    assert not (directory / "report.json").exists()


def test_a_killed_engine_is_named(tmp_path):
    process = start(tmp_path / "run", *SMALL)
    (worker,) = wait_for_workers(tmp_path, ENGINE, 1)
    time.sleep(3)
    worker.kill()
    assert_ended(process, tmp_path / "run", "engine process", "SIGKILL", "fix:")


def test_a_killed_rank_is_named_and_nothing_that_was_sampled_is_lost(tmp_path):
    process = start(tmp_path / "run", *TINY_RUN)
    wait_for_file(tmp_path / "run" / HANDED_ON)
    # torchrun and two ranks carry the session's path
    workers = wait_for_workers(tmp_path, TRAINER, 3)
    max(workers, key=lambda p: p.pid).kill()
    assert_ended(process, tmp_path / "run", "train process", "fix:")
    assert (tmp_path / "run" / "rollout.parquet").exists()


@pytest.mark.grid
def test_a_stopped_rank_ends_the_run_and_not_never(tmp_path, monkeypatch):
    monkeypatch.setenv("MISMATCH_STALL_S", "12")
    process = start(tmp_path / "run", *TINY_RUN)
    wait_for_file(tmp_path / "run" / HANDED_ON)
    workers = wait_for_workers(tmp_path, TRAINER, 3)
    max(workers, key=lambda p: p.pid).suspend()
    assert_ended(process, tmp_path / "run", "train process stalled", "fix:")


@pytest.mark.parametrize("session", grid([ENGINE, TRAINER], TRAINER))
def test_ctrl_c_leaves_nothing_running(tmp_path, session):
    process = start(tmp_path / "run", *QUICK)
    wait_for_workers(tmp_path, session, 1)
    time.sleep(2)
    os.kill(process.pid, signal.SIGINT)
    assert_ended(process, tmp_path / "run", "interrupted", "fix:")


FIXED = (*TINY_SAMPLING, "--depth", "quick", "--nproc-per-node", "1", "--fix", "fp32-lm-head")


@pytest.mark.grid
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_check_that_tries_fixes_can_be_stopped_and_goes_on(tmp_path, by):
    """In the world that tries the fix: what was scored stays, and is not scored again."""
    run = tmp_path / "run"
    process = start(run, *FIXED)
    wait_for_artefact(run, "scores/fsdp.parquet")
    wait_for_workers(tmp_path, TRAINER, 1)
    os.kill(process.pid, by)
    output, _ = process.communicate(timeout=120)
    assert process.returncode in (130, 143, -by), output
    end = time.monotonic() + 30
    while left := [p for each in (ENGINE, TRAINER) for p in workers_of(tmp_path, each)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
    scored = (run / "scores" / "fsdp.parquet").stat().st_mtime_ns
    done = mismatch("check", "--resume", run, timeout=300)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert (run / "scores" / "fsdp.parquet").stat().st_mtime_ns == scored
    fixes = json.loads((run / "report.json").read_text())["fixes"]
    assert [(row["id"], row["after"] is None) for row in fixes] == [("fp32-lm-head", False)]


@pytest.mark.grid
def test_a_clock_that_is_set_while_a_check_runs_changes_nothing(tmp_path):
    """No deadline passes and nothing waits for ever: only stamps are another day's."""
    moved = {"PYTHONPATH": str(Path(__file__).with_name("jumping_clock")), "CLOCK_JUMPS": "1"}
    command = check_command(tmp_path / "run", *FIXED, "--budget-minutes", "10")
    env = os.environ | moved
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [(row["id"], row["after"] is None) for row in report["fixes"]] == [
        ("fp32-lm-head", False)
    ]
    assert 0 < report["fixes"][0]["cost"]["seconds"] < 400


@pytest.mark.grid
@pytest.mark.parametrize(
    ("limit", "value", "remedy"),
    # Where an allocation fails decides what a library says of it, if it says anything.
    [("RLIMIT_NOFILE", 24, "ulimit -n"), ("RLIMIT_AS", 2_500_000 << 10, "")],
)
def test_few_descriptors_and_little_memory_are_said_with_what_helps(tmp_path, limit, value, remedy):
    number = getattr(resource, limit)
    done = subprocess.run(
        check_command(tmp_path / "run", *QUICK),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(number, (value, value)),
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert remedy in done.stderr.rpartition("fix:")[2]
    assert not [p for s in (ENGINE, TRAINER) for p in workers_of(tmp_path / "run", s)]
    assert "Traceback" not in done.stderr.split("its last lines")[0]
    assert not (tmp_path / "run" / "report.json").exists()


def tiny_copy(folder: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED["tiny-gpt-oss"], folder / "model"))


def without_tokenizer(folder: Path) -> list[str]:
    model = tiny_copy(folder)
    for path in model.glob("tokenizer*"):
        path.unlink()
    return ["--model", str(model)]


def unknown_architecture(folder: Path) -> list[str]:
    model = tiny_copy(folder)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "gpt_oops", "architectures": ["GptOopsForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    return ["--model", str(model)]


def truncated_weights(folder: Path) -> list[str]:
    model = tiny_copy(folder)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    return ["--model", str(model)]


def long_prompt(folder: Path) -> list[str]:
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [5] * 100_000}))
    return ["--prompts", str(path)]


def foreign_ids(folder: Path) -> list[str]:
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [5, 10_000_000]}))
    return ["--prompts", str(path)]


def without_chat_template(folder: Path) -> list[str]:
    """A base model's tokenizer, and a file that asks for its template."""
    model, path = tiny_copy(folder), folder / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return ["--model", str(model), "--prompts", str(path)]


def tokenizer_of_another_model(folder: Path) -> list[str]:
    """The model is left with fewer rows than its tokenizer has tokens."""
    model = tiny_copy(folder)
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = 300
    (model / "config.json").write_text(json.dumps(config))
    return ["--model", str(model)]


CASES = {
    "chat template missing": (without_chat_template, "no chat template"),
    "tokenizer of another model": (tokenizer_of_another_model, "vocabulary mismatch"),
    "tokenizer missing": (without_tokenizer, "tokenizer"),
    "architecture unknown": (unknown_architecture, "gpt_oops"),
    "weights truncated": (truncated_weights, "damaged"),
    "prompt longer than the context": (long_prompt, "100000"),
    "token id out of vocabulary": (foreign_ids, "10000000"),
    "attention that drops sinks": (lambda f: ["--attention", "sdpa"], "sink"),
    "attention unknown": (lambda f: ["--attention", "flashy"], "flashy"),
    "experts implementation unknown": (lambda f: ["--experts-implementation", "x"], "x"),
}


# One of the prompts and one of the files; the trainer's refusal is a test of its own below.
@pytest.mark.parametrize("name", grid(CASES, "token id out of vocabulary", "weights truncated"))
def test_refused_by_a_worker_with_the_fix(name, tmp_path):
    make, expected = CASES[name]
    run = run_check(tmp_path / "run", *QUICK, "--nproc-per-node", "1", *make(tmp_path))
    assert run.code == 2, run.output
    assert expected in run.output
    assert "fix:" in run.output
    assert "Traceback" not in run.output


@pytest.mark.grid  # the engines' contract has it for each
def test_an_unknown_engine_argument_is_refused(tmp_path):
    run = run_check(tmp_path / "run", *SMALL, "--engine-arg", "enforce_eagre=true")
    assert run.code == 2, run.output
    assert "enforce_eager" in run.output


# ---------------------------------------------------------------- before anything is sampled


@pytest.mark.grid
def test_a_trainer_that_cannot_run_is_refused_before_vllm_has_sampled(tmp_path):
    """Both start together; the engine is ended as soon as the trainer has found out."""
    run = run_check(tmp_path / "run", "--attention", "sdpa")
    assert run.code == 2, run.output
    assert "--attention sdpa" in run.output
    assert "sink-sdpa" in run.output.partition("fix:")[2]
    assert not (tmp_path / "run" / "rollout.parquet").exists()
    assert not workers_of(tmp_path, ENGINE)


# ---------------------------------------------------------------- engines of third parties

PLUGIN = """
    from mismatch.engines.transformers.engine import TransformersEngine

    class Forgetful(TransformersEngine):
        name = "forgetful"

        def generate(self, prompts, progress):
            samples = super().generate(prompts, progress)
            return [*samples[:-1], samples[-1][:-1]]

    class Dying(TransformersEngine):
        name = "dying"

        def generate(self, prompts, progress):
            raise ConnectionError("the server hung up")
"""


def third_party(folder: Path) -> str:
    """A PYTHONPATH with a package that provides engines by entry points."""
    (folder / "plugin.py").write_text(textwrap.dedent(PLUGIN))
    info = folder / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    points = "[mismatch.engines]\nforgetful = plugin:Forgetful\ndying = plugin:Dying\n"
    (info / "entry_points.txt").write_text(points)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


@pytest.mark.grid
@pytest.mark.parametrize(
    ("engine", "expected"),
    grid(
        [
            ("forgetful", "returned 7 samples, asked for 4 x 2"),
            ("dying", "ConnectionError: the server hung up"),
        ],
        ("forgetful", "returned 7 samples, asked for 4 x 2"),
    ),
)
def test_an_engine_that_does_not_deliver_is_named(tmp_path, monkeypatch, engine, expected):
    monkeypatch.setenv("PYTHONPATH", third_party(tmp_path))
    flags = [engine if flag == "transformers" else flag for flag in TINY_RUN]
    run = run_check(tmp_path / "run", *flags)
    assert run.code == 2, run.output
    assert expected in run.output
    assert "fix:" in run.output
    assert not (tmp_path / "run" / "rollout.parquet").exists()


# ---------------------------------------------------------------- another environment


@pytest.mark.grid  # SGLang runs under another one in make test
def test_the_engine_runs_under_the_interpreter_that_was_named(tmp_path):
    """An environment of its own, made of this one: only its name tells them apart."""
    python = tmp_path / "other-python"
    script = '#!/bin/sh\necho "$PYTHONPATH" > {0}.path\nexec {1} "$@"\n'
    python.write_text(script.format(python, sys.executable))
    python.chmod(0o755)
    command = [sys.executable, "-m", "mismatch", "rollout", "--model", "tiny-gpt-oss"]
    command += ["--num-prompts", "1", "--max-tokens", "4", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, "--python", f"vllm={python}"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "rollout.parquet").exists()
    assert json.loads((tmp_path / "run" / "spec.json").read_text())["rollout"]["engine"][
        "python"
    ] == str(python)
    root = Path(__file__).parent.parent.parent
    first = (tmp_path / "other-python.path").read_text().strip().split(os.pathsep)[0]
    assert [path.name for path in Path(first).iterdir()] == ["mismatch"]  # and nothing else of ours
    assert (Path(first) / "mismatch").resolve() == root / "mismatch"


# ---------------------------------------------------------------- disks


@pytest.mark.grid
@pytest.mark.parametrize(
    ("room_kib", "whose"),
    grid(
        [(32, "rollout|manifest|vocabulary|transformers"), (116, "fsdp|manifest|train")],
        (116, "fsdp|manifest|train"),
    ),
)
def test_a_disk_that_fills_up_under_a_worker(tmp_path, room_kib, whose):
    """Too little for the rollout (in the engine), or for the trainer's scorings and their turns."""
    command = [sys.executable, "-m", "mismatch", "check", *TINY_RUN, "--out", "disk/run"]
    command += ["--exact-kl", "0"]  # whole distributions would be most of what is written
    keep = ["sh", "-c", '"$@"; code=$?; cp -r disk/run kept; exit $code', "sh", *command]
    done = mounted(tmp_path / "disk", f"size={room_kib}k", keep, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    full = os.strerror(errno.ENOSPC)
    assert re.search(f"cannot write disk/run/.*({whose}).*{full}", done.stderr)
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "kept").rglob("*.partial"))
    assert not (tmp_path / "kept" / "report.json").exists()
    sampled = (tmp_path / "kept" / "scores" / "transformers-decode.parquet").exists()
    assert sampled == (room_kib > 100)
    assert not (tmp_path / "kept" / "scores" / "fsdp.parquet").exists()
