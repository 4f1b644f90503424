"""The feature's flags: a framework's settings, its configuration file, its sampling."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from mismatch.cli.configuration import Configuration, Configured
from mismatch.cli.flags import Flags, Option, switch
from mismatch.errors import MismatchError
from mismatch.features.presets import other, trl, verl
from mismatch.features.presets.apply import MEGATRON, Followed
from mismatch.features.presets.config_file import ConfigFile
from mismatch.features.presets.rules import NAMES
from mismatch.specs import TRAIN, CheckSpec, Sampling

Framework = Literal["verl", "trl", "skyrl", "openrlhf", "slime", "nemo-rl", "prime-rl"]
FRAMEWORK = Option(
    "framework",
    Framework | None,
    TRAIN,
    "Your RL framework: how it samples, and as the trainer its code (verl, trl) or settings.",
)
OWN_LOOP = switch(
    "own_loop", TRAIN, "Give mismatch's own FSDP2 loop the framework's settings, not its code."
)
FLAGS = (
    Option(
        "framework_config",
        Path | None,
        TRAIN,
        "Your run's configuration, for both sides: YAML, TOML, GRPOConfig or the script.",
    ),
    Option(
        "framework_override",
        list[str] | None,
        TRAIN,
        "key=value over that file, as verl takes it; repeatable.",
        rare=True,
    ),
)
OWN_CODE = ("verl", "trl")  # --scorer has adapters that run it
FOLLOW = {"verl": verl.follow_verl, "trl": trl.follow_trl}
MODELS = {"verl": verl.MODEL, "trl": trl.MODEL}  # keys


def config_of(flags: Flags) -> tuple[str, ConfigFile] | None:
    """Return the framework whose configuration the flags name, and that file."""
    path, overrides = flags.get("framework_config"), flags.get("framework_override") or ()
    if path is None:
        if overrides:
            fault = "--framework-override without --framework-config does nothing"
            raise MismatchError(fault, "add --framework-config FILE")
        return None
    return other.read_framework_config(path, flags["framework"] or "", overrides)


def model(flags: Flags) -> str | None:
    """Return the model that a framework's file names."""
    found = config_of(flags)
    if found is None:
        return None
    name, source = found
    return source.model(MODELS[name]) if name in MODELS else other.model_of(name, source)


def apply(spec: CheckSpec, flags: Flags) -> Configured:
    """Fill in what a framework's code, settings and sampling are; flags of the user win.

    Raises:
        MismatchError: --own-loop without a framework, or a file that cannot be read.
    """
    found = config_of(flags)
    name = found[0] if found else flags.get("framework")
    if not name:
        flags.refuse(["own_loop"], "takes a framework's settings", "name it: --framework verl")
        return spec, ()
    if name in OWN_CODE and not flags["own_loop"] and "scorer" not in flags.explicit:
        spec = replace(spec, train=replace(spec.train, scorer=name))
    if found is None:
        return by_name(name, spec, flags)
    source = found[1]
    if spec.rollout.engine.servers:
        fault = "--framework-config describes an engine that mismatch starts, not --server"
        raise MismatchError(fault, "drop --server, or name the framework alone: --framework NAME")
    follow = FOLLOW.get(name) or partial(other.follow_other, name)
    followed = follow(source, spec, flags.explicit)
    spec = followed.spec
    if spec.train.scorer in (name, MEGATRON) and spec.train.scorer_config is None:
        # The framework's code reads the same file.
        overrides = tuple(flags.get("framework_override") or ())
        train = replace(spec.train, scorer_config=source.origin, scorer_overrides=overrides)
        spec = replace(spec, train=train)
    return spec, followed.notes()


def by_name(name: str, spec: CheckSpec, flags: Flags) -> Configured:
    """Return the check with a framework's sampling, and the settings of its trainer."""
    notes: tuple[str, ...] = ()
    if "framework_config" in flags:  # of both sides
        spec, notes = sample_as(name, spec, flags.explicit)
    if spec.train.scorer == name:
        return spec, notes
    followed = Followed(spec, flags.explicit)
    preset = next((each for each in NAMES if each == name), None)
    if preset is None:
        why = f"{name}'s trainer: its settings are in your file, --framework-config FILE"
        followed.not_reproduced.append(why)
        followed.tell_gaps()
    else:
        followed.preset(preset)
    return followed.spec, (*followed.notes(), *notes)


def sample_as(name: str, spec: CheckSpec, explicit: Collection[str]) -> Configured:
    """Return the check with a framework's sampling where the user's flags leave it open.

    All frameworks here sample at temperature 1 from all tokens unless their user says otherwise.
    What they leave to the engine comes from the checkpoint.
    """
    from mismatch.models.sampling_defaults import LEFT_OPEN, NEUTRAL, stated  # it imports numpy

    engine, left_open = spec.rollout.engine, LEFT_OPEN.get(name, ())
    found = stated(engine.model, engine.revision).items()
    taken = {key: value for key, value in found if key in left_open}
    unset = (field for field in NEUTRAL if field not in explicit)
    values = {field: taken.get(field, getattr(Sampling(), field)) for field in unset}
    rollout = replace(spec.rollout, sampling=replace(spec.rollout.sampling, **values))
    note = ", ".join(f"{field} {value:g}" for field, value in values.items())
    return replace(spec, rollout=rollout), (f"sampling as {name}: {note}",)


CONFIGURATION = Configuration(
    trainer_flags=(FRAMEWORK, OWN_LOOP), flags=FLAGS, model=model, apply=apply
)
