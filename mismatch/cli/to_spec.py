"""Flags to specs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mismatch.cli.flags import Flags
from mismatch.errors import MismatchError

if TYPE_CHECKING:
    from mismatch.specs import CheckSpec, RolloutSpec, TrainSpec

NO_MODEL = "name one: --model tiny-gpt-oss, a hub id (org/name) or a directory"


def check_spec(flags: Flags) -> CheckSpec:
    """The spec that the flags of `check` mean."""
    from mismatch.injections import parse_injections
    from mismatch.models import resolve_model
    from mismatch.specs import CheckSpec

    model = resolve_model(flags["model"] or verl_model(flags) or require_model(flags))
    train_model = resolve_model(flags["train_model"]) if flags["train_model"] else model
    return CheckSpec(
        rollout=rollout_spec(flags, model),
        train=train_spec(flags, train_model),
        nproc_per_node=ranks(flags),
        noise_floor=flags["noise_floor"],
        seed=flags["seed"],
        forecast_length=positive(flags, "forecast_length"),
        two_passes=flags["two_passes"],
        inject=parse_injections(flags["inject"]),
        weights_effect=flags["weights_effect"] and flags["weights_effect"].value,
        **fix_fields(flags),
    )


def fix_fields(flags: Flags) -> dict[str, Any]:
    """What ``--fix`` and its companions mean; nothing for verbs that have none."""
    if "fix" not in flags:
        return {}
    from mismatch.fixes.plan import parse_requests

    asked = parse_requests(flags["fix"] or ())
    minutes = flags["budget_minutes"]
    if minutes is not None and minutes <= 0:
        raise MismatchError(f"--budget-minutes {minutes:g} is no time", "give minutes above 0")
    if flags["verdict"].value == "after-fixes" and not asked:
        raise MismatchError("--verdict after-fixes without fixes", "name some: --fix all")
    return {"fixes": asked, "budget_minutes": minutes, "verdict": flags["verdict"].value}


def positive(flags: Flags, name: str) -> int:
    """A flag that counts tokens, at least 1."""
    value = int(flags[name])
    if value < 1:
        raise MismatchError(
            f"--{name.replace('_', '-')} {value} is no length", "give a number of tokens, 1 or more"
        )
    return value


def verl_model(flags: Flags) -> str | None:
    """The model that ``--verl-config`` names, if there is one."""
    if flags["verl_config"] is None:
        return None
    from mismatch.presets.verl_config import read_verl_config

    return read_verl_config(flags["verl_config"], flags["verl_override"] or ()).model()


def require_model(flags: Flags) -> str:
    """The model's name; MismatchError without one."""
    if not flags["model"]:
        raise MismatchError("no model given: --model is missing", NO_MODEL)
    return str(flags["model"])


def rollout_spec(flags: Flags, model: str) -> RolloutSpec:
    """The engine's side; ``model`` is resolved already."""
    from mismatch.specs import EngineSpec, PromptSpec, RolloutSpec
    from mismatch.types import Sampling

    if flags["vllm_python"] and flags["engine"] != "vllm":
        raise MismatchError(
            f"--vllm-python given with --engine {flags['engine']}", "drop one of the two"
        )
    engine = EngineSpec(
        engine=flags["engine"],
        model=model,
        dtype=flags["dtype"].value,
        args=tuple(_engine_arg(text) for text in flags["engine_arg"] or ()),
        python=flags["vllm_python"],
        weights=flags["rollout_weights"].value,
        **flags.pick("tensor_parallel_size max_model_len gpu_memory_utilization prefill"),
        **flags.pick("revision trust_remote_code routing"),
    )
    if flags["prompts"] and flags["dataset"]:
        raise MismatchError("--prompts and --dataset both name the prompts", "drop one of the two")
    default_prompts = 64 if flags["prompts"] is None else 10**9  # a file: all of it
    prompts = PromptSpec(
        path=flags["prompts"],
        num_prompts=default_prompts if flags["num_prompts"] is None else flags["num_prompts"],
        seed=flags["seed"],
        **flags.pick("dataset dataset_config dataset_split prompt_column answer_column"),
    )
    law = flags.pick("temperature top_p top_k max_tokens samples_per_prompt seed")
    exact = flags.pick("exact_kl exact_kl_top_k")
    return RolloutSpec(engine=engine, prompts=prompts, sampling=Sampling(**law), **exact)


def train_spec(flags: Flags, model: str) -> TrainSpec:
    """The trainer's side; ``model`` is resolved already."""
    from mismatch.specs import TrainSpec

    return TrainSpec(
        model=model,
        dtype=flags["train_dtype"].value,
        master_dtype=flags["master_dtype"].value,
        autocast=flags["autocast"] and flags["autocast"].value,
        head_dtype=flags["head_dtype"] and flags["head_dtype"].value,
        experts=flags["experts_implementation"],
        layout=flags["layout"].value,
        weights=flags["train_weights"].value,
        router_dtype=flags["router_dtype"] and flags["router_dtype"].value,
        temperature_in=flags["temperature_in"].value,
        logprobs_dtype=flags["logprobs_dtype"] and flags["logprobs_dtype"].value,
        replay_routing=flags["replay_routing"] and flags["replay_routing"].value,
        **flags.pick("attention micro_batch_tokens"),
        **flags.pick("revision trust_remote_code routing"),
    )


def ranks(flags: Flags) -> int:
    """``--nproc-per-node``, or the GPUs, or 2."""
    from mismatch.stages import local_gpus

    given: int | None = flags["nproc_per_node"]
    return (local_gpus() or 2) if given is None else given


def _engine_arg(text: str) -> tuple[str, Any]:
    """``key=value`` with the value read as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise MismatchError(f"--engine-arg {text!r} is not key=value", "--engine-arg seed=1")
    try:
        return key.strip().replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return key.strip().replace("-", "_"), value
