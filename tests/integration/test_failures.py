"""What goes wrong in the middle of a check: a clear error, exit code 2, no process left behind."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from mismatch.models import EMBEDDED

from .conftest import SMALL, check_command, run_check

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


def workers_of(directory: Path, module: str) -> list[psutil.Process]:
    """Worker processes of this run, by their job file."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if any(str(directory) in part for part in command) and module in command:
            found.append(process)
    return found


def wait_for_workers(directory: Path, module: str, count: int) -> list[psutil.Process]:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = workers_of(directory, module)
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{module} never started")


def assert_ended(process: subprocess.Popen[str], directory: Path, *expected: str) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "Traceback" not in output.split("its last lines")[0]
    for text in expected:
        assert text in output, output
    time.sleep(0.5)
    modules = ("mismatch.workers.engine", "mismatch.workers.train")
    left = [p for module in modules for p in workers_of(directory, module)]
    assert not left, left
    assert not (directory / "report.json").exists()


def test_a_killed_engine_is_named(tmp_path):
    process = start(tmp_path / "run", *SMALL)
    (worker,) = wait_for_workers(tmp_path, "mismatch.workers.engine", 1)
    time.sleep(3)
    worker.kill()
    assert_ended(process, tmp_path / "run", "engine process", "SIGKILL", "fix:")


def test_a_killed_rank_is_named_and_nothing_that_was_sampled_is_lost(tmp_path):
    process = start(tmp_path / "run", *QUICK)
    # torchrun and two ranks carry the module's name
    workers = wait_for_workers(tmp_path, "mismatch.workers.train", 3)
    time.sleep(2)
    max(workers, key=lambda p: p.pid).kill()
    assert_ended(process, tmp_path / "run", "train process", "fix:")
    assert (tmp_path / "run" / "rollout.parquet").exists()


@pytest.mark.parametrize("module", ["mismatch.workers.engine", "mismatch.workers.train"])
def test_ctrl_c_leaves_nothing_running(tmp_path, module):
    process = start(tmp_path / "run", *QUICK)
    wait_for_workers(tmp_path, module, 1)
    time.sleep(2)
    os.kill(process.pid, signal.SIGINT)
    assert_ended(process, tmp_path / "run", "interrupted", "fix:")


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


CASES = {
    "tokenizer missing": (without_tokenizer, "tokenizer"),
    "architecture unknown": (unknown_architecture, "gpt_oops"),
    "weights truncated": (truncated_weights, "model.safetensors"),
    "prompt longer than the context": (long_prompt, "100000"),
    "token id out of vocabulary": (foreign_ids, "10000000"),
    "attention that drops sinks": (lambda f: ["--attention", "sdpa"], "sink"),
    "attention unknown": (lambda f: ["--attention", "flashy"], "flashy"),
    "experts implementation unknown": (lambda f: ["--experts-implementation", "x"], "x"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_by_a_worker_with_the_fix(name, tmp_path):
    make, expected = CASES[name]
    run = run_check(tmp_path / "run", *QUICK, *make(tmp_path))
    assert run.code == 2, run.output
    assert expected in run.output
    assert "fix:" in run.output
    assert "Traceback" not in run.output


def test_an_unknown_engine_argument_is_refused(tmp_path):
    run = run_check(tmp_path / "run", *SMALL, "--engine-arg", "enforce_eagre=true")
    assert run.code == 2, run.output
    assert "enforce_eager" in run.output
