"""The loop with real engines: two arms, a sync that loses a parameter, a kill, a resumed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from mismatch.errors import MismatchError
from mismatch.features.loop.arms import resume_from, run_arm, run_loop
from mismatch.features.loop.history import Row, rows_of
from mismatch.features.loop.judge import loop_to_json
from mismatch.features.loop.spec import Asked, LoopSpec
from mismatch.models import resolve_model
from mismatch.run.store import read_json
from mismatch.specs import CheckSpec, EngineSpec, PromptSpec, RolloutSpec, Sampling, TrainSpec

pytestmark = pytest.mark.slow
TINY = resolve_model("tiny-gpt-oss")
LOST = Path(__file__).parent.parent / "data" / "lost_parameter"
STEPS = 3
FLAGS = (
    *("--model", "tiny-gpt-oss", "--engine", "transformers", "--train-dtype", "fp32"),
    *("--steps", str(STEPS), "--prompts-per-step", "2", "--num-prompts", "4", "--max-tokens", "64"),
    *("--samples-per-prompt", "3", "--nproc-per-node", "1", "--checkpoint-every", "1"),
    "--no-perfectible",
)
SAME = ("reward", "k3_kl", "entropy", "loss", "grad_norm", "response_length")


class Silent:
    """A narrator that says nothing."""

    def stage(self, title: str) -> Silent:
        return self

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __call__(self, text: str) -> None:
        pass

    note = __call__


def loop(engine: str, routing: bool = False, **fields: object) -> LoopSpec:
    rollout = RolloutSpec(
        engine=EngineSpec(engine, TINY, routing=routing, prefill=False),
        prompts=PromptSpec(num_prompts=4),
        sampling=Sampling(max_tokens=64, samples_per_prompt=3),
        exact_kl=0,
    )
    train = TrainSpec(TINY, dtype="fp32", master_dtype="fp32", routing=routing)
    check = CheckSpec(rollout, train, nproc_per_node=1, noise_floor=False)
    given = {"steps": STEPS, "prompts": 2, "perfectible": False, "checkpoint_every": 1}
    return LoopSpec(check, **(given | fields))  # type: ignore[arg-type]


def numbers(rows: list[Row]) -> list[list[float | None]]:
    return [[row[name] for name in SAME] for row in rows]


def silent(line: str) -> None:
    pass


def test_two_arms_with_vllm(tmp_path: Path) -> None:
    asked = Asked(loop("vllm"), ("as-is", "no-sinks"), (0,))
    report = run_loop(asked, tmp_path, Silent(), "test")
    assert read_json(tmp_path / "loop.json") == loop_to_json(report)
    assert "<svg" in (tmp_path / "loop.html").read_text("utf-8")
    right, wrong = (arm.runs[0] for arm in report.arms)
    assert right.curves["reward"][0] == wrong.curves["reward"][0]  # the same weights and seed
    for run in (right, wrong):
        assert run.steps == STEPS
        assert set(run.curves["parameters_verified"]) == {71.0}
    assert max(wrong.curve("k3_kl")) > 10 * max(right.curve("k3_kl")) > 0
    assert [row["step"] for row in rows_of(tmp_path / "no-sinks" / "seed-0")] == [0.0, 1.0, 2.0]


@pytest.mark.grid
def test_an_arm_with_sglang(tmp_path: Path) -> None:
    asked = Asked(loop("sglang", steps=2), ("as-is",), (0,))
    report = run_loop(asked, tmp_path, Silent(), "test")
    (run,) = report.arms[0].runs
    assert run.steps == 2
    assert set(run.curves["parameters_verified"]) == {71.0}
    assert 0 < max(run.curve("k3_kl")) < 0.01


def children_of(folder: Path, what: str = "") -> list[int]:
    """Processes whose command names this folder, and ``what``."""
    pids = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if str(folder) in command and what in command:
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


def wait_until(true: Callable[[], bool], within_s: float) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.grid
def test_a_killed_run_goes_on_to_the_same_curve_and_a_lost_parameter_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = tmp_path / "straight"
    straight.mkdir()
    name = "model.layers.1.self_attn.o_proj.weight"
    same = loop("transformers", routing=True)  # as FLAGS say
    with monkeypatch.context() as planted:
        planted.setenv("LOST", f"{STEPS} {name}")
        planted.setenv("PYTHONPATH", str(LOST), prepend=os.pathsep)
        with pytest.raises(MismatchError, match=f"step {STEPS}: .*{name}"):
            run_arm(straight, replace(same, steps=STEPS + 1), tmp_path / "pool.json", silent)
    expected = rows_of(straight)[:STEPS]
    assert len(expected) == STEPS
    assert any(row["loss"] for row in expected)  # some samples of a prompt are right

    out = tmp_path / "killed"
    command = [sys.executable, "-m", "mismatch", "loop", *FLAGS, "--out", str(out)]
    arm = out / "as-is" / "seed-0"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 300
        while not (arm / "checkpoints" / "000001").exists() and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.1)
        for pid in children_of(arm, "loop.engine_side"):
            os.kill(pid, signal.SIGSTOP)  # so that not all steps are done before the signal arrives
        process.send_signal(signal.SIGTERM)  # as Ctrl-C; a shell may ignore INT
        output = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "interrupted" in output
    assert children_of(out) == []
    assert (out / "loop.json").exists()

    resumed = [sys.executable, "-m", "mismatch", "loop", "--resume", str(out)]
    with subprocess.Popen(resumed, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: bool(children_of(arm, "loop.trainer_side")), 120)
        process.kill()
    wait_until(lambda: children_of(out) == [], 60)

    start = resume_from(arm)
    assert 0 < start < STEPS

    def ends_the_engine(line: str) -> None:
        if line.startswith(f"step {start}:"):
            for pid in children_of(arm, "loop.engine_side"):
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(MismatchError, match="engine"):
        run_arm(arm, same, out / "pool.json", ends_the_engine)
    assert children_of(out) == []
    assert start <= resume_from(arm) < STEPS
    rows = run_arm(arm, same, out / "pool.json", silent)
    pairs = np.array(numbers(rows), float), np.array(numbers(expected), float)
    np.testing.assert_allclose(*pairs, rtol=1e-9)  # a sum's last bit varies
