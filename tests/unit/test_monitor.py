"""The monitor of a run that trains: what it writes and logs, and that it never ends the run."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mismatch.features.recorded.dumps import read_recorded
from mismatch.features.recorded.monitor import Batch, Monitor
from tests.command import mismatch

N, P, R = 80, 6, 40


def tensors(size: float = 0.01) -> dict[str, Any]:
    """Return a padded batch, as verl and TRL hold it: prompts on the right, responses cut."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(N, R, dtype=torch.long)
    mask[:, 30:] = 0
    prompts = torch.ones(N, P, dtype=torch.long)
    prompts[:, :2] = 0
    logprobs = -torch.rand(N, R, generator=generator) - 0.5
    noise = size * torch.randn(N, R, generator=generator)
    return {
        "prompts": torch.randint(3, 90, (N, P), generator=generator),
        "responses": torch.randint(3, 90, (N, R), generator=generator),
        "attention_mask": torch.cat([prompts, mask], 1),
        "response_mask": mask,
        "rollout_log_probs": logprobs,
        "old_log_probs": (logprobs + noise).bfloat16(),
    }


def batch(held: dict[str, Any]) -> Batch:
    return Batch(
        held["prompts"],
        held["responses"],
        held["response_mask"],
        held["rollout_log_probs"],
        held["old_log_probs"],
        held["attention_mask"][:, :P],
    )


def test_every_nth_step_is_written_and_read_again(tmp_path: Path) -> None:
    held = tensors()
    monitor = Monitor(tmp_path / "watch", every=3, rows=64)
    seen = [monitor.see(lambda: batch(held)) for _ in range(6)]
    assert [bool(found) for found in seen] == [True, False, True, False, False, True]
    rows = read_recorded(tmp_path / "watch" / "step_3.jsonl").sequences
    assert len(rows) == 64
    assert rows[0].token_ids.tolist() == [
        *held["prompts"][0, 2:].tolist(),
        *held["responses"][0, :30].tolist(),
    ]
    assert rows[0].train_logprobs.tolist() == held["old_log_probs"][0, :30].float().tolist()
    assert rows[0].attributes["step"] == "3"
    delta = (held["old_log_probs"].double() - held["rollout_log_probs"].double())[:64, :30]
    assert seen[0]["mismatch/logprob_abs_diff_mean"] == pytest.approx(delta.abs().mean().item())


def test_values_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    held = tensors()
    held["old_log_probs"][0, 3] = float("nan")
    found = Monitor(tmp_path, every=1).see(lambda: batch(held))
    assert found["mismatch/not_finite"] == 1
    assert np.isfinite(found["mismatch/k3_kl"])


def test_a_failure_never_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Batch:
        raise KeyError("old_log_probs")

    monitor = Monitor(tmp_path, every=1)
    assert [monitor.see(broken), monitor.see(broken)] == [{}, {}]
    (tmp_path / "file").write_text("")
    assert Monitor(tmp_path / "file", every=1).see(lambda: batch(tensors())) == {}
    assert capsys.readouterr().err.count("old_log_probs") == 1


def test_verls_function_is_wrapped_where_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for verl's module; tests/integration has the real one."""
    metrics = ModuleType("verl.utils.debug.metrics")
    metrics.calculate_debug_metrics = lambda data: {"training/x": 1.0}  # type: ignore[attr-defined]
    names = ("verl", "verl.utils", "verl.utils.debug")
    modules = {name: ModuleType(name) for name in names} | {metrics.__name__: metrics}
    modules["verl.utils.debug"].metrics = metrics  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    from mismatch.features.recorded.verl_plugin import install

    original = metrics.calculate_debug_metrics
    install()
    assert metrics.calculate_debug_metrics is original
    monkeypatch.setenv("MISMATCH_WATCH_DIR", str(tmp_path))
    install()
    install()  # once is enough
    found = metrics.calculate_debug_metrics(SimpleNamespace(batch=tensors()))
    assert found["training/x"] == 1.0
    assert found["mismatch/k3_kl"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["step_1.jsonl"]


def test_trls_asynchronous_trainer_is_refused_at_start(tmp_path: Path) -> None:
    """A class without GRPOTrainer's buffer, as in TRL 1.16."""
    from mismatch.features.recorded.trl_callback import MismatchCallback

    class AsyncGRPOTrainer:
        pass

    with pytest.raises(ValueError, match="AsyncGRPOTrainer"):
        MismatchCallback(AsyncGRPOTrainer(), tmp_path)


def test_trls_callback_logs_by_the_trainers_own_log(tmp_path: Path) -> None:
    from mismatch.features.recorded.trl_callback import MismatchCallback

    held = tensors()
    buffered = {
        "prompt_ids": held["prompts"],
        "prompt_mask": held["attention_mask"][:, :P],
        "completion_ids": held["responses"],
        "completion_mask": held["response_mask"],
        "sampling_per_token_logps": held["rollout_log_probs"],
        "old_per_token_logps": held["old_log_probs"],
        "tool_mask": torch.arange(R).expand(N, R) % 5 > 0,  # tools wrote every fifth token
    }
    trainer = SimpleNamespace(_buffered_inputs=[buffered], _metrics={"train": defaultdict(list)})
    callback = MismatchCallback(trainer, tmp_path, every=5)
    for step in (4, 5):
        state = SimpleNamespace(is_world_process_zero=True, global_step=step)
        callback.on_step_end(None, state, None)
    assert len(trainer._metrics["train"]["mismatch/k3_kl"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_5.jsonl"]
    row = read_recorded(tmp_path).sequences[0]
    assert row.token_ids.tolist()[P - 2 :] == held["responses"][0, :30].tolist()
    assert row.sampled.tolist() == [False] * (P - 2) + [False, True, True, True, True] * 6


def test_watch_says_which_step_grew(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, every=1)
    for size in (0.01, 0.01, 0.01, 0.2):
        held = tensors(size)
        monitor.see(lambda: batch(held))  # noqa: B023 (called at once)
    done = mismatch("watch", tmp_path, "--once")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert [line.split(":")[0] for line in lines] == [f"step {n}" for n in (1, 2, 3, 4)]
    assert ["×" in line for line in lines] == [False, False, False, True]
    (tmp_path / "empty").mkdir()
    assert mismatch("watch", tmp_path / "empty", "--once").returncode == 2
    one_side = {"token_ids": [1, 2], "action_mask": [0, 1], "rollout_logprobs": [-0.1]}
    (tmp_path / "empty" / "a.jsonl").write_text(json.dumps(one_side) + "\n")
    assert mismatch("watch", tmp_path / "empty", "--once").returncode == 2
