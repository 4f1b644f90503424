"""A user's own GRPOConfig, for both sides: what TRL passes to vLLM, how its trainer computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from mismatch.errors import MismatchError
from mismatch.features.presets.apply import FollowedFile
from mismatch.features.presets.config_file import ConfigFile, read_config
from mismatch.features.presets.rules import rules_of, table, typed
from mismatch.specs import CheckSpec

MODEL = "model_name_or_path"  # a script's; GRPOTrainer itself gets it outside its arguments
SAMPLING = {"max_tokens": "max_completion_length"}  # vLLM's name -> TRL's
# What TRL's vllm_generation.py sets whatever the configuration says, where it starts vLLM itself.
BATCHED_TOKENS = 4096


def read_trl_config(path: Path) -> ConfigFile:
    """Read fields of ``GRPOConfig``: a script's YAML, or what ``to_json_string`` wrote.

    Raises:
        MismatchError: missing file, no YAML or JSON mapping, or two temperatures.
    """
    source = read_config("--framework-config", path)
    present = {name: value for name, value in source.tree.items() if value is not None}
    tree = table("trl_keys")["defaults"] | present
    sampling = tree.get("generation_kwargs") or {}
    if not isinstance(sampling, dict):
        fault = f"{path}: generation_kwargs is {sampling!r:.60}, no mapping"
        raise MismatchError(fault, "write generation_kwargs: {min_p: 0.1}")
    if "temperature" in sampling:
        sampled, scored = sampling["temperature"], tree["temperature"]
        if sampled != scored:
            fault = (
                f"{path}: generation_kwargs.temperature is {sampled} and temperature is {scored}: "
                "TRL samples with the first and scores with the second, which is a mismatch itself"
            )
            raise MismatchError(fault, f"set temperature: {sampled}, outside generation_kwargs")
    return replace(source, tree=tree)


def follow_trl(source: ConfigFile, spec: CheckSpec, explicit: Collection[str] = ()) -> FollowedFile:
    """Return the check that a GRPOConfig describes; arguments as of :class:`Followed`."""
    work = FollowedFile(spec, explicit, source=source, framework="trl")
    work.seen |= {MODEL, "bf16", "fp16"}
    work.rules()
    places = {rule.key: rule for rule in rules_of("trl") if rule.to}
    for option, value in (source.get("generation_kwargs") or {}).items():
        key = f"generation_kwargs.{option}"  # vLLM's SamplingParams; they win over the fields
        work.seen.add(key)
        rule = places.get(SAMPLING.get(option, option))
        if value is None:
            continue
        if rule is not None and rule.to[0].startswith("sampling."):
            work.follow(rule, key, typed(rule.kind, value, key))
        else:
            gap = f"{key} = {value!s:.60}: it goes to vLLM's SamplingParams; here it does not"
            work.not_reproduced.append(gap)
    if source.get("vllm_mode") == "colocate" and work.spec.rollout.engine.engine == "vllm":
        work.argument("(always)", "max_num_batched_tokens", BATCHED_TOKENS)
        rows = int(source.get("per_device_train_batch_size"))
        steps = source.get("steps_per_generation") or source.get("gradient_accumulation_steps")
        if source.get("generation_batch_size") is None or source.get("steps_per_generation"):
            sequences = rows * work.spec.rollout.engine.tensor_parallel_size * int(steps)
            work.argument("per_device_train_batch_size × steps", "max_num_seqs", sequences)
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
