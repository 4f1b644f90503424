"""Configuration files: what is not followed is said in the plan, and others' files are refused."""

from __future__ import annotations

from typing import get_args

import pytest

from mismatch.cli.flags import Framework
from mismatch.features.presets.rules import table

from ..command import mismatch
from ..conftest import grid

OTHERS = {
    "ROLL": "exp_name: a\nactor_train: {a: 1}\nactor_infer: {a: 1}\nrollout_batch_size: 8\n",
    "NeMo-RL": "grpo: {a: 1}\npolicy: {model_name: a}\nloss_fn: {a: 1}\n",
    "prime-rl": "orchestrator: {a: 1}\ntrainer: {a: 1}\ninference: {a: 1}\n",
    "SkyRL": "trainer: {a: 1}\ngenerator: {a: 1}\nenvironment: {a: 1}\n",
    "AReaL": "allocation_mode: a\nactor: {a: 1}\nrollout: {a: 1}\n",
    "prime-rl (TOML)": "max_steps = 20\n[orchestrator]\nbatch_size = 8\n[trainer.optim]\nlr = 1\n",
    "slime": "ARGS=(\n  --hf-checkpoint /a\n  --rollout-batch-size 32\n)\npython train.py $ARGS\n",
    "OpenRLHF": "python -m openrlhf.cli.train_ppo_ray \\\n  --actor.model_name_or_path a\n",
    "verl": "actor_rollout_ref: {model: {path: a}}\ndata: {a: 1}\n",
}


