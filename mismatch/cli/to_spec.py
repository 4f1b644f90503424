"""Flags to specs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mismatch.cli.flags import Flags
from mismatch.errors import MismatchError

if TYPE_CHECKING:
    from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec

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
        other_engine=other_engine(flags, model),
        **fix_fields(flags),
        **gradient_fields(flags),
    )


def fix_fields(flags: Flags, known: tuple[str, ...] = ()) -> dict[str, Any]:
    """What ``--fix`` and its companions mean; nothing for verbs that have none.

    Args:
        known: fixes that a run has already, where ``--fix`` names none.
    """
    if "fix" not in flags:
        return {}
    from mismatch.experiments.fixes.planning import parse_requests

    asked = parse_requests(flags["fix"] or ()) or known
    minutes = flags["budget_minutes"]
    if minutes is not None and minutes <= 0:
        raise MismatchError(f"--budget-minutes {minutes:g} is no time", "give minutes above 0")
    if flags["verdict"].value == "after-fixes" and not asked:
        raise MismatchError("--verdict after-fixes without fixes", "name some: --fix all")
    return {"fixes": asked, "budget_minutes": minutes, "verdict": flags["verdict"].value}


def gradient_fields(flags: Flags) -> dict[str, Any]:
    """What ``--gradients`` means; nothing for verbs that do not have it."""
    if "gradients" not in flags:
        return {}
    prompts = int(flags["gradient_prompts"])
    if prompts < 1:
        raise MismatchError(f"--gradient-prompts {prompts} is no batch", "give 1 or more")
    return {"gradients": flags["gradients"], "gradient_prompts": prompts}


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
    from mismatch.specs import PromptSpec, RolloutSpec
    from mismatch.types import Sampling

    names = engine_names(flags)
    for engine_name in ("vllm", "sglang"):
        if flags[f"{engine_name}_python"] and engine_name not in names:
            raise MismatchError(
                f"--{engine_name}-python given with --engine {names[0]}", "drop one of the two"
            )
    engine = engine_spec(flags, model, names[0], flags["engine_arg"])
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


def engine_names(flags: Flags) -> list[str]:
    """The engines asked for, one or two.

    Raises:
        MismatchError: more, or the same twice.
    """
    if flags.get("server"):
        return ["server"]
    names = list(flags["engine"] or ["vllm"])
    if len(names) > 2:
        raise MismatchError(f"--engine given {len(names)} times", "give one engine, or two")
    if len(set(names)) < len(names):
        raise MismatchError(
            f"--engine {names[0]} given twice",
            "two versions of one engine: make two runs, then mismatch compare NEW --against OLD",
        )
    return names


def engine_spec(flags: Flags, model: str, name: str, arguments: list[str] | None) -> EngineSpec:
    """One engine; all but its own arguments and interpreter is common to both."""
    from mismatch.cli.servers import server_fields
    from mismatch.specs import EngineSpec

    return EngineSpec(
        engine=name,
        model=model,
        dtype=flags["dtype"].value,
        args=tuple(_engine_arg(text) for text in arguments or ()),
        python=flags.get(f"{name}_python"),
        weights=flags["rollout_weights"].value,
        **flags.pick("tensor_parallel_size max_model_len gpu_memory_utilization prefill"),
        **flags.pick("revision trust_remote_code routing"),
        **server_fields(flags),
    )


def other_engine(flags: Flags, model: str) -> EngineSpec | None:
    """The second ``--engine``, or None.

    Raises:
        MismatchError: flags that only make sense with two engines, or with one.
    """
    names, arguments = engine_names(flags), flags.get("other_engine_arg")
    if len(names) == 1:
        if arguments:
            raise MismatchError(
                "--other-engine-arg with one engine", "--engine-arg, or two --engine"
            )
        return None
    if flags["verl_config"] is not None:
        raise MismatchError("--verl-config describes one engine, not two", "give one --engine")
    if not flags["prefill"]:
        raise MismatchError(
            "two engines are compared by their prefill, which --no-prefill switches off",
            "drop --no-prefill",
        )
    return engine_spec(flags, model, names[1], arguments)


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
    from mismatch.run.machine import local_gpus

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
