"""Trainer adapters: what they are given, what is refused, and what becomes of their numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import plain_of, training_passes
from mismatch.processes.adapter import (
    VARIANTS,
    missing_corner,
    no_float32,
    prepared,
    scoring_from,
    scoring_of,
)
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


ACTIONS = [-2.0, -3.0, -5.0, -7.0, -8.0]


@pytest.mark.parametrize(
    "answer",
    [
        ACTIONS,
        np.array(ACTIONS, np.float64),
        torch.tensor(ACTIONS, dtype=torch.bfloat16),
        torch.tensor(ACTIONS, requires_grad=True),
        -torch.arange(9.0)[:, None],  # one per token, in a column
    ],
    ids=["list", "float64", "bf16", "on-grad", "all-tokens"],
)
def test_whatever_holds_the_numbers_is_read(answer: Any) -> None:
    scored = FunctionTrainer(lambda *given: answer, "here:f", TrainerJob("m")).score(TOKENS, "own")
    assert np.concatenate(scored.logprobs).tolist() == ACTIONS


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (np.zeros(4), "4 numbers"),
        (None, "None"),
        ({"logprobs": ACTIONS}, "no array"),
        ([[-1.0], [-1.0, -2.0]], "no array"),
        ("-1", "1 numbers"),
    ],
    ids=["count", "none", "dict", "ragged", "text"],
)
def test_what_is_no_answer_is_refused_by_the_functions_name(answer: Any, word: str) -> None:
    trainer = FunctionTrainer(lambda *given: answer, "here:f", TrainerJob("m"))
    with pytest.raises(MismatchError) as refused:
        trainer.score(TOKENS, "own")
    assert "here:f" in refused.value.message
    assert word in refused.value.message


def test_facts_of_another_type_do_not_make_the_run_unreadable(tmp_path: Path) -> None:
    """A trainer's own facts are not checked where they are made."""
    run = make_run(tmp_path / "run")
    rollout = store.load_rollout(run)
    facts: Any = {"code": "theirs", "notes": [], "attention": None, "strategy": None}
    facts |= {"ep_size": "4", "autocast": 3, "dtype": "bf16", "theirs": {"any": [1]}}
    arrays = {"logprobs": np.full(rollout.n_actions, -1.0)}
    made = scoring_from(arrays, facts, Pass("fsdp", TRAIN), rollout)
    store.save_scoring(run, made, rollout)
    held = store.load_scoring(run, "fsdp").fingerprint
    assert (held["dtype"], held["theirs"]) == ("bf16", {"any": [1]})  # type: ignore[typeddict-item]
    assert not {"attention", "autocast"} & held.keys()


MODULE = """
import numpy as np

def ids(token_ids, lengths, mask, temperature):
    return -token_ids.astype(float)

def positive(token_ids, lengths, mask, temperature):
    return token_ids

def broken(token_ids, lengths, mask, temperature):
    raise KeyError("lm_head")

class Alone:
    float32 = False

class Uneven:
    def __init__(self, job):
        import os
        from mismatch.trainers.protocol import Facts, Scored
        self.rank, self.Facts, self.Scored = int(os.environ["RANK"]), Facts, Scored
        if job.precision == "fp32" and self.rank == 1:
            raise RuntimeError("no kernels")

    def score(self, tokens, variant):
        if self.rank == 0:  # the slower rank; the other is soon done with all passes
            import time
            time.sleep(0.3)
        own = tuple(range(self.rank, len(tokens.lengths), 2))
        rows = (tokens.sequences()[n][tokens.masks()[n]] for n in own)
        return self.Scored(own, tuple(-row.astype(np.float32) for row in rows))

    def facts(self):
        return self.Facts("uneven", "bf16")
"""


