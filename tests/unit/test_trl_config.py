"""A GRPOConfig means the same here as in TRL, and what cannot be followed is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mismatch.errors import MismatchError
from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.trl import MODEL, follow_trl, read_trl_config
from mismatch.specs import CheckSpec
from tests.preset_machine import be_on

# As a script's YAML has it: script, model and training arguments together.
SCRIPT = """\
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/DeepMath-103K
attn_implementation: sdpa
dtype: bfloat16
use_vllm: true
temperature: 0.9
top_k: 50
max_completion_length: 256
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
vllm_max_model_length: 1024
learning_rate: 1.0e-6
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    be_on(monkeypatch)


def follow(folder: Path, text: str = SCRIPT, **options: Any) -> FollowedFile:
    path = folder / "grpo.yaml"
    path.write_text(text)
    return follow_trl(read_trl_config(path), CheckSpec(), **options)


def test_both_sides(tmp_path: Path) -> None:
    followed = follow(tmp_path)
    engine, sampling = followed.spec.rollout.engine, followed.spec.rollout.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.9, 50, 1.0)
    assert (sampling.max_tokens, sampling.samples_per_prompt) == (256, 8)  # 8: TRL's default
    assert (engine.max_model_len, engine.gpu_memory_utilization) == (1024, 0.3)
    assert dict(engine.args) == {
        "model_impl": "vllm",
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 8,
    }
    train = followed.spec.train
    assert (train.attention, train.master_dtype, train.autocast) == ("sdpa", "bf16", "bf16")
    assert train.logprobs_dtype == "bf16"  # from the preset
    assert read_trl_config(tmp_path / "grpo.yaml").model(MODEL) == "Qwen/Qwen3-0.6B"
    assert followed.ignored == ()


def test_arguments_that_a_trainer_saved_as_json(tmp_path: Path) -> None:
    path = tmp_path / "grpo.json"
    given = {"temperature": 0.7, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1, "bf16": False}
    path.write_text(json.dumps(given))
    followed = follow_trl(read_trl_config(path), CheckSpec())
    sampling = followed.spec.rollout.sampling
    assert (sampling.temperature, sampling.min_p, sampling.repetition_penalty) == (0.7, 0.1, 1.1)
    assert (followed.spec.train.dtype, followed.spec.train.autocast) == ("fp32", None)
    with pytest.raises(MismatchError, match="model_name_or_path"):
        read_trl_config(path).model(MODEL)


def test_the_users_flags_win_and_a_cpu_engine_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, cpu_engine=True)
    followed = follow(tmp_path, explicit={"temperature"})
    assert followed.spec.rollout.sampling.temperature == 1.0
    assert any(line.endswith("--temperature") for line in followed.kept)
    assert "max_num_batched_tokens" not in dict(followed.spec.rollout.engine.args)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("vllm_mode: server", "--server"),
        ("use_peft: true", "LoRA"),
        ("generation_kwargs: {seed: 3}", "SamplingParams"),
        ("vllm_new_option: 3", "vllm_new_option"),
    ],
)
def test_what_cannot_be_followed_is_said(tmp_path: Path, line: str, said: str) -> None:
    plain = follow(tmp_path).not_reproduced
    (new,) = set(follow(tmp_path, f"{SCRIPT}{line}\n").not_reproduced) - set(plain)
    assert said in new
