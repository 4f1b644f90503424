"""Checkpoints of the loop: whole or not there, and every failure is an error of ours."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.features.loop import trainer_side as loop_trainer
from mismatch.features.loop.optimiser import PolicyOptimiser
from mismatch.features.loop.spec import LoopSpec
from mismatch.run.messages import read_error

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
ALONE: Any = SimpleNamespace(rank=0, control=None, barrier=lambda: None)


def optimiser(seed: int) -> PolicyOptimiser:
    torch.manual_seed(seed)
    loaded: Any = SimpleNamespace(scorer=torch.nn.Linear(3, 2))
    return PolicyOptimiser(ALONE, loaded, 1e-2, 1.0)


def step(policy: PolicyOptimiser) -> None:
    policy.loaded.scorer(torch.ones(1, 3)).pow(2).sum().backward()
    policy.optimiser.step()


def weights(policy: PolicyOptimiser) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.trained])


def test_moments_come_back_with_the_weights(tmp_path: Path) -> None:
    first, second = optimiser(0), optimiser(1)
    step(first)
    first.save(tmp_path / "000001")
    second.load(tmp_path / "000001")
    assert torch.equal(weights(first), weights(second))
    for policy in (first, second):
        policy.optimiser.zero_grad()
        step(policy)
    assert torch.equal(weights(first), weights(second))


def test_a_full_disk_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MismatchError, match="No space left"):
        optimiser(0).save(tmp_path / "000001")
    assert not (tmp_path / "000001").exists()


def test_a_damaged_checkpoint_is_an_error_of_ours(tmp_path: Path) -> None:
    policy = optimiser(0)
    policy.save(tmp_path / "000001")
    (shard,) = (tmp_path / "000001").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(MismatchError, match="cannot be read"):
        policy.load(tmp_path / "000001")


def test_whatever_fails_in_the_trainer_reaches_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_space = os.strerror(errno.ENOSPC)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, no_space)

    monkeypatch.setattr(loop_trainer, "run", full)
    job = tmp_path / "loop.json"
    job.write_text(json.dumps({"run_dir": str(tmp_path), "loop": to_json(LoopSpec()), "start": 0}))
    assert loop_trainer.main([str(job)]) == 1
    error = read_error(tmp_path, "loop-trainer-rank0")
    assert error is not None
    assert no_space in error.message
