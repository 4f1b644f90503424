"""Flags to specs."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast, get_args

from mismatch.cli.configuration import configured_model
from mismatch.cli.flags import AUTO, DTYPE_NAMES, Flags, flag_of, flags_of, spec_values
from mismatch.cli.options import FEATURE_FLAGS, SERVER_FLAGS
from mismatch.engines.registry import startable_engines
from mismatch.engines.servers.address import parse_address
from mismatch.errors import MismatchError, did_you_mean
from mismatch.experiments.fixes.planning import parse_requests
from mismatch.models import resolve_model
from mismatch.models.adapters import find_adapter
from mismatch.models.config import ModelConfig, find_config
from mismatch.models.moe import parse_injections
from mismatch.prompts.tasks import find_task
from mismatch.run.machine import local_gpus
from mismatch.run.provenance import require_no_secret
from mismatch.specs import (
    AS_STORED,
    MANY,
    CheckSpec,
    EngineSpec,
    PromptSpec,
    RolloutSpec,
    Sampling,
    TrainSpec,
    WeightsForm,
)

NO_MODEL = "name one: --model tiny-gpt-oss, a hub id (org/name) or a directory"
# Where servers are, and not what is run: a resumed run may go on elsewhere.
SERVER_NAMES = frozenset(option.name for option in SERVER_FLAGS)
# What only an engine that mismatch starts can be told.
OURS = (
    *("max_model_len", "engine_arg", "tensor_parallel_size", "layers", "adapter", "adapter_as"),
    "gpu_memory_utilization",
)
# Flags that do nothing without another flag, or one of several.
COMPANIONS = dict.fromkeys(
    ("dataset_config", "dataset_split", "prompt_column", "answer_column"), "dataset"
) | {"budget_minutes": "fix explain", "adapter_as": "adapter", "exact_kl_top_k": "exact_kl"}


def check_spec(flags: Flags) -> CheckSpec:
    """Return the spec that the flags of `check` mean."""
    model = resolve_model(flags["model"] or configured_model(flags) or require_model(flags))
    train_model = resolve_model(flags["train_model"]) if flags["train_model"] else model
    return CheckSpec(
        rollout=rollout_spec(flags, model),
        train=train_spec(flags, train_model),
        seed=flags["seed"],
        **training_fields(flags),
        **fix_fields(flags),
        extras=extras(flags),
        **spec_values(CheckSpec, flags, "overlap context_length"),
    )


def extras(flags: Flags, stored: tuple[tuple[str, Any], ...] = ()) -> tuple[tuple[str, Any], ...]:
    """Return the flags of features that were set here, or are stored and were not set again."""
    defaults = {option.name: option.default for option in FEATURE_FLAGS}
    values = dict(stored) | {name: flags[name] for name in defaults.keys() & flags.explicit}
    return tuple(
        (name, value) for name, value in sorted(values.items()) if value != defaults.get(name)
    )


def training_fields(flags: Flags) -> dict[str, Any]:
    """Return what a check's spec says of the training side, apart from its trainer."""
    ranks = flags["nproc_per_node"]
    if ranks is None and flags.get("gpus"):
        from mismatch.doctor.machine import parse_kind

        ranks, _ = parse_kind(flags["gpus"])
    return {
        "nproc_per_node": (local_gpus() or 2) if ranks is None else ranks,
        "inject": parse_injections(flags["inject"]),
        "weights_effect": weight_forms(flags).get("effect"),
        "quick": flags["depth"] == "quick",
        **spec_values(CheckSpec, flags, "noise_floor two_passes"),
        **({"two_passes": True} if flags["depth"] == "full" else {}),
    }


