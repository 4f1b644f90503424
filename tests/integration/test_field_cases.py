"""Faults of models, engines and trainers that people reported, on real engines: cause and side.

The engine's faults are planted in vLLM's classes (benchmarks/planted_fault.py); the trainer's are
transformers' own sdpa, which drops a cap, and a user's head that is multiplied by hand.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.calibration import plugin
from mismatch.analysis.diagnosis.detectors.factor import factor_of
from mismatch.analysis.diagnosis.detectors.stated import TIMES_HELD
from mismatch.models import resolve_model
from mismatch.models.weight_states import A, B, write_adapter
from mismatch.trainers.protocol import Facts, Scored, Tokens, TrainerJob, Variant
from tests import families
from tests.checkpoints import make, tokenizer
from tests.unit.test_lora_adapters import tensors

from .conftest import Run, run_check

pytestmark = [pytest.mark.slow, pytest.mark.grid]
FEW = ("--num-prompts", "16", "--samples-per-prompt", "2", "--max-tokens", "48")
ALONE = ("--nproc-per-node", "1", "--context-length", "0")
# vLLM's CPU attention wants heads of 32 and more.
WIDE = {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4}
GRANITE = {
    "logits_scaling": 4.0, "embedding_multiplier": 6.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.12, "intermediate_size": 256,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))


def checked(
    monkeypatch: pytest.MonkeyPatch, folder: Path, model: Path, fault: str, *flags: str
) -> list[dict[str, Any]]:
    """Check with a fault; the causes, larger first, of a run that is broken and whole."""
    if fault:
        path = os.pathsep.join([str(plugin(folder)), os.environ.get("PYTHONPATH", "")])
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setenv("PLANTED_FAULT", fault)
    given = ("--model", str(model), *FEW, *ALONE, *flags)
    run = run_check(folder / "run", *given, locate=True)
    run.require_judged()
    assert (run.report["verdict"]["status"], run.code) == ("broken", 1), run.output
    causes: list[dict[str, Any]] = run.report["causes"]["ranked"]
    shares = [cause["effect"]["value"] for cause in causes if cause["effect"]]
    assert all(share <= 1 for share in shares)
    return causes


def evidence(cause: dict[str, Any]) -> dict[str, Any]:
    return {item["what"]: item["value"] for item in cause["evidence"]}


def granite(folder: Path) -> Path:
    """A checkpoint whose logits are divided by a field of config.json."""
    import transformers

    fields = {**WIDE, **GRANITE, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.GraniteConfig(
        vocab_size=tokenizer().vocab_size, pad_token_id=0, bos_token_id=1, eos_token_id=2, **fields
    )
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn(model.lm_head.weight.shape) * 0.6)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_a_norm_behind_the_rotation_is_no_difference_of_weights(tmp_path, monkeypatch):
    model = make("qwen3", tmp_path / "qwen3", **WIDE)
    (cause, *_) = checked(monkeypatch, tmp_path, model, "norm-behind-rope:1")
    assert (cause["id"], cause["side"], cause["status"]) == (
        "function-differs", "engine", "confirmed",
    )  # fmt: skip
    assert "q_norm" in cause["advice"]
    assert "rotation" in cause["advice"]


def test_two_faults_are_both_named_the_larger_first(tmp_path, monkeypatch):
    """transformers' sdpa drops the cap on scores; the engine takes another activation."""
    model = make("gemma2", tmp_path / "gemma2", **WIDE, tie_word_embeddings=True)
    held = load_file(model / "model.safetensors")
    held["model.embed_tokens.weight"] *= 0.3  # else most tokens are certain
    save_file(held, model / "model.safetensors", {"format": "pt"})
    first, second, *_ = checked(monkeypatch, tmp_path, model, "exact-gelu:1", "--attention", "sdpa")
    assert (first["id"], first["side"], first["status"]) == (
        "logit-softcap",
        "trainer",
        "confirmed",
    )
    assert "--attention eager" in first["advice"]
    assert (second["id"], second["side"]) == ("function-differs", "engine")
    assert "GELU" in second["advice"]