def ranks_of(
    folder: Path, scorer: str, world: int, names: tuple[str, ...]
) -> tuple[list[int], dict[str, Path], Path]:
    """Run the ranks of a user's trainer, as torchrun does: it ends all where one fails."""
    (folder / "their.py").write_text(MODULE)
    run = make_run(folder / "run")
    train = replace(TRAIN, scorer=f"their:{scorer}", python=None)
    passes = [Pass(name, train) for name in names]
    made = prepared(replace(SPEC, train=train), passes, run, store.load_rollout(run), ())
    with open(folder / "log", "w") as log:
        ranks = [
            subprocess.Popen(
                [sys.executable, *made.command[-3:]], cwd=folder, stdout=log, stderr=log,
                env={**os.environ, **made.env, "RANK": str(rank), "WORLD_SIZE": str(world)},
            )
            for rank in range(world)
        ]  # fmt: skip
        end = time.monotonic() + 60
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if any(rank.poll() for rank in ranks):
                for rank in ranks:
                    rank.kill()
            time.sleep(0.02)
    return [rank.wait() for rank in ranks], made.outputs, run


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_are_joined_without_a_process_group(tmp_path: Path, world: int) -> None:
    codes, outputs, run = ranks_of(tmp_path, "ids", world, ("fsdp", "fsdp:regrouped", "fsdp:alone"))
    assert codes == [0] * world, (tmp_path / "log").read_text()
    rollout = store.load_rollout(run)
    for name, path in outputs.items():
        scoring = scoring_of(path, Pass(name, TRAIN), rollout)
        assert np.array_equal(scoring.logprobs, -rollout.token_ids[rollout.actions])
        assert scoring.fingerprint["world_size"] == world
    assert not list((run / "jobs").glob("*rank*"))


def test_a_rank_that_is_ahead_and_fails_costs_no_finished_pass(tmp_path: Path) -> None:
    codes, outputs, run = ranks_of(tmp_path, "Uneven", 2, ("fsdp", "fsdp:alone", "fsdp:fp32"))
    assert codes[1] == 2
    assert missing_corner(outputs) == "fsdp:fp32"
    assert (
        "no kernels" in json.loads((run / "errors" / "trainer-rank1.json").read_text())["message"]
    )


@pytest.mark.parametrize(
    ("function", "word"), [("positive", "log-probability"), ("broken", "lm_head")]
)
def test_a_function_that_fails_is_named_and_its_line_is_in_the_log(
    tmp_path: Path, function: str, word: str
) -> None:
    codes, _, run = ranks_of(tmp_path, function, 1, ("fsdp",))
    assert codes == [2]
    message = json.loads((run / "errors" / "trainer-rank0.json").read_text())["message"]
    assert f"their:{function}" in message
    assert word in message
    if function == "broken":
        assert "their.py, line 11" in message
        assert 'raise KeyError("lm_head")' in (tmp_path / "log").read_text()


def test_who_cannot_be_asked_for_float32_is_known_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their.py").write_text(MODULE)
    (tmp_path / "wrong.py").write_text("import numpy\nnumpy.nothing_like_it\n")
    (tmp_path / "gone.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    no_float32.cache_clear()
    assert "is a function" in no_float32("their:ids", None)
    assert "their:Alone" in no_float32("their:Alone", None)
    assert no_float32("their:Uneven", None) == no_float32("verl", "/no/python") == ""
    for name, words in {
        "absent:score": (str(tmp_path), "PYTHONPATH"),
        "their:absent": ("absent",),
        "their:MODULE": ("MODULE",),
        "wrong:score": ("nothing_like_it", "wrong.py, line 2"),
        "gone:score": ("exit code 3",),
    }.items():
        with pytest.raises(MismatchError) as refused:
            no_float32(name, None)
        assert all(word in str(refused.value) for word in words), str(refused.value)


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
    measured_from = ["reference:fp32", "plain:bf16"]
    assert [each.name for each in ours] == [*measured_from, "reference:long", "plain:bf16:long"]
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
    assert missing_corner(made.outputs) == "fsdp:fp32"
    assert missing_corner({"fsdp": made.outputs["fsdp"]}) == ""
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
