"""A verl config means the same here as there, and what cannot be followed is said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mismatch.errors import MismatchError
from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.config_file import read_config
from mismatch.features.presets.rules import table
from mismatch.features.presets.verl import MODEL, follow_verl, read_verl_config
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec
from tests.preset_machine import be_on
from tests.texts import numbers

# As verl prints it when it starts, shortened: interpolations still in place.
PRINTED = """\
actor_rollout_ref:
  model:
    path: Qwen/Qwen3-30B-A3B
    trust_remote_code: false
    use_remove_padding: true
    use_fused_kernels: false
    lora_rank: 0
    override_config:
      attn_implementation: sdpa
  actor:
    strategy: fsdp2
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 3072
    optim:
      lr: 1e-6
    fsdp_config:
      model_dtype: bf16
      dtype: bfloat16
      param_offload: true
      ulysses_sequence_parallel_size: 1
      mixed_precision:
        param_dtype: fp16
        reduce_dtype: fp32
  rollout:
    name: vllm
    temperature: 0.7
    top_p: 0.95
    top_k: -1
    n: 8
    seed: 7
    dtype: float16
    prompt_length: ${oc.select:data.max_prompt_length,512}
    response_length: ${data.max_response_length}
    tensor_model_parallel_size: 4
    gpu_memory_utilization: 0.6
    enforce_eager: true
    enable_prefix_caching: false
    enable_chunked_prefill: true
    max_model_len: 2048
    max_num_batched_tokens: 16384
    max_num_seqs: 64
    logprobs_mode: processed_logprobs
    log_prob_max_token_len_per_gpu: ${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}
    engine_kwargs:
      vllm:
        kv_cache_dtype: fp8
        disable_mm_preprocessor_cache: null
      sglang: {}
data:
  max_prompt_length: 256
  max_response_length: 1024
trainer:
  default_local_dir: checkpoints/${now:%Y-%m-%d}
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    be_on(monkeypatch)


def _write(directory: Path, text: str, name: str = "ppo.yaml") -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _applied(
    directory: Path, text: str = PRINTED, overrides: tuple[str, ...] = (), **options: Any
) -> FollowedFile:
    spec = options.pop("spec", CheckSpec())
    return follow_verl(read_verl_config(_write(directory, text), overrides), spec, **options)


def test_both_sides(tmp_path: Path) -> None:
    applied = _applied(tmp_path)
    engine, sampling = applied.spec.rollout.engine, applied.spec.rollout.sampling
    assert (engine.engine, engine.dtype, engine.tensor_parallel_size) == ("vllm", "fp16", 4)
    assert (engine.max_model_len, engine.gpu_memory_utilization) == (2048, 0.6)
    assert dict(engine.args) == {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 64,
        "kv_cache_dtype": "fp8",
    }
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.95, 0)
    assert (sampling.max_tokens, sampling.samples_per_prompt, sampling.seed) == (1024, 8, 7)
    train = applied.spec.train
    assert (train.dtype, train.autocast, train.master_dtype) == ("fp16", "fp16", "bf16")
    assert (train.layout, train.attention, train.micro_batch_tokens) == ("packing", "sdpa", 16384)
    assert train.temperature_in == "logits-rounded"  # from the preset
    assert read_verl_config(tmp_path / "ppo.yaml").model(MODEL) == "Qwen/Qwen3-30B-A3B"


