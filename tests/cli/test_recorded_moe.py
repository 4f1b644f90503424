"""A dump of a MoE model is judged by the levels of MoE models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..command import mismatch

MOE = {"model_type": "qwen3_moe", "vocab_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
MOE |= {"architectures": ["Qwen3MoeForCausalLM"]}
DENSE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64}
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}


def dump(path: Path, size: float) -> Path:
    """Rows whose two sides differ by independent noise of one size, in nats."""
    draw = np.random.default_rng(0)
    with path.open("w") as file:
        for row in range(96):
            logprobs = -0.5 - draw.exponential(0.5, 64)
            row_of = {"token_ids": draw.integers(0, 64, 68).tolist(), "prompt_id": row // 2}
            row_of |= {"action_mask": [0] * 4 + [1] * 64, "logprobs": logprobs.tolist()}
            row_of["train_logprobs"] = (logprobs + size * draw.standard_normal(64)).tolist()
            file.write(json.dumps(row_of) + "\n")
    return path


def judged(run: Path, *command: Any) -> dict[str, Any]:
    done = mismatch("postmortem", *command, "--out", run)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report


@pytest.mark.parametrize(
    ("config", "flags", "levels"),
    [
        (None, [], "bf16 dense"),
        (None, ["--moe"], "bf16 MoE"),
        (MOE, [], "bf16 MoE"),
        (DENSE, [], "bf16 dense"),
    ],
    ids=["unknown", "flag", "config of a MoE model", "config of a dense model"],
)
def test_levels_follow_the_model(
    tmp_path: Path, config: dict[str, Any] | None, flags: list[str], levels: str
) -> None:
    """The tokenizer cannot be read: ids need none, and the report says so."""
    asked: list[Any] = [dump(tmp_path / "dump.jsonl", 0.03), *flags]
    if config is not None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | SHAPE))
        (tmp_path / "model" / "tokenizer.json").write_text("{")
        asked += ["--model", tmp_path / "model"]
    report = judged(tmp_path / "run", *asked)
    assert report["verdict"]["levels"] == levels
    facts = report["fingerprints"]["recorded:decode"]
    assert facts.get("moe") == (True if levels.endswith("MoE") else None)  # nobody knows: no fact
    missing = [entry["what"] for entry in report["not_tested"]]
    assert ("token texts" in missing) == (config is not None)


def test_the_same_numbers_are_worse_of_a_dense_model(tmp_path: Path) -> None:
    """A mean of 0.024 nats lies between the two bounds."""
    path = dump(tmp_path / "dump.jsonl", 0.03)
    found = [
        judged(tmp_path / f"run{number}", path, *flags)["verdict"]["judgements"]
        for number, flags in enumerate(([], ["--moe"]))
    ]
    dense, moe = ({each["metric"]: each["status"] for each in judgements} for judgements in found)
    name = "logprob_abs_diff_mean"
    assert (dense[name], moe[name]) == ("tolerable", "healthy")
