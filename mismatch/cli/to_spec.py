"""Flags to specs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mismatch.cli.flags import AUTO, DTYPE_NAMES, Flags, spec_values
from mismatch.errors import MismatchError

if TYPE_CHECKING:
    from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec

NO_MODEL = "name one: --model tiny-gpt-oss, a hub id (org/name) or a directory"
FIX_FIELDS = "fixes budget_minutes verdict"
GRADIENT_FIELDS = "gradients gradient_prompts"
ALL_OF_A_FILE = 10**9  # prompts


def check_spec(flags: Flags) -> CheckSpec:
    """The spec that the flags of `check` mean."""
    from mismatch.models import resolve_model
    from mismatch.specs import CheckSpec

    model = resolve_model(flags["model"] or verl_model(flags) or require_model(flags))
    train_model = resolve_model(flags["train_model"]) if flags["train_model"] else model
    return CheckSpec(
        rollout=rollout_spec(flags, model),
        train=train_spec(flags, train_model),
        seed=flags["seed"],
        other_engine=other_engine(flags, model),
        **training_fields(flags),
        **fix_fields(flags),
        **spec_values(CheckSpec, flags, f"forecast_length {GRADIENT_FIELDS}"),
    )


def training_fields(flags: Flags) -> dict[str, Any]:
    """What a check's spec says of the training side, beside its trainer."""
    from mismatch.models.injections import parse_injections
    from mismatch.run.machine import local_gpus
    from mismatch.specs import CheckSpec

    ranks = flags["nproc_per_node"]
    return {
        "nproc_per_node": (local_gpus() or 2) if ranks is None else ranks,
        "inject": parse_injections(flags["inject"]),
        **spec_values(CheckSpec, flags, "noise_floor two_passes weights_effect"),
    }


def fix_fields(flags: Flags, stored: tuple[str, ...] = ()) -> dict[str, Any]:
    """What ``--fix`` and its companions mean; nothing for commands that have none.

    Args:
        stored: fixes that a run has already, where ``--fix`` names none.
    """
    if "fix" not in flags:
        return {}
    from mismatch.experiments.fixes.planning import parse_requests
    from mismatch.specs import CheckSpec

    fixes = parse_requests(flags["fix"] or ()) or stored
    if flags["verdict"] == "after-fixes" and not fixes:
        raise MismatchError("--verdict after-fixes without fixes", "name some: --fix all")
    return {"fixes": fixes, **spec_values(CheckSpec, flags, FIX_FIELDS)}


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
    from mismatch.specs import PromptSpec, RolloutSpec, Sampling

    names = engine_names(flags)
    for engine_name in ("vllm", "sglang"):
        if flags[f"{engine_name}_python"] and engine_name not in names:
            raise MismatchError(
                f"--{engine_name}-python given with --engine {names[0]}", "drop one of the two"
            )
    if flags["prompts"] and flags["dataset"]:
        raise MismatchError("--prompts and --dataset both name the prompts", "drop one of the two")
    count = flags["num_prompts"]
    if count is None:
        count = PromptSpec().num_prompts if flags["prompts"] is None else ALL_OF_A_FILE
    return RolloutSpec(
        engine=engine_spec(flags, model, names[0], flags["engine_arg"]),
        prompts=PromptSpec(num_prompts=count, **spec_values(PromptSpec, flags)),
        sampling=Sampling(seed=flags["seed"], **spec_values(Sampling, flags)),
        **spec_values(RolloutSpec, flags),
    )


def engine_names(flags: Flags) -> list[str]:
    """The engines of the flags, one or two.

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
    from mismatch.cli.servers import server_addresses
    from mismatch.specs import EngineSpec

    return EngineSpec(
        engine=name,
        model=model,
        args=tuple(_engine_arg(text) for text in arguments or ()),
        python=flags.get(f"{name}_python"),
        servers=server_addresses(flags),
        **spec_values(EngineSpec, flags, auto=lambda: checkpoint_dtype(model, flags["revision"])),
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

    shared = flags.pick("revision trust_remote_code routing")
    values = spec_values(TrainSpec, flags, auto=lambda: checkpoint_dtype(model, flags["revision"]))
    return TrainSpec(model=model, **shared, **values)


def checkpoint_dtype(model: str, revision: str | None) -> str:
    """What ``auto`` means: the dtype that the checkpoint's config.json names.

    Raises:
        MismatchError: the config is not on this machine, or names none that can be run.
    """
    from mismatch.models.config import ModelConfig, find_config

    config = ModelConfig.of(find_config(model, revision).values)
    # Of a quantised checkpoint that names none: that of what is not quantised.
    name = config.dtype or ("bfloat16" if config.quantised else "")
    dtype = DTYPE_NAMES.get(name.removeprefix("torch."))
    if dtype in (None, AUTO):
        raise MismatchError(
            f"auto: the config.json of {model} names {name or 'no dtype'}",
            "name one: bf16, fp16, fp32",
        )
    return str(dtype)


def _engine_arg(text: str) -> tuple[str, Any]:
    """``key=value`` with the value read as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise MismatchError(f"--engine-arg {text!r} is not key=value", "--engine-arg seed=1")
    try:
        return key.strip().replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return key.strip().replace("-", "_"), value
