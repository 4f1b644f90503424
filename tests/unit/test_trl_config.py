"""A GRPOConfig means the same here as in TRL, and what cannot be followed is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mismatch.errors import MismatchError
from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.trl import MODEL, follow_trl, read_trl_config
from mismatch.run.yaml_file import read_mapping
from mismatch.specs import CheckSpec, TrainSpec
from mismatch.trainers.trl_config import Fields, divided, fields_in, in_plan
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
        ("trust_remote_code: true", "--trust-remote-code"),
        ("vllm_new_option: 3", "vllm_new_option"),
    ],
)
def test_what_cannot_be_followed_is_said(tmp_path: Path, line: str, said: str) -> None:
    plain = follow(tmp_path).not_reproduced
    (new,) = set(follow(tmp_path, f"{SCRIPT}{line}\n").not_reproduced) - set(plain)
    assert said in new


# A script's YAML, and `to_json_string()` of the GRPOConfig that TRL 1.16.0's own TrlParser made
# of it (tests/integration/test_stacks.py makes it again).
MADE = Path(__file__).parent.parent / "data" / "trl"
SOURCES = (
    "class TrainingArguments:\n    output_dir: str = ''\n    bf16: bool = True\n",
    "class _BaseConfig(TrainingArguments):\n    trust_remote_code: bool = False\n",
    "class GRPOConfig(_BaseConfig):\n    _valid = 3\n    temperature: float = 1.0\n",
    "class ModelConfig:\n    dtype: str = ''\n    lora_r: int = 8\n    load_in_4bit: bool = True\n",
    "class ScriptArguments:\n    dataset_name: str = ''\n",
    "class GRPOScriptArguments(ScriptArguments):\n    reward_funcs: list = None\n",
)


@pytest.mark.parametrize("name", ["script.yaml", "args.json"])
def test_both_files_that_trl_makes_mean_one_check(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)  # as in the base package
    followed = follow_trl(read_trl_config(MADE / name), CheckSpec())
    engine, sampling = followed.spec.rollout.engine, followed.spec.rollout.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.9, 50, 256)
    assert (sampling.samples_per_prompt, engine.max_model_len) == (4, 1024)
    assert dict(engine.args)["max_num_seqs"] == 8
    assert not any("fsdp" in key or "generation" in key for key in followed.ignored)


def test_names_of_fields_come_from_trls_source() -> None:
    fields = fields_in(SOURCES)
    assert fields.grpo == {"output_dir", "bf16", "trust_remote_code", "temperature"}
    assert fields.model == {"dtype", "lora_r", "load_in_4bit"}
    assert fields.script == {"dataset_name", "reward_funcs"}


def test_a_key_goes_to_the_class_that_has_it_and_a_scripts_own_is_named() -> None:
    values = {"temperature": 0.7, "lora_r": 8, "load_in_4bit": True, "dataset_name": "d"}
    values |= {"env": {"DEBUG": 1}, "my_curriculum": 3}
    file = divided("f.yaml", values, fields_in(SOURCES))
    assert (file.grpo, file.model) == ({"temperature": 0.7}, {"lora_r": 8, "load_in_4bit": True})
    assert (file.unknown, file.variables) == (("my_curriculum",), ("DEBUG",))
    said = " ".join(file.notes())
    assert all(name in said for name in ("load_in_4bit", "my_curriculum", "DEBUG"))
    assert "dataset_name" not in said


@pytest.mark.parametrize(
    ("key", "meant"), [("temprature", "temperature"), ("torch_dtype", "dtype")]
)
def test_a_typing_error_is_refused_with_what_was_meant(key: str, meant: str) -> None:
    with pytest.raises(MismatchError) as refused:
        divided("f.yaml", {key: 1}, fields_in(SOURCES))
    assert key in refused.value.message
    assert meant in refused.value.fix


def test_the_saved_arguments_make_a_config_that_scores_and_does_nothing_else() -> None:
    """TRL fills in two fields that it refuses together, and its batch asks for its own ranks."""
    values = read_mapping(MADE / "args.json", "args.json")
    assert values["generation_batch_size"]
    assert values["steps_per_generation"]
    options = divided("f", values, Fields(frozenset(values), frozenset(), frozenset())).options()
    assert (options["generation_batch_size"], options["steps_per_generation"]) == (None, 2)
    assert (options["use_vllm"], options["beta"], options["hub_token"]) == (False, 0.0, None)
    assert options["per_device_train_batch_size"] == 4


def test_the_models_keys_reach_the_model_as_a_script_hands_them_on() -> None:
    values = read_mapping(MADE / "script.yaml", "script.yaml")
    model = frozenset({"dtype", "attn_implementation", "model_revision", "use_peft", "lora_r"})
    options = divided("f", values, Fields(frozenset(), model, frozenset())).options()
    assert options["model_init_kwargs"] == {"dtype": "bfloat16", "attn_implementation": "sdpa"}


def test_numbers_are_read_as_frameworks_read_them(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("{a: 1e-6, b: -.5E+3, c: 1.e3, d: e5, e: 1_0}\n")
    assert read_mapping(path, "a.yaml") == {"a": 1e-6, "b": -500.0, "c": 1000.0, "d": "e5", "e": 10}


def test_options_of_the_engine_alone_set_the_sampling(tmp_path: Path) -> None:
    text = f"{SCRIPT}generation_kwargs: {{top_p: 0.5, max_tokens: 32, temperature: 0.9, seed: 1}}\n"
    followed = follow(tmp_path, text)
    sampling = followed.spec.rollout.sampling
    assert (sampling.top_p, sampling.max_tokens) == (0.5, 32)
    assert any("generation_kwargs.seed" in line for line in followed.not_reproduced)


def test_two_temperatures_are_a_fault_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(MismatchError) as refused:
        follow(tmp_path, f"{SCRIPT}generation_kwargs: {{temperature: 0.5}}\n")
    assert "temperature: 0.5" in refused.value.fix


def test_trls_own_code_follows_what_it_follows(tmp_path: Path) -> None:
    text = f"{SCRIPT}use_peft: true\nlora_r: 8\ndeepspeed: zero3.json\n"
    followed = follow_trl(
        read_trl_config(_written(tmp_path, text)), CheckSpec(train=TrainSpec(scorer="trl"))
    )
    said = " ".join(followed.not_reproduced)
    assert "deepspeed" in said
    assert "lora" not in said.lower()
    assert "FSDP2" not in followed.spec.preset


def test_the_plan_says_what_would_run(tmp_path: Path) -> None:
    path = str(_written(tmp_path, f"{SCRIPT}use_peft: true\n"))
    said = in_plan(path, None, 2, on_gpu=False)
    assert "MULTI_CPU" in said
    assert "4 rows" in said
    assert "LoRA" in said
    launch = tmp_path / "fsdp.yaml"
    launch.write_text("distributed_type: FSDP\n")
    assert "FSDP" in in_plan(path, str(launch), 2, on_gpu=True)


def _written(folder: Path, text: str) -> Path:
    path = folder / "grpo.yaml"
    path.write_text(text)
    return path
