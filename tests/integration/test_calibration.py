"""A small sample of the calibration, on runs that other tests share: blocks of 16 prompts."""

from __future__ import annotations

from benchmarks.calibration_blocks import Recorded, blocks, judged
from tests.integration.conftest import Run


def test_no_block_of_a_clean_run_is_called_broken(default_run: Run) -> None:
    found = [judged(block) for block in blocks(Recorded.load(default_run.directory), 16)]
    assert [one["failed"] for one in found] == [[]] * 3
    assert all({"excess fsdp", "gap vllm:fp32"} <= one["values"].keys() for one in found)


def test_every_block_of_a_trainer_without_sinks_is_called_broken(no_sinks_run: Run) -> None:
    found = [judged(block) for block in blocks(Recorded.load(no_sinks_run.directory), 16)]
    assert found
    assert all("attention-sinks" in one["failed"] for one in found)