def test_every_key_is_accounted_for(tmp_path: Path) -> None:
    applied = _applied(tmp_path)
    used = {line.partition(" = ")[0].removeprefix("actor_rollout_ref.") for line in applied.used}
    assert {
        "rollout.temperature",
        "actor.fsdp_config.model_dtype",
        "model.use_remove_padding",
    } <= used
    assert "actor_rollout_ref.actor.optim.lr" not in applied.ignored  # changes no logprob
    assert "actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype" in applied.ignored
    assert not any("rollout.temperature" in key for key in applied.ignored)
    assert "actor_rollout_ref.model.path" not in applied.ignored
    assert not any("default_local_dir" in line for line in applied.not_reproduced)
    (unfollowed,) = [line for line in applied.not_reproduced if "reduce_dtype" in line]
    assert "actor_rollout_ref.actor.fsdp_config.mixed_precision: reduce_dtype" in unfollowed
    assert applied.spec.not_reproduced == tuple(applied.not_reproduced)
    assert applied.spec.preset.startswith("verl 0.9")
    assert not any("FSDP1" in line for line in applied.not_reproduced)  # strategy is fsdp2
    assert any(line.startswith("verl:") for line in applied.not_reproduced)  # the preset's
    assert set(table("verl_keys")["always"]) <= set(applied.not_reproduced)
    assert applied.kept == []


def test_beside_verls_own_code_nothing_is_said_of_a_trainer_of_ours(tmp_path: Path) -> None:
    own = CheckSpec(train=TrainSpec(scorer="verl"))
    overrides = ("actor_rollout_ref.actor.strategy=fsdp",)
    applied = _applied(tmp_path, spec=own, overrides=overrides)
    assert set(table("verl_keys")["always"]) <= set(applied.not_reproduced)
    imitated = ("FSDP", "verl:", "log_prob_max_token_len_per_gpu")
    assert not any(word in line for line in applied.not_reproduced for word in imitated)


def test_flags_win_over_the_config_and_the_config_over_the_preset(tmp_path: Path) -> None:
    spec = CheckSpec(rollout=RolloutSpec(engine=EngineSpec(args=(("max_num_seqs", 2),))))
    given = {"temperature", "dtype", "layout", "master_dtype"}
    applied = _applied(tmp_path, spec=spec, explicit=given)
    assert applied.spec.rollout.sampling.temperature == 1.0
    assert applied.spec.rollout.engine.dtype == "bf16"
    assert dict(applied.spec.rollout.engine.args)["max_num_seqs"] == 2
    assert (applied.spec.train.layout, applied.spec.train.master_dtype) == ("padding", "auto")
    assert applied.spec.train.dtype == "fp16"
    assert any(line.endswith("--temperature") for line in applied.kept)
    assert any(line.endswith("--engine-arg max_num_seqs") for line in applied.kept)


def test_overrides_come_last(tmp_path: Path) -> None:
    overrides = (
        "actor_rollout_ref.rollout.temperature=1e-1",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
        "++data.max_response_length=64",
        "actor_rollout_ref.rollout.max_num_seqs=null",
    )
    applied = _applied(tmp_path, overrides=overrides)
    assert applied.spec.rollout.sampling.temperature == 0.1
    assert applied.spec.rollout.sampling.max_tokens == 64  # through the interpolation
    assert dict(applied.spec.rollout.engine.args)["block_size"] == 32
    assert "max_num_seqs" not in dict(applied.spec.rollout.engine.args)


GAPS = {
    "actor_rollout_ref.actor.strategy=megatron": "that trainer is not FSDP",
    "actor_rollout_ref.model.lora_rank=16": "no LoRA",
    "actor_rollout_ref.model.use_fused_kernels=true": "fused head",
    "actor_rollout_ref.rollout.quantization=fp8": "patches of verl",
    "actor_rollout_ref.rollout.expert_parallel_size=8": "experts are not spread",
    "actor_rollout_ref.actor.fsdp_config.dtype=float16": "does not read it",
    "actor_rollout_ref.rollout.multi_turn.enable=true": "one turn",
    "data.train_files=/nowhere/train.parquet": "is not on this machine",
    "trainer.use_legacy_worker_impl=auto": "releases up to 0.7",
    "actor_rollout_ref.model.lora.rank=16": "no LoRA",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded": "sync-probe",
    "actor_rollout_ref.rollout.full_determinism=true": "deterministic",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768": "micro-batches",
}