def test_the_gate_of_a_shared_expert_that_is_skipped_is_named(tmp_path, monkeypatch):
    model = families.write("qwen2_moe", tmp_path / "moe", decoder_sparse_step=1, **WIDE)
    (cause, *_) = checked(monkeypatch, tmp_path, model, "no-shared-gate:1", "--prompts",
                          str(families.write_prompts(tmp_path / "p.jsonl", 16)))  # fmt: skip
    assert (cause["id"], cause["side"]) == ("function-differs", "engine")
    assert "shared_expert_gate" in cause["advice"]
    assert not {"attention-sinks", "sliding-window"} & {*cause["alike"]}


def test_the_scale_of_an_adapter_is_measured_on_the_engine_that_serves_it(tmp_path, monkeypatch):
    base = make("llama", tmp_path / "llama", head_dim=32)
    generator, weights = torch.Generator().manual_seed(1), {}
    for name, weight in sorted(tensors(base).items()):
        if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            module, (rows, columns) = name.removesuffix(".weight"), weight.shape
            weights[f"{module}.{A}"] = torch.randn(16, columns, generator=generator) / columns**0.5
            b = torch.randn(rows, 16, generator=generator)
            weights[f"{module}.{B}"] = b * float(weight.float().std()) * 0.4
    adapter = write_adapter(weights, tmp_path / "adapter", r=16, lora_alpha=16, use_rslora=True)
    (cause, *_) = checked(monkeypatch, tmp_path, base, "adapter-scale:1", "--adapter", str(adapter))
    assert (cause["id"], cause["side"], cause["status"]) == ("lora-scale", "engine", "confirmed")
    assert evidence(cause)[TIMES_HELD] == pytest.approx(0.25, rel=0.02)


def test_a_factor_that_the_engines_model_class_loses_is_named(tmp_path, monkeypatch):
    other = ("--engine-arg", "model_impl=transformers")
    (cause, *more) = checked(monkeypatch, tmp_path, granite(tmp_path / "granite"), "", *other)
    assert (cause["id"], cause["side"], cause["status"]) == ("logit-scale", "engine", "confirmed")
    assert evidence(cause)[factor_of("engine")] == pytest.approx(4.0)
    assert "logits_scaling" in cause["advice"]
    assert more == []


def test_a_factor_that_a_users_trainer_loses_is_named(tmp_path, monkeypatch):
    own = ("--scorer", "tests.integration.test_field_cases:HeadByHand")
    (cause, *more) = checked(monkeypatch, tmp_path, granite(tmp_path / "granite"), "", *own)
    assert (cause["id"], cause["side"], cause["status"]) == ("logit-scale", "trainer", "confirmed")
    assert evidence(cause)[factor_of("trainer")] == pytest.approx(4.0)
    assert more == []
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    fixes = [check["fix"] for check in report["checks"] if check["status"] == "failed"]
    assert not any("mismatch kernels" in fix or "mismatch locate" in fix for fix in fixes)


def test_rows_that_pad_a_trainers_head_are_no_proven_vocabulary(tmp_path, monkeypatch):
    """64 rows of zeros take part in its softmax, in float32 as well."""
    model = make("llama", tmp_path / "llama", **WIDE)
    own = ("--scorer", "tests.integration.test_field_cases:PaddedHead")
    cause, *_ = checked(monkeypatch, tmp_path, model, "", *own)
    assert cause["side"] == "trainer"
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    failed = {check["id"] for check in report["checks"] if check["status"] == "failed"}
    assert "implementation-gap-trainer" in failed
    (standing,) = (e["standing"] for e in report["validity"] if "vocabulary" in e["what"])
    assert standing != "proven"


