"""Trainer adapters: what they are given, what is refused, and what becomes of their numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import plain_of, training_passes
from mismatch.processes.adapter import VARIANTS, missing_corner, prepared, scoring_of
from mismatch.processes.launch import ROOT, worker_path
from mismatch.run import store
from mismatch.run.trust import code_of
from mismatch.specs import CheckSpec, EngineSpec, Pass, RolloutSpec, TrainSpec
from mismatch.trainers import worker
from mismatch.trainers.function import FunctionTrainer
from mismatch.trainers.protocol import (
    Facts,
    Precision,
    Scored,
    Tokens,
    TrainerJob,
    attention_here,
)
from tests.made_run import make_run

TRAIN = TrainSpec(model="m", scorer="yours:score", python="/env/bin/python")
SPEC = CheckSpec(rollout=RolloutSpec(engine=EngineSpec(model="m")), train=TRAIN, nproc_per_node=1)
TOKENS = Tokens(np.arange(9), np.array([0, 4, 9]), np.array([0, 0, 1, 1, 0, 1, 0, 1, 1], np.bool_))


def minus_id(ids, lengths, mask, temperature):  # type: ignore[no-untyped-def]
    """A trainer whose log-probability of a token is minus its id over T."""
    return -ids / temperature


class Known:
    """An adapter with the same law; in float32 it fails as a kernel does."""

    def __init__(self, job: TrainerJob) -> None:
        if job.precision == "fp32":
            raise MismatchError("no kernels for float32")

    def score(self, tokens: Tokens, variant: str) -> Scored:
        pairs = zip(tokens.sequences(), tokens.masks(), strict=True)
        rows = [-ids[mask].astype(np.float32) for ids, mask in pairs]
        return Scored(tuple(range(len(rows))), tuple(rows))

    def facts(self) -> Facts:
        return Facts(code="known", dtype="bf16")


@pytest.mark.parametrize("variant", ["own", "alone"])
def test_a_function_gets_the_tokens_and_its_numbers_are_cut_by_sequence(variant: str) -> None:
    trainer = FunctionTrainer(minus_id, "here:minus_id", TrainerJob("m", temperature=2.0))
    scored = trainer.score(TOKENS, variant)  # type: ignore[arg-type]
    assert [row.tolist() for row in scored.logprobs] == [[-1.0, -1.5], [-2.5, -3.5, -4.0]]


def test_a_function_that_returns_another_count_is_refused() -> None:
    trainer = FunctionTrainer(lambda *given: np.zeros(4), "here:f", TrainerJob("m"))
    with pytest.raises(MismatchError) as refused:
        trainer.score(TOKENS, "own")
    assert "4 numbers" in refused.value.message


def test_a_sequence_without_scores_is_refused(tmp_path: Path) -> None:
    short = Scored((0,), (np.zeros(2, np.float32),))
    with pytest.raises(MismatchError) as refused:
        worker.save(tmp_path / "x.npz", TOKENS, [short], Known(TrainerJob("m")), 1.0)
    assert "sequence 1" in refused.value.message


def test_unknown_trainers_and_missing_packages_say_what_to_do() -> None:
    for name in ("nobody", "no_such_package:Class", "tests.unit.test_trainers:absent"):
        with pytest.raises(MismatchError) as refused:
            worker.load(name)
        assert refused.value.fix


def test_the_worker_needs_numpy_alone(tmp_path: Path) -> None:
    """It runs in the user's environment: what that may lack must not be imported."""
    code = """
        import sys
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in ("numpy", "mismatch"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Refuse())
        import mismatch.trainers.worker, mismatch.trainers.function
    """
    env = worker_path(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    room = env["PYTHONPATH"].split(os.pathsep)[0]
    assert (Path(room) / "mismatch").resolve() == ROOT / "mismatch"


def test_the_adapter_scores_its_side_and_we_score_what_it_is_measured_from() -> None:
    passes = training_passes(SPEC)
    theirs = [pass_.name for pass_ in passes if pass_.spec.scorer != "fsdp"]
    assert theirs == ["fsdp", "fsdp:regrouped", "fsdp:repeated", "fsdp:alone", "fsdp:fp32"]
    ours = [pass_ for pass_ in passes if pass_.spec.scorer == "fsdp"]
    assert [pass_.name for pass_ in ours] == ["reference:fp32", "plain:bf16"]
    assert plain_of(TRAIN, "fp32").python is None
    assert set(theirs) == set(VARIANTS)


def test_what_could_run_code_needs_trust() -> None:
    named = replace(TRAIN, scorer_config="a.yaml", accelerate_config="b.yaml")
    lines = "\n".join(code_of(replace(SPEC, train=named)))
    for part in ("/env/bin/python", "yours:score", "a.yaml", "b.yaml"):
        assert part in lines


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tokens the adapter above has scored, as its process does it."""
    run = make_run(tmp_path_factory.mktemp("adapter") / "run")
    rollout = store.load_rollout(run)
    train = replace(TRAIN, scorer="tests.unit.test_trainers:Known")
    passes = [Pass(name, train) for name in ("fsdp", "fsdp:alone", "fsdp:fp32")]
    made = prepared(replace(SPEC, train=train), passes, run, rollout, ())
    job = Path(made.command[-1])
    assert worker.main([str(job)]) == 2  # float32 failed, after the others were written
    assert missing_corner(passes, made) == "fsdp:fp32"
    assert missing_corner(passes[:2], made) == ""
    return run


def test_its_numbers_become_a_scoring_that_says_whose_they_are(scored: Path) -> None:
    rollout = store.load_rollout(scored)
    scoring = scoring_of(scored / "jobs" / "trainer-own.npz", Pass("fsdp", TRAIN), rollout)
    assert np.array_equal(scoring.logprobs, -rollout.token_ids[rollout.actions])
    assert (scoring.fingerprint["code"], scoring.fingerprint["dtype"]) == ("known", "bf16")
    assert scoring.fingerprint["not_tested"]


@pytest.mark.parametrize(("change", "word"), [("cut", "for"), ("positive", "natural")])
def test_numbers_that_cannot_be_log_probabilities_are_refused(
    scored: Path, tmp_path: Path, change: str, word: str
) -> None:
    rollout = store.load_rollout(scored)
    n = rollout.n_actions
    logprobs = -np.ones(n - 1) if change == "cut" else np.ones(n)
    facts = json.dumps({"code": "x", "dtype": "bf16", "notes": [], "more": {}})
    np.savez(tmp_path / "x.npz", logprobs=logprobs, facts=np.array(facts))
    with pytest.raises(MismatchError) as refused:
        scoring_of(tmp_path / "x.npz", Pass("fsdp", TRAIN), rollout)
    assert word in f"{refused.value.message} {refused.value.fix}"


FLASH = "flash_attention_2"


@pytest.mark.parametrize(
    ("asked", "family", "on_gpu", "precision", "packed", "ran"),
    [
        (FLASH, "qwen3", True, "own", True, None),
        ("eager", "gpt_oss", False, "own", True, None),
        ("sdpa", "qwen3", True, "fp32", False, None),
        (FLASH, "qwen3", True, "fp32", True, "sdpa"),
        ("kernels-community/vllm-flash-attn3", "gpt_oss", True, "fp32", True, "eager"),
        (FLASH, "qwen3", False, "own", False, "eager"),
    ],
)
def test_flash_attention_is_replaced_where_it_cannot_run(
    asked: str, family: str, on_gpu: bool, precision: Precision, packed: bool, ran: str | None
) -> None:
    found = attention_here(asked, family, on_gpu, precision, packed)
    assert (found and found.ran) == ran
    if found is not None:
        assert found.asked == asked
        assert found.causes == ()  # rows of their own, or a float32 pass beside the run's own


def test_packs_under_another_attention_can_leak_by_that_alone() -> None:
    found = attention_here(FLASH, "gpt_oss", False, "own", True)
    assert found is not None
    assert "packing-leak" in found.causes
    assert "eager" in found.instead
