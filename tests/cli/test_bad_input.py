"""Bad input is refused before anything starts: a clear error, its fix, exit 2, no debris."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TINY = ["--model", "tiny-gpt-oss"]


def mismatch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mismatch", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def jsonl(*lines: str):
    def make(folder: Path) -> list[str]:
        path = folder / "prompts.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        return [*TINY, "--prompts", str(path)]

    return make


def thresholds(text: str):
    def make(folder: Path) -> list[str]:
        path = folder / "levels.toml"
        path.write_text(text)
        return [*TINY, "--thresholds", str(path)]

    return make


def directory_without_config(folder: Path) -> list[str]:
    (folder / "empty").mkdir()
    return ["--model", str(folder / "empty")]


def occupied_output(folder: Path) -> list[str]:
    (folder / "out").mkdir()
    (folder / "out" / "report.json").write_text("{}")
    return [*TINY, "--out", str(folder / "out")]


def output_is_a_file(folder: Path) -> list[str]:
    (folder / "out").write_text("")
    return [*TINY, "--out", str(folder / "out" / "run")]


CASES = {
    "no model": (lambda f: [], "--model"),
    "unknown option": (lambda f: [*TINY, "--atention", "eager"], "--atention"),
    "unknown model": (lambda f: ["--model", "tiny-gpt-os"], "tiny-gpt-oss"),
    "model path missing": (lambda f: ["--model", "./no/such/dir"], "no/such/dir"),
    "no config.json": (directory_without_config, "config.json"),
    "unknown engine": (lambda f: [*TINY, "--engine", "vlm"], "did you mean vllm"),
    "engine argument without value": (lambda f: [*TINY, "--engine-arg", "seed"], "key=value"),
    "prompts file missing": (lambda f: [*TINY, "--prompts", "none.jsonl"], "none.jsonl"),
    "prompts file empty": (jsonl(), "prompts.jsonl"),
    "prompts not JSON": (jsonl('{"prompt": "a"}', "{oops"), "prompts.jsonl:2"),
    "prompt without a known key": (jsonl('{"text": "a"}'), "prompts.jsonl:1"),
    "prompt with two keys": (jsonl('{"prompt": "a", "messages": []}'), "prompts.jsonl:1"),
    "prompt ids not integers": (jsonl('{"prompt_token_ids": [1, "a"]}'), "prompts.jsonl:1"),
    "no samples": (lambda f: [*TINY, "--samples-per-prompt", "0"], "--samples-per-prompt"),
    "no tokens": (lambda f: [*TINY, "--max-tokens", "0"], "--max-tokens"),
    "no prompts": (lambda f: [*TINY, "--num-prompts", "0"], "--num-prompts"),
    "negative temperature": (lambda f: [*TINY, "--temperature", "-1"], "--temperature"),
    "top-p of zero": (lambda f: [*TINY, "--top-p", "0"], "--top-p"),
    "unknown dtype": (lambda f: [*TINY, "--dtype", "fp8"], "bf16"),
    "thresholds file missing": (lambda f: [*TINY, "--thresholds", "no.toml"], "no.toml"),
    "thresholds not TOML": (thresholds("[k3_kl"), "levels.toml"),
    "thresholds with an unknown metric": (thresholds("[k3_lk]\nhealthy = 1"), "k3_kl"),
    "occupied output directory": (occupied_output, "not empty"),
    "output below a file": (output_is_a_file, "cannot create"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_the_fix(name, tmp_path):
    make, expected = CASES[name]
    arguments = make(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    done = mismatch("check", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == before, "left debris"


def test_a_missing_engine_names_its_install_command(tmp_path):
    """Without vllm on the path: the exact command, before anything starts."""
    code = (
        "import sys, importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'vllm' else real(name, *a)\n"
        "sys.argv = ['mismatch', 'check', '--model', 'tiny-gpt-oss']\n"
        "from mismatch.cli.main import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'train-infer-mismatch[vllm]'" in done.stderr


def test_report_of_something_that_is_no_run(tmp_path):
    assert "report.json does not exist" in mismatch("report", "x", cwd=tmp_path).stderr
    (tmp_path / "report.json").write_text(json.dumps({"schema": "mismatch.report/0"}))
    done = mismatch("report", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert "mismatch.report/0" in done.stderr


def copy_of_tiny(folder: Path) -> Path:
    from mismatch.models import EMBEDDED

    return Path(shutil.copytree(EMBEDDED["tiny-gpt-oss"], folder / "model"))
