"""Devices of both sides, and a trainer that scores while the engine does."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from mismatch.captures import priority
from mismatch.doctor.plan import plan, ranks_apart
from mismatch.engines.distribution_capture import CaptureRequest, join_collected
from mismatch.errors import MismatchError
from mismatch.models import resolve_model
from mismatch.processes.launch import started
from mismatch.processes.stages import Stages
from mismatch.run.machine import Placement, placement
from mismatch.specs import CheckSpec, EngineSpec, Pass, RolloutSpec, TrainSpec, spec_hash
from mismatch.types import Sampling
from tests.texts import numbers


def check(model: str = "openai/gpt-oss-20b", ranks: int = 8, **engine: Any) -> CheckSpec:
    return CheckSpec(
        RolloutSpec(EngineSpec(model=model, **engine)), TrainSpec(model), nproc_per_node=ranks
    )


def sizes(spec: CheckSpec, gpus: str) -> list[float]:
    """Return the numbers of the plan's line about the engine: its tensor parallel size first."""
    text = plan(spec, gpus=gpus).stages["rollout"]
    assert "vllm" in text
    return numbers(text)


# ---------------------------------------------------------------- the plan


def test_a_model_that_fits_one_gpu_takes_one():
    assert sizes(check(), "8xH100-80GB") == [1]
    assert sizes(check(ranks=1), "1xH100-80GB") == [1]
    assert sizes(check(tensor_parallel_size=2), "8xH100-80GB") == [2]


