"""A small sample of the calibration, on runs that other tests share: blocks of 8 prompts."""

from __future__ import annotations

import pytest

from benchmarks.calibration_blocks import Recorded, blocks, judged
from tests.integration.conftest import Run


@pytest.mark.grid
def test_no_block_of_a_clean_run_is_called_broken(default_run: Run) -> None:
    judgements = [judged(block) for block in blocks(Recorded.load(default_run.directory), 8)]
    assert [each["failed"] for each in judgements] == [[]] * 2
    assert all({"excess fsdp", "gap vllm:fp32"} <= each["values"].keys() for each in judgements)


@pytest.mark.grid
def test_every_block_of_a_trainer_without_sinks_is_called_broken(no_sinks_run: Run) -> None:
    judgements = [judged(block) for block in blocks(Recorded.load(no_sinks_run.directory), 8)]
    assert judgements
    assert all("attention-sinks" in each["failed"] for each in judgements)
