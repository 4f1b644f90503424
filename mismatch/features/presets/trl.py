"""A user's own GRPOConfig, for both sides: what TRL passes to vLLM, how its trainer computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.config_file import ConfigFile, read_config
from mismatch.features.presets.rules import table
from mismatch.specs import CheckSpec

MODEL = "model_name_or_path"  # a script's; GRPOTrainer itself gets it outside its arguments
# What TRL's vllm_generation.py sets whatever the configuration says, where it starts vLLM itself.
BATCHED_TOKENS = 4096


def read_trl_config(path: Path) -> ConfigFile:
    """Read fields of ``GRPOConfig``: a script's YAML, or what ``to_json_string`` wrote.

    Raises:
        MismatchError: missing file, or no YAML or JSON mapping.
    """
    from omegaconf import OmegaConf

    source = read_config("--trl-config", path)
    present = {name: value for name, value in source.tree.items() if value is not None}
    tree = OmegaConf.merge(OmegaConf.create(table("trl_keys")["defaults"]), present)
    return replace(source, tree=tree)


def follow_trl(source: ConfigFile, spec: CheckSpec, explicit: Collection[str] = ()) -> FollowedFile:
    """Return the check that a GRPOConfig describes; arguments as of :class:`Followed`."""
    work = FollowedFile(spec, explicit, source=source, framework="trl")
    work.seen |= {MODEL, "bf16", "fp16"}
    work.rules()
    if source.get("vllm_mode") == "colocate" and work.spec.rollout.engine.engine == "vllm":
        work.argument("(always)", "max_num_batched_tokens", BATCHED_TOKENS)
        rows = int(source.get("per_device_train_batch_size"))
        steps = source.get("steps_per_generation") or source.get("gradient_accumulation_steps")
        if source.get("generation_batch_size") is None:
            sequences = rows * work.spec.rollout.engine.tensor_parallel_size * int(steps)
            work.argument("per_device_train_batch_size", "max_num_seqs", sequences)
    if source.get("fp16"):
        for target in ("train.dtype", "train.autocast"):
            work.set("fp16", True, target, "fp16")
    elif source.get("bf16") is False:  # no mixed precision: what is loaded computes
        master = work.spec.train.master_dtype
        dtype = "fp32" if master == "auto" else master
        work.set("bf16", False, "train.dtype", dtype)
        work.settled |= {"autocast", "logprobs_dtype"}
    work.finish()
    return work
