"""Whole checks, each run once through the command line and shared by the tests that read it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.shared import once


@dataclass(frozen=True)
class Run:
    """A finished `mismatch check`: its output and its artefacts."""

    directory: Path
    code: int
    output: str

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.directory / "report.json").read_text())

    def require_judged(self) -> None:
        """It measured something, and ended as its report says."""
        assert (self.directory / "report.json").is_file(), self.output
        assert self.code == self.report["headline"]["exit_code"], self.output

    @property
    def headline(self) -> dict[str, Any]:
        return self.report["comparisons"][0]

    def value(self, metric: str) -> float:
        return self.headline["metrics"][metric]["value"]

    @property
    def checks(self) -> dict[str, str]:
        return {check["id"]: check["status"] for check in self.report["checks"]}

    @property
    def failed(self) -> set[str]:
        return {id for id, status in self.checks.items() if status == "failed"}

    @property
    def tokens(self) -> pd.DataFrame:
        return pd.read_parquet(self.directory / "tokens.parquet")


def check_command(directory: Path, *flags: str, locate: bool = False) -> list[str]:
    """Return the command of a check, which does not run locate by itself unless asked: it costs."""
    command = [sys.executable, "-m", "mismatch", "check", "--out", str(directory)]
    if not locate:
        command += ["--no-locate", "--no-explain"]
    if "--model" not in flags:
        command += ["--model", "tiny-gpt-oss"]
    return [*command, *flags]


def run_check(directory: Path, *flags: str, locate: bool = False) -> Run:
    done = subprocess.run(
        check_command(directory, *flags, locate=locate),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    return Run(directory, done.returncode, done.stdout)


SMALL = (
    *("--num-prompts", "16", "--samples-per-prompt", "2", "--max-tokens", "64"),
    *("--no-noise-floor", "--nproc-per-node", "1"),  # two ranks: default_run and tiny_run
)


# Tests of the tool itself (resuming, failing) need no vLLM and few tokens.
TINY_SAMPLING = (
    *("--model", "tiny-gpt-oss", "--engine", "transformers"),
    *("--num-prompts", "4", "--samples-per-prompt", "2", "--max-tokens", "16"),
)
TINY_RUN = (*TINY_SAMPLING, "--nproc-per-node", "2", "--depth", "quick")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted check of a few tokens."""
    return _once(tmp_path_factory, "tiny", TINY_RUN).directory


def shared_run(name: str, *flags: str) -> Any:
    """A session fixture that runs one check."""

    @pytest.fixture(scope="session", name=name)
    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Run:
        return _once(tmp_path_factory, name, flags)

    return fixture


def _once(factory: pytest.TempPathFactory, name: str, flags: tuple[str, ...]) -> Run:
    def make(folder: Path) -> None:
        run = run_check(folder / name, *flags)
        run.require_judged()
        (folder / "outcome.json").write_text(json.dumps([run.code, run.output]))

    folder = once(factory, name, make)
    return Run(folder / name, *json.loads((folder / "outcome.json").read_text()))


default_run = shared_run("default_run", "--num-prompts", "16")
fp32_run = shared_run("fp32_run", *SMALL, "--dtype", "fp32", "--train-dtype", "fp32")
no_sinks_run = shared_run("no_sinks_run", *SMALL, "--attention", "no-sinks")
raw_run = shared_run(
    "raw_run", *SMALL, "--temperature", "0.7", "--engine-arg", "logprobs_mode=raw_logprobs"
)
tempered_run = shared_run(
    "tempered_run", *SMALL, "--engine", "transformers", "--temperature", "0.7"
)
