"""Runs kept as they were measured: their reports do not change with our code.

``python -m tests.frozen`` makes them again (about eight minutes on two cores), and with ``--judge``
judges again what was measured; each is a decision with its own commit. The proof is
tests/unit/test_frozen_reports.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "frozen"
FEW = ("--num-prompts", "8", "--samples-per-prompt", "2", "--max-tokens", "16", "--exact-kl", "6")
FLOAT32 = ("--dtype", "fp32", "--train-dtype", "fp32")
CHECK = ("check", "--model", "tiny-gpt-oss", *FEW)
RUNS: dict[str, tuple[str, ...]] = {
    "clean": CHECK,
    "no-sinks": (*CHECK, "--attention", "no-sinks", "--fix", "all", "--explain"),
    "quantised": (
        *(*CHECK, "--weights", "engine=mxfp4-rounded", "--weights", "effect=mxfp4-rounded"),
        *("--context-length", "160"),
    ),
    "server": (*CHECK, *FLOAT32, "--server", "URL"),
    "recorded": ("postmortem", "DUMP"),
}
# What only renders a run, or only started it.
LEFT_OUT = (".lock", "*.html", "*.md", "tokens.parquet", "jobs", "logs", "*.log")
CHANGING = (
    "created",
    "environment",
    "platform",
    "commits",
    "command",
    "earlier_commands",
    "seconds",
    "version",
)


def report_of(run: Path) -> Any:
    """Return what a run's report.json says, without times and our version."""
    document = json.loads((run / "report.json").read_text())
    document["run"] = {k: v for k, v in document["run"].items() if k not in CHANGING}
    document.pop("version", None)
    return document


def unpack(name: str, into: Path) -> Path:
    """Write a frozen run below a directory."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(into, filter="data")
    return into / name


def main() -> None:
    """Make all runs, or those named, with the engines and the framework that are installed."""
    judge = "--judge" in sys.argv
    FOLDER.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.gettempdir()) / "mismatch-frozen"  # a path of nobody's machine
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(FOLDER.parents[2] / "mismatch", work / "package" / "mismatch")
    try:
        for name in [each for each in sys.argv[1:] if each != "--judge"] or RUNS:
            with nullcontext({}) if judge else _inputs(name, work) as given:
                command = [*(given.get(word, word) for word in RUNS[name]), "--out", name]
                if judge:
                    command = ["compare", str(unpack(name, work).relative_to(work))]
                words = [sys.executable, "-m", "mismatch", *command, "--quiet"]
                done = subprocess.run(words, cwd=work, env=_environment(work))
            if done.returncode not in (0, 1):
                raise SystemExit(f"{name}: exit code {done.returncode}")
            with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz", preset=9) as archive:
                archive.add(work / name, name, filter=_kept)
            print(name, (FOLDER / f"{name}.tar.xz").stat().st_size)
    finally:
        shutil.rmtree(work)


def _environment(work: Path) -> dict[str, str]:
    from tests.integration.test_servers import ENVIRONMENT, KEY

    given = {k: v for k, v in ENVIRONMENT.items() if k != "VLLM_API_KEY"}
    own = {"MISMATCH_API_KEY": KEY, "PYTHONPATH": str(work / "package")}
    return {**os.environ, **given, **own}


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if any(Path(entry.name).match(pattern) for pattern in LEFT_OUT):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


@contextmanager
def _inputs(name: str, work: Path) -> Iterator[dict[str, str]]:
    if name == "server":
        from tests.integration.test_servers import SERVE, serve

        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *SERVE]
        started = serve(command, work / "server.log")
        try:
            started.await_ready()
            yield {"URL": started.url}
        finally:
            started.kill()
    elif name == "recorded":
        _dump(unpack("clean", work / "source"), work / "dump.jsonl")
        yield {"DUMP": "dump.jsonl"}
    else:
        yield {}


def _dump(run: Path, file: Path) -> None:
    """Write a run's tokens and both log-probabilities as a framework of one's own would."""
    from mismatch.run import store

    rollout = store.load_rollout(run)
    sides = {"rollout": "vllm:decode", "train": "fsdp"}
    logprobs = {key: store.load_scoring(run, name).logprobs for key, name in sides.items()}
    starts = [0, *rollout.action_mask.cumsum()[rollout.offsets[1:] - 1]]
    with file.open("w") as out:
        for n, (low, high) in enumerate(zip(rollout.offsets, rollout.offsets[1:], strict=False)):
            row = {
                "token_ids": rollout.token_ids[low:high].tolist(),
                "action_mask": rollout.action_mask[low:high].astype(int).tolist(),
                "prompt_id": int(rollout.prompt_index[n]),
                "step": 1 + n // 8,
                "rank": n % 2,
            }
            for key, values in logprobs.items():
                row[f"{key}_logprobs"] = values[starts[n] : starts[n + 1]].tolist()
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
