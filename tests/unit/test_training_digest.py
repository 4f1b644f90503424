"""Weight digests see every changed value, and no change of layout."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from mismatch.analysis.diagnosis.loaded_weights import weights_as_loaded
from mismatch.engines.held_weights import NO_DIGESTS, loaded_digests
from mismatch.models import digests
from mismatch.models.digests import ZERO, combine, comparable, digest_tensor, source_hashes

torch.manual_seed(0)
WEIGHT = torch.randn(24, 16).to(torch.bfloat16)


def test_three_sums_ignore_order_and_padding_adds_nothing() -> None:
    digest = digest_tensor(WEIGHT)
    for other in (WEIGHT.t(), WEIGHT[torch.randperm(24)].reshape(4, -1)):
        assert digest_tensor(other)[:3] == digest[:3]
    assert digest_tensor(torch.nn.functional.pad(WEIGHT, (0, 5, 0, 3))) == digest


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("chunk", [1 << 22, 7])
def test_parts_that_know_where_they_lie_add_up(axis, chunk, monkeypatch) -> None:
    whole = digest_tensor(WEIGHT)
    monkeypatch.setattr(digests, "CHUNK", chunk)
    parts = WEIGHT.chunk(5, axis)
    starts = [sum(part.shape[axis] for part in parts[:i]) for i in range(len(parts))]
    places = [(0, start) if axis else (start, 0) for start in starts]
    pieces = zip(parts, places, strict=True)
    assert combine(digest_tensor(part, offset) for part, offset in pieces) == whole


EXPERTS = torch.randn(8, 24, 16).to(torch.bfloat16)
HALVES = torch.cat([WEIGHT[::2], WEIGHT[1::2]])
MOVED = {
    "two experts swapped": (EXPERTS, EXPERTS[[1, 0, *range(2, 8)]]),
    "gate and up de-interleaved": (WEIGHT, HALVES),
    "transposed": (WEIGHT[:16], WEIGHT[:16].t()),
    "rows permuted": (WEIGHT, WEIGHT.roll(1, 0)),
    "inside an expert": (EXPERTS, EXPERTS.roll(1, 2)),
}


@pytest.mark.parametrize("fault", MOVED)
def test_moved_values_show(fault: str) -> None:
    before, after = (digest_tensor(tensor) for tensor in MOVED[fault])
    assert before[:3] == after[:3]
    assert before != after
    sides = (
        {"weights": {"layers.0.w": before, "layers.1.w": before}},
        {"weights": {"layers.0.w": after, "layers.1.w": before}},
    )
    check = weights_as_loaded(*sides)
    assert (check.status, "layers.0.w" in check.detail) == ("failed", True)
    # A side that knows the values alone is no fault; nor is a layout of the engine's in every
    # layer, but then the order of these parameters was not compared.
    bare = {"weights": {name: digest[:3] for name, digest in sides[1]["weights"].items()}}
    assert weights_as_loaded(sides[0], bare).status == "passed"
    everywhere = {"weights": {"layers.0.w": after, "layers.1.w": after}}
    assert weights_as_loaded(sides[0], everywhere).status == "not_tested"


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
    values = torch.tensor([1, 5, 6], dtype=torch.int16).view(torch.bfloat16)
    other = torch.tensor([2, 3, 7], dtype=torch.int16).view(torch.bfloat16)
    first, second = digest_tensor(values), digest_tensor(other)
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_nothing_is_zero_and_sums_wrap() -> None:
    assert digest_tensor(torch.zeros(9)) == ZERO
    huge = (2**63 - 1, 0, 0)
    assert combine([huge, (1, 0, 0)]) == (-(2**63), 0, 0)
    assert combine([huge, (1, 0, 0, 5)]) == (-(2**63), 0, 0)  # as far as all go


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
    digests._table.cache_clear()
    try:
        with torch.device("meta"):
            assert digest_tensor(WEIGHT) == digest
    finally:
        digests._table.cache_clear()


def test_digests_of_a_model_under_a_default_device() -> None:
    model = torch.nn.Linear(4, 3)
    with torch.device("meta"):
        digests, unknown = loaded_digests(model)
    assert not unknown
    assert digests["weight"] == list(digest_tensor(model.weight.data))


def test_a_failing_digest_does_not_cost_the_engine() -> None:
    def fails(*_: object) -> bool:
        raise RuntimeError("CUDA error")

    assert loaded_digests(torch.nn.Linear(4, 3), owned=fails) == NO_DIGESTS


def test_a_parameter_that_its_loader_changes_is_not_compared() -> None:
    """Mamba's A is -exp(A_log): its digest would be another one in a clean run."""

    def composed_loader(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        """Named as vLLM's and SGLang's."""

    model = torch.nn.Linear(4, 3)
    vars(model.weight)["weight_loader"] = composed_loader
    digests, unknown = loaded_digests(model)
    assert list(digests) == ["bias"]
    assert list(unknown) == ["weight"]
