"""Both sides at work at once give the numbers that they give in turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mismatch.run import store

from .conftest import TINY_RUN, run_check

pytestmark = pytest.mark.slow


@pytest.mark.grid
def test_side_by_side_gives_the_numbers_of_one_by_one(tmp_path: Path, tiny_run: Path):
    run = run_check(tmp_path / "run", *TINY_RUN, "--overlap")
    assert run.code in (0, 1), run.output
    timings, seconds = run.report["run"]["timings"], run.report["run"]["seconds"]
    assert list(seconds)[:3] == ["rollout", "rescore", "score"]
    assert timings["engine"]["sampled"] > 0
    for name in ("transformers:decode", "transformers:prefill", "fsdp"):
        ours, theirs = (
            store.load_scoring(directory, name) for directory in (run.directory, tiny_run)
        )
        assert np.array_equal(ours.token_ids, theirs.token_ids)
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=0.02)
    before = store.load_scoring(run.directory, "fsdp").logprobs
    for path in (run.directory / "scores").glob("fsdp*"):
        path.unlink()
    again = run_check(run.directory, *TINY_RUN, "--resume", "--no-overlap")
    assert again.code in (0, 1), again.output
    assert np.array_equal(store.load_scoring(run.directory, "fsdp").logprobs, before)
