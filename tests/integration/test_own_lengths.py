"""The tool's own lengths leave the engine that samples as it is: its values are equal bit for bit.

A check starts the engine with room for its long sequence, which a run without that one lacks. On
rope types that depend on a length, and next to caches and adapters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.run import store
from tests.checkpoints import make

from .conftest import run_check
from .test_adapters import adapter_for

pytestmark = [pytest.mark.slow, pytest.mark.grid]
HEADS = {"head_dim": 32, "max_position_embeddings": 4096}
ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 1e4,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [8.0] * 16,
        "original_max_position_embeddings": 512,
        "factor": 8.0,
        "rope_theta": 1e4,
    },
}
FEW = ("--num-prompts", "4", "--samples-per-prompt", "2", "--max-tokens", "24")
FLAGS = (*FEW, "--nproc-per-node", "1", "--no-locate", "--no-explain", "--exact-kl", "0")


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        ("dynamic", ("kv_cache_dtype=fp8",)),
        ("yarn", ("enable_prefix_caching=true",)),
        ("longrope", ()),
        ("adapter", ()),
    ],
)
def test_a_long_sequence_moves_no_sampled_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, engine: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))
    changed = {"rope_parameters": ROPE[case]} if case in ROPE else {}
    base = make("llama", tmp_path / "base", **HEADS, **changed)
    given = ["--model", str(base)]
    if case == "adapter":
        given += ["--adapter", str(adapter_for(base, tmp_path / "adapter", 0.5))]
    given += [part for setting in engine for part in ("--engine-arg", setting)]
    runs = {}
    for name, length in (("with", ()), ("without", ("--context-length", "0"))):
        run = run_check(tmp_path / name, *given, *FLAGS, *length)
        run.require_judged()
        runs[name] = run
    assert "long_sequence" in runs["with"].report
    assert "long_sequence" not in runs["without"].report
    values = [store.load_scoring(tmp_path / name, "vllm:decode") for name in runs]
    np.testing.assert_array_equal(values[0].token_ids, values[1].token_ids)
    np.testing.assert_array_equal(values[0].logprobs, values[1].logprobs)