@pytest.mark.parametrize("override", GAPS)
def test_what_cannot_be_followed_is_said(tmp_path: Path, override: str) -> None:
    plain = _applied(tmp_path).not_reproduced
    remarks = _applied(tmp_path, overrides=(override,)).not_reproduced
    (new,) = set(remarks) - set(plain)
    assert GAPS[override] in new
    assert override.partition("=")[0] in new


@pytest.mark.parametrize("section", ["actor", "actor.fsdp_config"])
def test_ulysses_splits_sequences(tmp_path: Path, section: str) -> None:
    override = (f"actor_rollout_ref.{section}.ulysses_sequence_parallel_size=2",)
    applied = _applied(tmp_path, overrides=override)
    assert applied.spec.train.sequence_parallel == 2
    assert not any("ulysses" in line for line in applied.not_reproduced)


def test_vllms_cpu_build_keeps_its_own_scheduler_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, cpu_engine=True)
    applied = _applied(tmp_path)
    assert "max_num_batched_tokens" not in dict(applied.spec.rollout.engine.args)
    assert any("max_num_batched_tokens = 16384" in line for line in applied.not_reproduced)


def test_engine_kwargs_with_a_flag_of_their_own(tmp_path: Path) -> None:
    key = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    overrides = (f"{key}.max_model_len=4096", f"{key}.dtype=float32", f"{key}.seed=9")
    applied = _applied(tmp_path, overrides=overrides)
    engine = applied.spec.rollout.engine
    assert (engine.max_model_len, engine.dtype) == (4096, "fp32")
    assert applied.spec.rollout.sampling.seed == 9
    assert applied.spec.train.dtype == "fp16"  # the trainer's own
    assert not {"max_model_len", "dtype", "seed"} & dict(engine.args).keys()


def test_train_files_that_are_here_become_the_prompts(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"")
    overrides = (f"data.train_files=['{tmp_path}/train.parquet', b]", "+data.prompt_key=chat")
    applied = _applied(tmp_path, overrides=overrides)
    prompts = applied.spec.rollout.prompts
    assert (prompts.dataset, prompts.prompt_column) == (f"{tmp_path}/train.parquet", "chat")
    assert [numbers(line) for line in applied.not_reproduced if "train_files" in line] == [[2]]
    own = _applied(tmp_path, overrides=overrides, explicit={"prompts"})
    assert own.spec.rollout.prompts.dataset is None


OVERRIDE = "--framework-override"
ERRORS = {
    "rollout.temperature=warm": (
        "rollout.temperature is warm, not a number",
        "--framework-override",
    ),
    "rollout.n=0": ("rollout.n is 0, not a positive whole number", OVERRIDE),
    "rollout.n=true": ("rollout.n is True, not a positive whole number", OVERRIDE),
    "rollout.dtype=int4": ("rollout.dtype is int4, not bf16, fp16 or fp32", OVERRIDE),
    "rollout.enforce_eager=maybe": ("enforce_eager is maybe, not a switch", OVERRIDE),
    "rollout.name=trtllm": ("rollout.name is trtllm", "sglang"),
    "rollout.engine_kwargs.vllm=3": (
        "engine_kwargs.vllm is 3, not a mapping",
        "--framework-override",
    ),
    "rollout.top_p=${data.nucleus}": ("data.nucleus", OVERRIDE),
    "rollout.top_p=${oc.env:MISMATCH_NO_SUCH}": ("MISMATCH_NO_SUCH", OVERRIDE),
    "rollout.top_p=${nowhere:%Y}": ("nowhere", OVERRIDE),
    "rollout.top_p=${.top_p}": ("Recursive", OVERRIDE),
}


