"""Replicas of an engine, and both sides at work at once: the numbers stay those of one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mismatch.run import store

from .conftest import TINY_RUN, Run, run_check

pytestmark = pytest.mark.slow


def rolled_out(directory: Path, *flags: str) -> Path:
    run = run_check(directory, "--quick", "--nproc-per-node", "1", *flags)
    assert run.code == 0, run.output
    return run.directory


@pytest.mark.grid
def test_two_replicas_of_vllm_sample_what_one_does(tmp_path: Path, default_run: Run):
    two_replicas = rolled_out(tmp_path / "run", "--num-prompts", "4", "--data-parallel-size", "2")
    halves, whole = store.load_rollout(two_replicas), store.load_rollout(default_run.directory)
    assert halves.n_sequences == 16
    for ours, theirs in zip(halves.sequences(), whole.sequences(), strict=False):
        assert np.array_equal(ours, theirs)
    for name in ("vllm:decode", "vllm:prefill"):
        ours, theirs = (store.load_scoring(r, name) for r in (two_replicas, default_run.directory))
        assert np.allclose(ours.logprobs, theirs.logprobs[: len(ours.logprobs)], atol=1e-3)
        assert ours.fingerprint["data_parallel_size"] == 2
    decode = store.load_scoring(two_replicas, "vllm:decode")
    whole_decode = store.load_scoring(default_run.directory, "vllm:decode")
    assert decode.fingerprint["weights"] == whole_decode.fingerprint["weights"]
    assert decode.distributions is not None
    assert decode.routing is not None


def test_side_by_side_gives_the_numbers_of_one_by_one(tmp_path: Path, tiny_run: Path):
    run = run_check(tmp_path / "run", *TINY_RUN, "--overlap", "--data-parallel-size", "2")
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


@pytest.mark.grid
def test_a_replica_that_is_killed_ends_all(tmp_path: Path):
    from mismatch.engines.registry import engine_class
    from mismatch.engines.replicas import make_engine
    from mismatch.errors import MismatchError
    from mismatch.models import EMBEDDED
    from mismatch.specs import EngineSpec
    from mismatch.types import Sampling

    spec = EngineSpec("transformers", str(EMBEDDED["tiny-gpt-oss"]), data_parallel_size=2)
    children: list[psutil.Process] = []

    def kill(done: int, total: int, tokens: int) -> None:
        children[1].kill()

    engine: Any = make_engine(engine_class("transformers"), spec, Sampling(max_tokens=32), 64)
    with engine:
        children += [psutil.Process(process.pid) for process in engine.processes]
        with pytest.raises(MismatchError, match=r"replica 2\b.*code -9"):
            engine.generate([[1, 2, 3], [4, 5, 6, 7], [1, 2], [3, 4]], kill)
    assert not any(child.is_running() for child in children)