def test_a_model_that_does_not_fit_one_gpu_is_split(tmp_path: Path):
    size = {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
    llama = {"model_type": "llama", "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(llama | size | heads))  # 70 B: 141 GB
    assert sizes(check(str(tmp_path)), "8xH100-80GB") == [4]


def test_gpus_that_the_trainer_leaves_are_the_engines_and_both_work_at_once():
    planned = plan(check(ranks=4), gpus="8xH100-80GB")
    assert numbers(planned.stages["rollout"]) == [1, 7]  # split, and its GPU
    assert numbers(planned.stages["score"].partition(":")[0]) == [4, 0, 3]
    assert "rescores" in planned.stages["score"]
    shared = plan(check(ranks=8), gpus="8xH100-80GB").stages
    assert "rescores" not in shared["score"]


@pytest.mark.parametrize(
    ("model", "gpus", "ranks"),
    [
        ("gpt-oss-20b", "8xH100-80GB", 6),  # its float32 engine takes two
        ("qwen3-8b", "8xH100-80GB", 7),
        ("gpt-oss-120b", "8xH100-80GB", 8),  # both take all, in turn
        ("gpt-oss-20b", "8xRTX4090-24GB", 8),  # no room with fewer
        ("gpt-oss-20b", "4xH100-80GB", 4),
    ],
)
def test_ranks_leave_the_engines_gpus_where_there_are_many_and_it_costs_no_room(model, gpus, ranks):
    given = check(resolve_model(model), ranks=int(gpus[0]))
    apart = ranks_apart(given, gpus)
    assert apart.nproc_per_node == ranks
    assert replace(apart, nproc_per_node=given.nproc_per_node) == given
    assert ranks_apart(replace(given, nproc_per_node=3), gpus).nproc_per_node == 3


@pytest.mark.parametrize(
    ("ranks", "split", "gpus", "overlap", "expected"),
    [
        (2, 1, 0, None, Placement()),
        (2, 1, 0, True, Placement(overlap=True)),
        (1, 1, 2, None, Placement((1,), (0,), overlap=True)),
        (1, 1, 2, False, Placement((1,), (0,), overlap=False)),
        (2, 2, 2, None, Placement()),
    ],
)
def test_who_gets_which_gpu(ranks, split, gpus, overlap, expected):
    spec = replace(check(ranks=ranks, tensor_parallel_size=split), overlap=overlap)
    assert placement(spec, gpus) == expected


def test_both_at_once_is_refused_on_shared_gpus():
    with pytest.raises(MismatchError, match=r"--overlap:.*\b2 GPUs.*trainer 2"):
        placement(replace(check(ranks=2, tensor_parallel_size=2), overlap=True), 2)


def test_a_run_goes_on_with_other_overlap():
    spec = check()
    assert spec_hash(spec) == spec_hash(replace(spec, overlap=True))
    assert spec_hash(spec) != spec_hash(check(tensor_parallel_size=2))


def test_joined_watchers_keep_what_one_would():
    wanted = CaptureRequest(positions=7, top_k=1, seed=5, law=Sampling())
    keys = np.array([(sequence, index) for sequence in range(6) for index in range(4)])
    numbers = priority(5, *keys.T)
    best = set(map(tuple, keys[np.argsort(numbers)[:7]].tolist()))

    def collected(rows):
        order = np.flatnonzero(rows)[np.argsort(numbers[rows])[:7]]
        part = keys[np.sort(order)]
        return {"keys": part, "logprobs": part.astype(float)}

    early = keys[:, 0] < 2
    joined = join_collected([collected(early), {}, collected(~early)], wanted)
    assert set(map(tuple, joined["keys"].tolist())) == best
    assert np.array_equal(joined["keys"], joined["logprobs"])
    assert join_collected([{}, {}], wanted) == {}


# ---------------------------------------------------------------- both at once

ENGINE = """
import sys, time, pathlib
sys.stderr.write("timing sampled 0.100\\n"); sys.stderr.flush()
place = pathlib.Path({run!r})
(place / "sampled").write_text("")
{then}
(place / "rescored").write_text("")
"""
TRAINER = """
import sys, time, pathlib
place = pathlib.Path({run!r})
while not (place / {go!r}).exists():
    time.sleep(0.02)
(place / "scoring").write_text(str((place / "rescored").exists()))
{then}
"""
WAIT_FOR_TRAINER = """
while not (place / "scoring").exists():
    time.sleep(0.02)
"""


class Scripts(Stages):
    """Stages whose engine and training world are scripts."""

    def scripts(self, engine: str, trainer: str) -> Scripts:
        run = str(self.run_dir)
        self.engine_script = ENGINE.format(run=run, then=engine)
        self.trainer_script = TRAINER.format(run=run, go="jobs/train-go.json", then=trainer)
        self.workers: list[Any] = []
        return self

    @contextmanager
    def engine(self, spec, label="engine", *tasks):
        with started(label, [sys.executable, "-c", self.engine_script], self.run_dir) as worker:
            self.workers.append(worker)
            yield worker

    @contextmanager
    def _world(self, session):
        with started("train", [sys.executable, "-c", self.trainer_script], self.run_dir) as worker:
            self.workers.append(worker)
            yield worker

    def alive(self) -> list[int]:
        pids = [worker._process.pid for worker in self.workers]
        return [pid for pid in pids if psutil.pid_exists(pid)]


class Quiet:
    @contextmanager
    def stage(self, title):
        yield lambda line: None

    def note(self, text):
        pass


def scripts(run: Path, overlap: bool, engine: str = "", trainer: str = "") -> Scripts:
    journal = SimpleNamespace(timings={}, seconds={}, save=lambda: None)
    spec = replace(check("tiny", 1), overlap=overlap)
    return Scripts(spec, run, Quiet(), journal).scripts(engine, trainer)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


PASSES = [Pass("fsdp", TrainSpec("tiny"))]


def test_the_trainer_scores_while_the_engine_rescores(tmp_path: Path):
    stages = scripts(tmp_path, True, engine=WAIT_FOR_TRAINER)  # it would wait for ever
    stages.measure(PASSES)
    assert (tmp_path / "scoring").read_text() == "False"
    assert (tmp_path / "rescored").exists()
    assert list(stages.journal.seconds) == ["rollout", "rescore", "score"]
    assert stages.journal.timings["engine"]["sampled"] == 0.1


def test_without_devices_of_its_own_the_trainer_waits(tmp_path: Path):
    stages = scripts(tmp_path, False, engine="time.sleep(0.5)")
    stages.measure(PASSES)
    assert (tmp_path / "scoring").read_text() == "True"
    assert list(stages.journal.seconds) == ["rollout", "score"]


def test_stages_name_a_phase_from_the_first_second_and_the_pass_without_its_time_left(
    tmp_path: Path,
):
    said: dict[str, list[str]] = {}

    class Listening(Quiet):
        @contextmanager
        def stage(self, title):
            yield said.setdefault(title.partition("] ")[2].partition(":")[0], []).append

    line = "progress fsdp:grad 3/4 tokens, 5 tok/s, eta 9 s"
    stages = scripts(tmp_path, False, "time.sleep(0.1)", f"print({line!r})")
    stages.narrator = Listening()
    stages.measure([*PASSES, Pass("fsdp:grad", TrainSpec("tiny", grad=True))])
    assert said["rollout"][0].split(" · ")[0] == "starting"
    place, done = said["score"][-1].split(" · ")
    assert [int(word) for word in place.split() if word.isdigit()] == [2, 2]
    assert done == line.partition(", eta")[0].partition("grad ")[2]


@pytest.mark.parametrize("failing", ["engine", "train"])
def test_one_that_fails_ends_the_other(tmp_path: Path, failing: str):
    forever, fails = (
        "time.sleep(600)",
        f"{WAIT_FOR_TRAINER if failing == 'engine' else ''}\nsys.exit(7)",
    )
    scripted = {"engine": forever, "trainer": forever} | {
        "engine" if failing == "engine" else "trainer": fails
    }
    stages, start = scripts(tmp_path, True, **scripted), time.monotonic()
    with pytest.raises(MismatchError, match=f"the {failing} .*code 7"):
        stages.measure(PASSES)
    assert time.monotonic() - start < 120
    assert not stages.alive()
    assert os.path.exists(tmp_path / "scoring")