def fix_fields(flags: Flags, stored: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what ``--fix`` and its companions mean; nothing for commands that have none.

    Args:
        stored: fixes that a run has already, where ``--fix`` names none.
    """
    if "fix" not in flags:
        return {}
    fixes = parse_requests(flags["fix"] or ()) or stored
    if "fix" in flags.explicit and flags["fix"] and not fixes:
        raise MismatchError("--fix names no fix", "mismatch fixes lists them; --fix all")
    if flags["verdict"] == "after-fixes" and not fixes:
        raise MismatchError("--verdict after-fixes without fixes", "name some: --fix all")
    return {"fixes": fixes, **spec_values(CheckSpec, flags, "fixes budget_minutes verdict explain")}


def require_model(flags: Flags) -> str:
    """Return the model's name; MismatchError without one."""
    if not flags["model"]:
        raise MismatchError("no model given: --model is missing", NO_MODEL)
    return str(flags["model"])


def rollout_spec(flags: Flags, model: str) -> RolloutSpec:
    """Return the engine's side; ``model`` is resolved already."""
    for name, needed in COMPANIONS.items():
        if name in flags.explicit and not any(flags.get(other) for other in needed.split()):
            others = " or ".join(map(flag_of, needed.split()))
            raise MismatchError(f"{flag_of(name)} without {others} does nothing", f"add {others}")
    named = flags_of(PromptSpec, "task path dataset")
    sources = [option.flag for option in named if flags[option.name] != option.default]
    if len(sources) > 1:
        both = " and ".join(sources)
        raise MismatchError(f"{both} both name the prompts", "drop one of the two")
    count = flags["num_prompts"]
    if count is None:
        count = PromptSpec().num_prompts if flags["prompts"] is None else MANY  # all of a file
    prompts = PromptSpec(num_prompts=count, **spec_values(PromptSpec, flags))
    partner = find_task(prompts.task).environment
    if partner and not prompts.environment:
        prompts = replace(prompts, environment=partner)
    return RolloutSpec(
        engine=engine_spec(flags, model, engine_name(flags), flags["engine_arg"]),
        prompts=prompts,
        sampling=Sampling(seed=flags["seed"], **spec_values(Sampling, flags)),
        **spec_values(RolloutSpec, flags),
    )


def engine_name(flags: Flags) -> str:
    """Return the engine that the flags name."""
    return "server" if flags.get("server") else str(flags["engine"])


def sides_of(flags: Flags, name: str, sides: Collection[str], example: str) -> dict[str, str]:
    """Return the values of a repeatable flag ``[SIDE=]VALUE`` by side; "": for every side.

    Raises:
        MismatchError: an unknown side, or one that is named twice.
    """
    values: dict[str, str] = {}
    for text in flags.get(name) or ():
        side, equals, value = text.partition("=")
        if not equals or not side.isidentifier():
            side, value = "", text
        elif side not in sides or not value:
            guess = did_you_mean(side, sides, 1)
            fault = f"{flag_of(name)} {text}: {side} is none of {', '.join(sides)}"
            raise MismatchError(fault, f"{guess}{flag_of(name)} {example}")
        if side in values:
            fault = f"{flag_of(name)} {side or 'for both sides'} is given twice"
            raise MismatchError(fault, "drop one of the two")
        values[side] = value
    return values


def interpreters(flags: Flags) -> dict[str, str]:
    """Return the interpreters of ``--python`` by what they are for; "": for both sides."""
    sides = ("engine", "train", *startable_engines())
    given = sides_of(flags, "python", sides, "engine=ENV/bin/python")
    return {side: os.path.expanduser(path) for side, path in given.items()}  # no shell did, after =


def weight_forms(flags: Flags) -> dict[str, WeightsForm]:
    """Return the forms of ``--weights`` by side: engine, train, or effect (of the trainer's).

    Raises:
        MismatchError: no side, or a form that does not exist.
    """
    forms = sides_of(flags, "weights", ("engine", "train", "effect"), "engine=fp8-rounded")
    for side, form in forms.items():
        if not side or form not in get_args(WeightsForm):
            fault = f"--weights {side}={form}" if side else f"--weights {form}: of which side?"
            guess = did_you_mean(form, get_args(WeightsForm), 1) if side else ""
            known = f"engine=, train= or effect= one of {', '.join(get_args(WeightsForm))}"
            raise MismatchError(fault, f"{guess}{known}")
    return cast("dict[str, WeightsForm]", forms)


def refuse_sides(flags: Flags, sides: Collection[str], why: str) -> None:
    """Refuse ``--python SIDE=`` and ``--weights SIDE=`` of sides that a command does not run.

    Raises:
        MismatchError: one of them is given.
    """
    for name, given in (("python", interpreters(flags)), ("weights", weight_forms(flags))):
        if others := sorted(given.keys() & {*sides}):
            raise MismatchError(f"--{name} {others[0]}= {why}", "drop it")


def engine_spec(flags: Flags, model: str, name: str, arguments: list[str] | None) -> EngineSpec:
    """Return the engine that the flags describe.

    Raises:
        MismatchError: the interpreter of another engine is given.
    """
    pythons = interpreters(flags)
    others = sorted(pythons.keys() & {*startable_engines()} - {name})
    if others:
        fault = f"--python {others[0]}=… given with --engine {name}"
        raise MismatchError(fault, "drop one of the two")
    python = pythons.get(name) or pythons.get("engine") or pythons.get("")
    if python is None and flags.get("server") and find_spec("transformers") is None:
        python = pythons.get("train")  # it can tell which layers have experts
    values = spec_values(EngineSpec, flags, auto=lambda: checkpoint_dtype(model, flags["revision"]))
    return EngineSpec(
        **values
        | {
            "engine": name,
            "model": model,
            "args": tuple(_engine_arg(text) for text in arguments or ()),
            "python": python,
            "weights": weight_forms(flags).get("engine", AS_STORED),
            "servers": server_addresses(flags),
            "adapter": find_adapter(flags["adapter"]) if flags.get("adapter") else None,
        }
    )


def server_addresses(flags: Flags) -> tuple[str, ...]:
    """Return the addresses of ``--server``; none without it.

    Raises:
        MismatchError: an address that is none or holds a secret, flags of an engine that mismatch
            starts, or companions without ``--server``.
    """
    if not flags.get("server"):
        flags.refuse(sorted(SERVER_NAMES), "without --server", "--server http://127.0.0.1:8000")
        return ()
    flags.refuse(["engine"], "and --server: a server is asked what it is", "drop --engine")
    why = "is for an engine that mismatch starts, servers keep their settings"
    flags.refuse(OURS, why, "drop it, or --server")
    refuse_sides(flags, ("engine", *startable_engines()), why)
    return tuple(parse_address(text) for text in flags["server"])


def moved(engine: EngineSpec, flags: Flags) -> EngineSpec:
    """Return a stored engine's spec with the servers that a resumed command names.

    Raises:
        MismatchError: the run was not made with servers.
    """
    if not engine.servers:
        fault = f"the run was made with the engine {engine.engine}, not with servers"
        raise MismatchError(fault, "drop --server")
    explicit = {name: flags[name] for name in SERVER_NAMES & flags.explicit}
    servers = server_addresses(flags) if flags["server"] else engine.servers
    return replace(engine, servers=servers, **spec_values(EngineSpec, explicit))


def train_spec(flags: Flags, model: str) -> TrainSpec:
    """Return the trainer's side; ``model`` is resolved already."""
    shared = flags.pick("revision trust_remote_code routing")
    values = spec_values(TrainSpec, flags, auto=lambda: checkpoint_dtype(model, flags["revision"]))
    pythons = interpreters(flags)
    values["python"] = pythons.get("train") or pythons.get("")
    values["weights"] = weight_forms(flags).get("train", AS_STORED)
    given = flags.get("train_adapter") or flags.get("adapter")
    adapter = find_adapter(given) if given else None
    return TrainSpec(model=model, layers=flags.get("layers"), adapter=adapter, **shared, **values)


def checkpoint_dtype(model: str, revision: str | None) -> str:
    """Return what ``auto`` means: the dtype that the checkpoint's config.json names.

    Raises:
        MismatchError: the config is not on this machine, or names none that can be run.
    """
    config = ModelConfig.of(find_config(model, revision).values)
    # Of a quantised checkpoint that names none: that of what is not quantised.
    name = config.dtype or ("bfloat16" if config.quantised else "")
    dtype = DTYPE_NAMES.get(name.removeprefix("torch."))
    if dtype in (None, AUTO):
        fault = f"auto: the config.json of {model} names {name or 'no dtype'}"
        raise MismatchError(fault, "name one: bf16, fp16, fp32")
    return str(dtype)


def _engine_arg(text: str) -> tuple[str, Any]:
    """``key=value`` with the value read as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise MismatchError(f"--engine-arg {text!r} is not key=value", "--engine-arg seed=1")
    name = key.strip().replace("-", "_")
    require_no_secret("--engine-arg", name, value)
    try:
        return name, json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return name, value