@pytest.mark.parametrize("override", ERRORS)
def test_bad_values_name_their_key(tmp_path: Path, override: str) -> None:
    message, fix = ERRORS[override]
    with pytest.raises(MismatchError) as caught:
        _applied(tmp_path, overrides=(f"actor_rollout_ref.{override}",))
    assert message in caught.value.message
    assert "actor_rollout_ref.rollout." in caught.value.message
    assert fix in caught.value.fix


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="No such file") as caught:
        read_verl_config(tmp_path / "nowhere.yaml")
    assert "--framework-config" in caught.value.message
    with pytest.raises(MismatchError, match=r"broken\.yaml.* line 3"):
        read_verl_config(_write(tmp_path, "a:\n  b: 1\n c: 2\n", "broken.yaml"))
    with pytest.raises(MismatchError, match="holds a list"):
        read_verl_config(_write(tmp_path, "- a\n", "list.yaml"))
    for override in ("temperature", "~data.n", "=1"):
        with pytest.raises(MismatchError, match="not key=value"):
            read_verl_config(_write(tmp_path, PRINTED), (override,))
    with pytest.raises(MismatchError, match=r"unclosed\.yaml"):
        read_verl_config(_write(tmp_path, "a: ${b\n", "unclosed.yaml"))


def test_without_omegaconf_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    with pytest.raises(MismatchError) as caught:
        read_verl_config(_write(tmp_path, PRINTED))
    assert "train-infer-mismatch[verl]" in caught.value.fix
    assert "--resolve" in caught.value.fix


def test_a_resolved_config_means_the_same_without_omegaconf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``--cfg job --resolve`` prints it: no interpolation is left."""
    from omegaconf import OmegaConf

    tree = OmegaConf.create(PRINTED.partition("trainer:")[0])
    resolved = OmegaConf.to_yaml(tree, resolve=True)
    overrides = ("actor_rollout_ref.rollout.n=2", "+data.prompt_key=chat")
    whole = _applied(tmp_path, overrides=overrides)
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    alone = _applied(tmp_path, resolved, overrides)
    assert alone.spec == whole.spec
    assert alone.spec.rollout.sampling.samples_per_prompt == 2
    assert alone.used == whole.used


def test_a_model_that_is_not_given(tmp_path: Path) -> None:
    config = read_verl_config(_write(tmp_path, PRINTED.replace("Qwen/Qwen3-30B-A3B", "???")))
    with pytest.raises(MismatchError, match=r"actor_rollout_ref\.model\.path") as caught:
        config.model(MODEL)
    assert "--model MODEL" in caught.value.fix


@pytest.mark.parametrize(
    "text",
    [
        f"defaults:\n  - ppo_trainer\n  - _self_\n{PRINTED}",
        PRINTED.replace("    temperature: 0.7\n", ""),
        "actor_rollout_ref: {model: {path: org/name}}\n",
    ],
)
def test_a_config_that_is_not_complete_is_asked_for(tmp_path: Path, text: str) -> None:
    with pytest.raises(MismatchError, match="not complete") as caught:
        read_verl_config(_write(tmp_path, text))
    assert ".hydra/config.yaml" in caught.value.fix


def test_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_TEST_MODEL", "org/name")
    text = (
        "a: ${oc.env:MISMATCH_TEST_MODEL}\nb: x-${c.d}-${c.d}\nc:\n  d: 5\n  e: ${.d}\n"
        "f: ${oc.select:g.h,null}\ni: ???\nj: [1, '${c.d}']\nk: ${oc.select:c.d,9}\nl: ${c}\n"
    )
    config = read_config("--framework-config", _write(tmp_path, text))
    values = [config.get(key) for key in "abfijkl"]
    assert values == ["org/name", "x-5-5", None, None, [1, 5], 5, {"d": 5, "e": 5}]
    assert config.get("no.such") is None
    assert config.get("j.1") == 5


def test_a_variable_that_may_hold_a_secret_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "verysecretvalue")
    config = read_config("--framework-config", _write(tmp_path, "a: x/${oc.env:SOME_API_KEY}\n"))
    with pytest.raises(MismatchError, match="SOME_API_KEY may") as caught:
        config.get("a")
    assert "verysecretvalue" not in str(caught.value)
