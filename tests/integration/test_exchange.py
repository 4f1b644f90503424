"""A trainer on another machine scores a run by file, from its tokens to a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from mismatch.models import resolve_model
from tests.command import mismatch

pytestmark = pytest.mark.slow


def score_elsewhere(path: Path) -> None:
    """Add what a plain forward in bf16 and in float32 says to a file of tokens."""
    table = pd.read_parquet(path)
    for column, dtype in (("logprobs", torch.bfloat16), ("logprobs_fp32", torch.float32)):
        model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny-gpt-oss"), dtype=dtype)
        rows = []
        for ids in table.token_ids:
            tokens = torch.tensor(ids)[None]
            with torch.no_grad():
                laws = torch.log_softmax(model(tokens).logits[0].float(), -1)
            picked = laws[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
            rows.append([0.0, *picked.tolist()])  # one per token; that of the first is not read
        table[column] = rows
    table.to_parquet(path)


def test_from_tokens_to_a_verdict_by_file(tmp_path: Path) -> None:
    def run(*command: str, code: int = 0) -> str:
        done = mismatch(*command, cwd=tmp_path, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    few = ("--num-prompts", "16", "--samples-per-prompt", "1", "--max-tokens", "32")
    run("rollout", "--model", "tiny-gpt-oss", "--engine", "transformers", *few, "--out", "run")
    run("tokens", "run", "tokens.parquet")
    score_elsewhere(tmp_path / "tokens.parquet")
    run("score", "run", "--scorer", "file", "--scorer-config", "tokens.parquet")
    assert "tokens.parquet" in run("compare", "run", code=1)  # no engine in float32
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["verdict"]["status"] == "inconclusive"
    assert report["verdict"]["fitness"]["status"] in ("healthy", "tolerable")
    assert report["fingerprints"]["fsdp"]["file"] == "tokens.parquet"
    gaps = {gap["side"]: gap["size"]["value"] for gap in report["square"]["gaps"]}
    assert gaps["trainer"] < 1e-5
    untested = {entry["what"] for entry in report["not_tested"]}
    assert {"fsdp:alone", "fsdp:repeated", "fsdp:regrouped"} <= untested