def test_a_share_goes_to_the_difference_that_makes_it(tmp_path, monkeypatch):
    """Digests differ in one value; the trainer's kernel, which drops the sinks, is what matters."""
    model = Path(resolve_model("tiny-gpt-oss"))
    other = shutil.copytree(model, tmp_path / "other")
    (file,) = other.glob("*.safetensors")
    held = load_file(file)
    held["model.norm.weight"][0] *= 1 + 2**-7  # one step of bf16
    save_file(held, file, {"format": "pt"})
    how = ("--train-model", str(other), "--attention", "no-sinks")
    first, *rest = checked(monkeypatch, tmp_path, model, "", *how)
    assert (first["id"], first["side"], first["status"]) == (
        "attention-sinks", "trainer", "confirmed",
    )  # fmt: skip
    assert first["effect"]["value"] > 0.5
    (weights,) = [cause for cause in rest if cause["id"] == "weights-differ"]
    assert weights["effect"] is None or weights["effect"]["value"] < 0.1


def test_weights_that_change_in_the_engines_memory_are_the_engines(tmp_path, monkeypatch):
    """The trainer's digests equal the files, and the engine's do as it read them."""
    model = Path(resolve_model("tiny-gpt-oss"))
    (cause, *_) = checked(monkeypatch, tmp_path, model, "layer-noise:0.01")
    assert (cause["id"], cause["side"]) == ("weights-differ", "engine")


def test_a_plain_function_as_trainer_gives_a_report(tmp_path, monkeypatch):
    """On two ranks without a process group, as the page shows it; its float32 is not known."""
    model = make("gpt2", tmp_path / "gpt2", n_positions=1024, hidden_size=128)
    monkeypatch.setenv("FIELD_MODEL", str(model))
    own = ("--scorer", "tests.integration.test_field_cases:plain", "--nproc-per-node", "2")
    run: Run = run_check(tmp_path / "run", "--model", str(model), *FEW, *own)
    run.require_judged()
    assert (run.code, run.report["verdict"]["status"]) == (1, "inconclusive"), run.output
    (check,) = [c for c in run.report["checks"] if c["status"] == "inconclusive"]
    assert check["id"] == "implementation-gap-trainer"
    assert "docs/how-to/your-trainer.md" in check["fix"]


# ---------------------------------------------------------------- users' trainers


def loaded(path: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@torch.no_grad()
def row_scores(model: Any, ids: np.ndarray, temperature: float, by_hand: bool) -> np.ndarray:
    """Log-probabilities of tokens 1 … n - 1 of one sequence, [n - 1]."""
    tokens = torch.as_tensor(ids)[None]
    if by_hand:  # the head alone: whatever the model class does to its logits is lost
        logits = model.model(input_ids=tokens, use_cache=False)[0] @ model.lm_head.weight.T
    else:
        logits = model(input_ids=tokens, use_cache=False).logits
    distribution = torch.log_softmax(logits[0].float() / temperature, -1)
    return distribution[:-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()


class HeadByHand:
    """Multiplies hidden states by the head itself, and loses the model's factor."""

    def __init__(self, job: TrainerJob) -> None:
        self.job, self.name = job, "fp32" if job.precision == "fp32" else "bf16"
        self.model = loaded(job.model, torch.float32 if self.name == "fp32" else torch.bfloat16)

    def score(self, tokens: Tokens, variant: Variant) -> Scored:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        rows, masks = tokens.sequences(), tokens.masks()
        own = tuple(range(rank, len(rows), world))
        scores = [row_scores(self.model, rows[n], self.job.temperature, True) for n in own]
        kept = (s[masks[n][1:]].astype(np.float32) for n, s in zip(own, scores, strict=True))
        return Scored(own, tuple(kept))

    def facts(self) -> Facts:
        return Facts(code="HeadByHand", dtype=self.name, attention="sdpa")


class PaddedHead(HeadByHand):
    """Its head has 64 rows more than the vocabulary, which are zeros."""

    def __init__(self, job: TrainerJob) -> None:
        super().__init__(job)
        head = self.model.lm_head.weight.data
        self.model.lm_head.weight.data = torch.cat([head, head.new_zeros(64, head.shape[1])])


def plain(ids: np.ndarray, lengths: np.ndarray, mask: np.ndarray, temperature: float) -> np.ndarray:
    """A function as docs/how-to/your-trainer.md shows it."""
    model = loaded(os.environ["FIELD_MODEL"], torch.bfloat16)
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    parts = [np.append(0.0, row_scores(model, row, temperature, False)) for row in rows]
    return np.concatenate(parts)[mask]
