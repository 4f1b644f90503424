"""Weight digests see every changed value, and no change of layout."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from mismatch.engines import fused_weights
from mismatch.engines.fused_weights import NO_DIGESTS, loaded_digests
from mismatch.models import digests
from mismatch.models.digests import (
    ZERO,
    combine,
    comparable,
    digest_tensor,
    source_hashes,
)

torch.manual_seed(0)
WEIGHT = torch.randn(24, 16).to(torch.bfloat16)


def test_layout_does_not_matter() -> None:
    digest = digest_tensor(WEIGHT)
    assert digest_tensor(WEIGHT.t().contiguous()) == digest
    assert digest_tensor(WEIGHT[torch.randperm(24)].reshape(4, -1)) == digest
    assert digest_tensor(torch.nn.functional.pad(WEIGHT, (0, 5, 0, 3))) == digest
    assert combine(digest_tensor(part) for part in WEIGHT.chunk(5)) == digest


def test_holding_bf16_values_in_fp32_does_not_matter() -> None:
    assert digest_tensor(WEIGHT.float()) == digest_tensor(WEIGHT)


def test_fp16_is_not_comparable() -> None:
    small = WEIGHT * 1e-6
    assert digest_tensor(small.to(torch.float16)) != digest_tensor(small)
    assert not comparable("fp16")
    assert comparable("fp32")


@pytest.mark.parametrize("step", [1, -1])
def test_one_changed_bit_shows(step: int) -> None:
    changed = WEIGHT.clone()
    changed.view(torch.int16)[3, 7] += step
    assert digest_tensor(changed) != digest_tensor(WEIGHT)


def test_compensating_changes_show() -> None:
    # 1 + 5 + 6 = 2 + 3 + 7, and so do their squares: only the mixed sum tells them apart.
    one = torch.tensor([1, 5, 6], dtype=torch.int16).view(torch.bfloat16)
    other = torch.tensor([2, 3, 7], dtype=torch.int16).view(torch.bfloat16)
    first, second = digest_tensor(one), digest_tensor(other)
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_nothing_is_zero_and_sums_wrap() -> None:
    assert digest_tensor(torch.zeros(9)) == ZERO
    huge = (2**63 - 1, 0, 0)
    assert combine([huge, (1, 0, 0)]) == (-(2**63), 0, 0)


def test_source_files_are_hashed_by_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.md").write_text("not read by anyone")
    assert source_hashes(tmp_path) == {"config.json": hashlib.sha256(b"{}").hexdigest()}


def test_hub_blobs_named_by_their_hash_are_not_read(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    snapshot = tmp_path / "snapshots" / "main"
    blob.parent.mkdir()
    snapshot.mkdir(parents=True)
    blob.write_bytes(b"weights")
    os.symlink(blob, snapshot / "model.safetensors")
    assert source_hashes(snapshot) == {"model.safetensors": "ab" * 32}


def test_a_default_device_does_not_matter() -> None:
    """vLLM loads its weights within ``with torch.device("cuda")``."""
    digest = digest_tensor(WEIGHT)
    digests._columns.cache_clear()
    try:
        with torch.device("meta"):
            assert digest_tensor(WEIGHT) == digest
    finally:
        digests._columns.cache_clear()


def test_digests_of_a_model_under_a_default_device() -> None:
    model = torch.nn.Linear(4, 3)
    with torch.device("meta"):
        found, unknown = loaded_digests(model)
    assert not unknown
    assert found["weight"] == list(digest_tensor(model.weight.data))


def test_a_failing_digest_does_not_cost_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(fused_weights, "_named_once", fails)
    assert loaded_digests(torch.nn.Linear(4, 3)) == NO_DIGESTS
