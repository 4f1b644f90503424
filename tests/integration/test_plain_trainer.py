"""Bugs of a plain PyTorch trainer, on tokens that an engine really sampled.

As a dump of two arrays (`postmortem`), and as a class, which can score in float32, and a function,
which cannot, that `score` runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest

from mismatch.models import resolve_model
from mismatch.run import store
from mismatch.trainers.protocol import Tokens
from tests import plain_trainer
from tests.plain_trainer import NAMES, ROWS, Bug, load, score_all

from ..command import mismatch
from ..conftest import grid
from ..shared import once

TEMPERATURE, TOKENS, SAMPLES = 0.7, 48, 4
SIZE = ("--num-prompts", 16, "--samples-per-prompt", SAMPLES, "--max-tokens", TOKENS)
MODEL = "tiny-gpt-oss"
Scored = Callable[..., Path]  # (engine, temperature) -> run directory
# Bug -> the cause that is named first.
NAMED: dict[Bug, str] = {
    "no temperature": "temperature-semantics",
    "mask of the other side": "microbatch-dependence",
    "no mask": "microbatch-dependence",
    "16-bit log-softmax": "bf16-logprobs",
    "first token early": "first-token",
    "one late": "misalignment",
    "one early": "misalignment",
}


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    """Return what an engine sampled at a temperature, scored by the right function."""

    def of(engine: str = "transformers", temperature: float = TEMPERATURE) -> Path:
        def make(folder: Path) -> None:
            how = ("--engine", engine, *SIZE, "--temperature", temperature)
            out = folder / "run"
            done = mismatch("rollout", "--model", MODEL, *how, "--out", out, timeout=600)
            assert done.returncode == 0, done.stderr
            score(out, "function", "")

        return once(tmp_path_factory, f"plain-trainer-{engine}-{temperature}", make) / "run"

    return of


def score(run: Path, form: str, bug: Bug) -> None:
    """Score a run by this trainer, on one rank."""
    scorer = ("--scorer", f"tests.plain_trainer:{NAMES[form][bug]}", "--nproc-per-node", 1)
    model = {plain_trainer.MODEL: resolve_model(MODEL)}
    done = mismatch("score", run, *scorer, timeout=600, **model)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def dumps(scored: Scored, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump for each bug: the engine's log-probabilities and the trainer's, of responses that end
    at different places, as responses do."""

    def make(folder: Path) -> None:
        run = scored()
        rollout = store.load_rollout(run)
        engine = store.load_scoring(run, "transformers:decode").logprobs
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
            train = score_all(model, tokens, TEMPERATURE, bug, ROWS, everything)
            with (folder / f"{bug or 'none'}.jsonl").open("w") as file:
                for number, (token_ids, mask, logprobs) in enumerate(rows):
                    entry = {
                        "token_ids": token_ids.tolist(),
                        "action_mask": mask.tolist(),
                        "logprobs": logprobs.tolist(),
                        "train_logprobs": train[number][0].tolist(),
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


@pytest.mark.grid
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


@pytest.mark.grid
def test_a_right_trainer_has_no_cause_in_a_dump(dumps: Path, tmp_path: Path) -> None:
    report = judged(dumps / "none.jsonl", tmp_path / "run", "--temperature", TEMPERATURE)
    assert report["causes"]["ranked"] == []
    assert report["headline"]["side_at_fault"] is None
    assert not [check["id"] for check in report["checks"] if check["status"] == "failed"]


def by_trainer(run: Path, copy: Path, form: str, bug: Bug) -> dict[str, Any]:
    """Return the report on a copy of the run that this trainer has scored."""
    theirs = shutil.ignore_patterns("fsdp*")  # reference and plain forward stay
    shutil.copytree(run, copy, ignore=theirs)
    score(copy, form, bug)
    done = mismatch("compare", copy)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads((copy / "report.json").read_text())
    return report


def assert_named(report: dict[str, Any], bug: Bug) -> None:
    first = report["causes"]["ranked"][0]
    assert first["id"] == NAMED[bug]
    assert {cause["side"] for cause in report["causes"]["ranked"]} == {"trainer"}
    assert report["headline"]["side_at_fault"] == "trainer"
    assert report["verdict"]["status"] == "broken"
    if first["status"] == "confirmed":
        assert f"({first['id']}, confirmed" in report["verdict"]["reason"]
        assert report["next"][0].startswith(f"Fix {first['id']}: ")


VOID = {
    "no temperature": "temperature, cuts and penalties",
    "one late": "prompts and positions",
    "one early": "prompts and positions",
    "one token of context": "prompts and positions",
    "labels shifted twice": "prompts and positions",
    "another tokenisation": "prompts and positions",
}


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("bug", VOID)
def test_a_void_comparison_is_refuted_by_name(scored: Scored, tmp_path: Path, bug: Bug) -> None:
    """Numbers of two sides that do not score the same thing mean nothing, whatever they are."""
    report = by_trainer(scored(), tmp_path / "run", "function", bug)
    points = {point["what"]: point for point in report["validity"]}
    assert points[VOID[bug]]["standing"] == "refuted"
    assert points["token ids"]["standing"] == "proven"
    assert report["verdict"]["status"] == "broken"
    shown = mismatch("report", tmp_path / "run").stdout
    assert VOID[bug] in shown[: shown.index("mean |delta|")]


@pytest.mark.slow
@pytest.mark.grid
def test_experts_that_were_not_copied_break_the_trainer(scored: Scored, tmp_path: Path) -> None:
    """Nobody gives digests of a user's class: the weights are not proven, the function differs."""
    report = by_trainer(scored(), tmp_path / "run", "class", "experts not copied")
    points = {point["what"]: point for point in report["validity"]}
    assert points["weights"]["standing"] != "proven"
    assert report["verdict"]["status"] == "broken"
    assert report["headline"]["side_at_fault"] == "trainer"


@pytest.mark.slow
@pytest.mark.grid
def test_the_engines_own_numbers_are_no_second_computation(tmp_path: Path) -> None:
    run, how = tmp_path / "run", ("--engine", "transformers", *SIZE)
    assert mismatch("rollout", "--model", MODEL, *how, "--out", run).returncode == 0
    engine, table = store.load_scoring(run, "transformers:decode").logprobs, tmp_path / "t.parquet"
    assert mismatch("tokens", run, table).returncode == 0
    rows = pd.read_parquet(table)
    ends = np.cumsum([int(np.sum(mask)) for mask in rows.action_mask])
    rows["logprobs"] = np.split(engine, ends[:-1])
    rows.to_parquet(table)
    done = mismatch("score", run, "--scorer", "file", "--scorer-config", table)
    assert done.returncode == 0, done.stderr
    assert mismatch("compare", run).returncode == 1
    report = json.loads((run / "report.json").read_text())
    assert report["verdict"]["status"] == "inconclusive"
    assert report["validity"][-1]["standing"] == "not proven"
    assert "copied" in report["validity"][-1]["how"]


def assert_clean(report: dict[str, Any]) -> None:
    assert report["causes"]["ranked"] == []
    assert report["headline"]["side_at_fault"] is None
    assert report["verdict"]["status"] in ("tolerable", "inconclusive")


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("bug", NAMED)
def test_a_bug_is_named_in_a_class(scored: Scored, tmp_path: Path, bug: Bug) -> None:
    assert_named(by_trainer(scored(), tmp_path / "run", "class", bug), bug)


@pytest.mark.grid
@pytest.mark.parametrize("bug", grid(NAMED, "no temperature"))
def test_a_bug_is_named_in_a_function(scored: Scored, tmp_path: Path, bug: Bug) -> None:
    assert_named(by_trainer(scored(), tmp_path / "run", "function", bug), bug)


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [TEMPERATURE, 1.0])
@pytest.mark.parametrize("form", NAMES)
def test_a_right_trainer_has_no_cause(
    scored: Scored, tmp_path: Path, form: str, temperature: float
) -> None:
    run = scored(temperature=temperature)
    assert_clean(by_trainer(run, tmp_path / "run", form, ""))


@pytest.mark.grid
@pytest.mark.parametrize("bug", ["", "no temperature", "mask of the other side", "one late"])
def test_what_vllm_sampled_tells_the_same(scored: Scored, tmp_path: Path, bug: Bug) -> None:
    report = by_trainer(scored("vllm"), tmp_path / "run", "function", bug)
    assert_named(report, bug) if bug else assert_clean(report)
