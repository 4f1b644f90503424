"""Bugs of a plain PyTorch trainer, on tokens that an engine really sampled at T = 0.7.

As a dump of two arrays (`postmortem`), where the side is right or left open and no wrong cause is
named; and as a class that `score` runs, with float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from mismatch.models import resolve_model
from mismatch.run import store
from mismatch.trainers.protocol import Tokens
from tests.plain_trainer import ROWS, Bug, Plain, load, score_all

from ..command import mismatch
from ..conftest import grid
from ..shared import once

TEMPERATURE, TOKENS, SAMPLES = 0.7, 48, 4
SIZE = ("--num-prompts", 16, "--samples-per-prompt", SAMPLES, "--max-tokens", TOKENS)
MODEL = "tiny-gpt-oss"
# Bug -> the cause that is named first, of a dump.
NAMED: dict[Bug, str] = {
    "no temperature": "temperature-semantics",
    "mask of the other side": "microbatch-dependence",
    "no mask": "microbatch-dependence",
    "16-bit log-softmax": "bf16-logprobs",
    "first token early": "first-token",
    "one late": "misalignment",
    "one early": "misalignment",
}
CLASSES: dict[str, tuple[str, ...]] = {
    "NoTemperature": ("temperature-semantics",),
    "OtherSide": ("microbatch-dependence",),
    "NoMask": ("microbatch-dependence",),
    "SixteenBits": ("bf16-logprobs",),
    "FirstEarly": ("first-token",),
    "OneLate": ("misalignment",),
    "OneEarly": ("misalignment",),
}


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that holds what the transformers engine sampled."""

    def make(folder: Path) -> None:
        how = ("--engine", "transformers", *SIZE, "--temperature", TEMPERATURE)
        out = folder / "run"
        done = mismatch("rollout", "--model", MODEL, *how, "--out", out, timeout=600)
        assert done.returncode == 0, done.stderr

    return once(tmp_path_factory, "plain-trainer", make) / "run"


@pytest.fixture(scope="module")
def dumps(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump for each bug: the engine's log-probabilities and the trainer's, of responses that end
    at different places, as responses do."""

    def make(folder: Path) -> None:
        rollout = store.load_rollout(sampled)
        engine = store.load_scoring(sampled, "transformers:decode").logprobs
        until = np.random.default_rng(0).integers(6, TOKENS + 1, rollout.n_sequences)
        rows = list(cut(rollout, engine, until.tolist()))
        ids, masks, _ = zip(*rows, strict=True)
        tokens = Tokens(
            np.concatenate(ids).astype(np.int64),
            np.cumsum([0, *map(len, ids)]),
            np.concatenate(masks),
        )
        import torch

        model = load(resolve_model(MODEL), torch.bfloat16)
        everything = range(len(rows))
        for bug in get_args(Bug):
            scored = score_all(model, tokens, TEMPERATURE, bug, ROWS, everything)
            with (folder / f"{bug or 'none'}.jsonl").open("w") as file:
                for number, (token_ids, mask, logprobs) in enumerate(rows):
                    entry = {
                        "token_ids": token_ids.tolist(),
                        "action_mask": mask.tolist(),
                        "logprobs": logprobs.tolist(),
                        "train_logprobs": scored[number][0].tolist(),
                        "prompt_id": int(rollout.prompt_index[number]),
                    }
                    file.write(json.dumps(entry) + "\n")

    return once(tmp_path_factory, "plain-trainer-dumps", make)


def cut(rollout: Any, engine: np.ndarray, until: list[int]) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield ids, mask and the engine's log-probabilities of each row, up to so many tokens."""
    bounds = zip(rollout.offsets[:-1], rollout.offsets[1:], until, strict=True)
    used = 0
    for start, end, most in bounds:
        mask = rollout.action_mask[start:end]
        kept = min(most, int(mask.sum()))
        length = int(np.flatnonzero(mask)[kept - 1]) + 1
        yield rollout.token_ids[start : start + length], mask[:length], engine[used : used + kept]
        used += int(mask.sum())


def judged(dump: Path, run: Path, *flags: object) -> dict[str, Any]:
    done = mismatch("postmortem", dump, "--out", run, *flags)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report


@pytest.mark.parametrize("bug", NAMED)
def test_a_bug_is_named_in_a_dump(dumps: Path, tmp_path: Path, bug: Bug) -> None:
    report = judged(dumps / f"{bug}.jsonl", tmp_path / "run", "--temperature", TEMPERATURE)
    causes = report["causes"]["ranked"]
    assert [cause["id"] for cause in causes][:1] == [NAMED[bug]]
    assert {cause["side"] for cause in causes} <= {"trainer"}
    first, share = causes[0], causes[0]["effect"]
    if first["status"] == "confirmed" and report["verdict"]["status"] == "broken":
        assert f"({first['id']}, confirmed" in report["verdict"]["reason"]
    if share is not None and share["value"] < 0.5:  # its fix is no headline
        assert not any(step.startswith(f"Fix {first['id']}") for step in report["next"])


def test_a_right_trainer_has_no_cause_in_a_dump(dumps: Path, tmp_path: Path) -> None:
    report = judged(dumps / "none.jsonl", tmp_path / "run", "--temperature", TEMPERATURE)
    assert report["causes"]["ranked"] == []
    assert report["headline"]["side_at_fault"] is None
    assert not [check["id"] for check in report["checks"] if check["status"] == "failed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(CLASSES, "NoTemperature"))
def test_a_bug_is_named_in_a_class(sampled: Path, tmp_path: Path, name: str) -> None:
    report = scored_by(name, sampled, tmp_path / "run")
    first = report["causes"]["ranked"][0]
    assert first["id"] in CLASSES[name]
    assert first["side"] == "trainer"
    if first["status"] == "confirmed" and report["verdict"]["status"] == "broken":
        assert f"({first['id']}, confirmed" in report["verdict"]["reason"]
        assert report["next"][0].startswith(f"Fix {first['id']}: ")


@pytest.mark.grid
def test_a_right_trainer_has_no_cause_as_a_class(sampled: Path, tmp_path: Path) -> None:
    report = scored_by(Plain.__name__, sampled, tmp_path / "run")
    assert report["causes"]["ranked"] == []
    assert report["headline"]["side_at_fault"] is None


def scored_by(name: str, sampled: Path, run: Path) -> dict[str, Any]:
    shutil.copytree(sampled, run)
    scorer = ("--scorer", f"tests.plain_trainer:{name}", "--nproc-per-node", 1)
    done = mismatch("score", run, *scorer, timeout=600)
    assert done.returncode == 0, done.stderr
    done = mismatch("compare", run)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report