def plan(tmp_path, name, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    command = ["check", "--model", "tiny-gpt-oss", "--dry-run", "--framework-config", path]
    command += ["--framework", name, "--own-loop"] if name else []
    return mismatch(*command, "--max-tokens", 64, cwd=tmp_path)


@pytest.mark.parametrize("whose", OTHERS)
def test_a_file_of_another_framework_is_refused_by_its_name(tmp_path, whose):
    done = plan(tmp_path, "trl", OTHERS[whose])
    assert done.returncode == 2
    name = whose.partition(" ")[0]
    assert f"configuration of {name}" in done.stderr
    takes = name in ("NeMo-RL", "SkyRL", "prime-rl", "slime", "OpenRLHF", "verl")
    assert (f"fix: --framework {name.lower()}" in done.stderr) == takes


def test_where_a_framework_is_known_by_was_read_in_its_source():
    for name, about in table("others").items():
        assert any(character.isdigit() for character in about["source"]) or name == "open-instruct"
        assert about.get("name", "slime") in get_args(Framework)


@pytest.mark.parametrize("key", ["temprature", "num_generation", "max_completion_lenght"])
def test_a_mistyped_key_is_refused(tmp_path, key):
    done = plan(tmp_path, "trl", f"num_generations: 8\n{key}: 1\n")
    assert done.returncode == 2
    assert f"{key} is no key" in done.stderr
    assert "did you mean" in done.stderr


def test_what_is_not_reproduced_is_in_the_plan(tmp_path):
    text = "use_peft: true\ngeneration_kwargs: {min_tokens: 5, min_p: 0.1}\nlora_r: 8\n"
    done = plan(tmp_path, "trl", text)
    said = [line.strip() for line in done.stdout.splitlines() if "not reproduced" in line]
    assert any("use_peft = True" in line for line in said)
    assert any("min_tokens = 5" in line for line in said)
    assert not any("min_p" in line for line in said)


def test_the_plan_says_what_became_of_every_key_of_a_framework_s_file(tmp_path):
    text = "trainer: {policy: {model: {path: tiny-gpt-oss, lora: {rank: 8}}}, warp_drive: 9}\n"
    text += "generator: {sampling_params: {temperature: 0.5, top_pp: 1}, n_samples_per_prompt: 2}\n"
    done = plan(tmp_path, "", text)
    assert done.returncode == 0
    assert "temperature = 0.5" in done.stdout
    lines = [line for line in done.stdout.splitlines() if "not reproduced" in line]
    for said in ("lora.rank = 8", "warp_drive", " generator.sampling_params.top_p?"):
        assert any(said in line for line in lines)


def test_what_the_defaults_of_nemo_rl_name_is_below_the_file(tmp_path):
    """A chain of files in other folders, two at once, a section that is replaced, one not here."""
    (tmp_path / "base").mkdir()
    files = {
        "all": "grpo: {num_generations_per_prompt: 4}\nloss_fn: {a: 1}\npolicy: {\n"
        "  model_name: tiny-gpt-oss, generation: {temperature: 0.25, top_p: 1, top_k: 7}}\n",
        "fp8": "defaults: all.yaml\npolicy:\n  generation: {temperature: 0.5, "
        "vllm_cfg: {kv_cache_dtype: fp8, tensor_paralel_size: 2}}\n",
        "lora": "policy: {dtensor_cfg: {lora_cfg: {enabled: true}}}\n",
    }
    for name, text in files.items():
        (tmp_path / "base" / f"{name}.yaml").write_text(text)
    text = "defaults: [base/fp8.yaml, base/lora.yaml, base/gone.yaml]\n"
    text += "policy: {generation: {top_p: 0.9}}\n"
    text += "grpo: {_override_: true, async_grpo: {enabled: 1}}\n"
    done = plan(tmp_path, "", text)
    assert done.returncode == 0, done.stderr
    for said in ("temperature = 0.5", "top_p = 0.9", "top_k = 7", "kv_cache_dtype"):
        assert said in done.stdout
    assert "num_generations_per_prompt" not in done.stdout  # it is replaced as a whole
    lines = [line for line in done.stdout.splitlines() if "not reproduced" in line]
    for said in ("lora_cfg.enabled = True", "gone.yaml", "async_grpo", "tensor_parallel_size?"):
        assert any(said in line for line in lines), said
    (tmp_path / "base" / "all.yaml").write_text("defaults: fp8.yaml\n")
    done = plan(tmp_path, "", text)
    assert done.returncode == 2
    assert "name each other" in done.stderr


# LoRA, an unknown key, a mistyped one, a cache in fp8.
CONFIGURED = {
    "verl": "actor_rollout_ref: {model: {path: tiny-gpt-oss, lora_rank: 8}, warp_drive: 9,\n"
    "  actor: {strategy: fsdp}, rollout: {name: vllm, dtype: bfloat16, temperature: 1, n: 1,\n"
    "  tensor_model_parallel_size: 1, temperture: 1,\n"
    "  engine_kwargs: {vllm: {kv_cache_dtype: fp8}}}}\n",
    "SkyRL": "trainer: {policy: {model: {path: tiny-gpt-oss, lora: {rank: 8}}}, warp_drive: 9}\n"
    "generator: {sampling_params: {temperture: 1},\n"
    "  inference_engine: {engine_init_kwargs: {kv_cache_dtype: fp8}}}\n",
    "NeMo-RL": "policy: {model_name: tiny-gpt-oss, warp_drive: 9, generation:\n"
    "  {temperture: 1, vllm_cfg: {kv_cache_dtype: fp8}},\n"
    "  dtensor_cfg: {lora_cfg: {enabled: true}}}\ngrpo: {a: 1}\nloss_fn: {a: 1}\n",
    "prime-rl": "orchestrator: {a: 1, train: {sampling: {temperture: 1}}}\nwarp_drive: 9\n"
    "trainer: {model: {name: tiny-gpt-oss, lora: {rank: 8}}}\n"
    "inference: {vllm: {kv_cache_dtype: fp8}}\n",
    "slime": "python train.py --hf-checkpoint tiny-gpt-oss --lora-rank 8 --warp-drive 9 "
    "--rollout-temperture 1 --rollout-batch-size 8 --sglang-kv-cache-dtype fp8_e4m3\n",
    "OpenRLHF": "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path tiny-gpt-oss "
    "--ds.lora.rank 8 --warp-drive 9 --vllm.enforce_eagr\n",
}


@pytest.mark.parametrize("name", grid(CONFIGURED, "prime-rl"))
def test_what_is_not_followed_of_any_framework_is_in_the_plan(tmp_path, name):
    done = plan(tmp_path, "verl" if name == "verl" else "", CONFIGURED[name])
    assert done.returncode == 0, done.stderr
    said = [line.lower() for line in done.stdout.splitlines() if "not reproduced" in line]
    meant = "enforce_eager?" if name == "OpenRLHF" else "temperature?"
    for words in ("lora", "warp", meant):
        assert any(words in line for line in said), (words, said)
    assert ("fp8" in done.stdout) == (name != "OpenRLHF")  # which has no such argument
