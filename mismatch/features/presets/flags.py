"""The feature's flags: a framework's settings, its configuration file, its sampling."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from mismatch.cli.configuration import Configuration, Configured
from mismatch.cli.flags import Flags, Option, flag_of
from mismatch.errors import MismatchError
from mismatch.features.presets import other, trl, verl
from mismatch.features.presets.apply import MEGATRON, Followed
from mismatch.features.presets.config_file import ConfigFile
from mismatch.features.presets.rules import Name
from mismatch.specs import PROMPTS, TRAIN, CheckSpec, Sampling

Framework = Literal["verl", "trl", "skyrl", "openrlhf", "slime", "nemo-rl", "prime-rl"]
FLAGS = (
    Option("verl_config", Path | None, TRAIN, "Your verl run's YAML, for both sides."),
    Option("verl_override", list[str] | None, TRAIN, "key=value as verl takes it; repeatable."),
    Option("trl_config", Path | None, TRAIN, "Your GRPOConfig as YAML or JSON, for both sides."),
    Option(
        "framework_config",
        str | None,
        TRAIN,
        "[NAME:]FILE of SkyRL, NeMo-RL, prime-rl, slime or OpenRLHF, for both sides.",
    ),
    Option("sample_as", Framework | None, PROMPTS, "Sample with a framework's defaults."),
)
DESCRIBE = ("trainer", "verl_config", "trl_config", "framework_config")  # the trainer
SAMPLE = ("verl_config", "trl_config", "framework_config", "sample_as")  # the sampling
FOLLOW = {"verl": verl.follow_verl, "trl": trl.follow_trl}
MODELS = {"verl": verl.MODEL, "trl": trl.MODEL}  # keys


def config_of(flags: Flags) -> tuple[str, ConfigFile] | None:
    """Return the framework whose configuration the flags name, and that file."""
    verl_path, trl_path = flags.get("verl_config"), flags.get("trl_config")
    if flags.get("framework_config"):
        name, path, source = other.read_framework_config(flags["framework_config"])
        if source is not None:
            return name, source
        verl_path, trl_path = (path, None) if name == "verl" else (None, path)
    if verl_path:
        return "verl", verl.read_verl_config(verl_path, flags["verl_override"] or ())
    return ("trl", trl.read_trl_config(trl_path)) if trl_path else None


def model(flags: Flags) -> str | None:
    """Return the model that a framework's file names."""
    found = config_of(flags)
    if found is None:
        return None
    name, source = found
    return source.model(MODELS[name]) if name in MODELS else other.model_of(name, source)


def apply(spec: CheckSpec, flags: Flags) -> Configured:
    """Fill in what a framework's settings, file or sampling say; flags of the user win.

    Raises:
        MismatchError: two of them at once, or a file that cannot be read.
    """
    for names, what in ((DESCRIBE, "trainer"), (SAMPLE, "sampling")):
        both = [flag_of(name) for name in names if flags.get(name)]
        if len(both) > 1:
            raise MismatchError(f"{' and '.join(both)} both describe the {what}", f"drop {both[0]}")
    notes: tuple[str, ...] = ()
    if flags.get("sample_as"):
        spec, notes = sample_as(flags["sample_as"], spec, flags.explicit)
    files = flags.get("verl_config") or flags.get("framework_config")
    if flags.get("verl_override") and not files:
        raise MismatchError("--verl-override without --verl-config", "add --verl-config FILE")
    if flags.get("trainer"):
        followed = Followed(spec, flags.explicit)
        followed.preset(flags["trainer"])
        return followed.spec, (*followed.notes(), *notes)
    found = config_of(flags)
    if found is None:
        return spec, notes
    name, source = found
    if spec.rollout.engine.servers:
        flag = next(flag_of(each) for each in SAMPLE if flags.get(each))
        fault = f"{flag} describes an engine that mismatch starts, not --server"
        fix = f"drop {flag}, or --server; --trainer describes the trainer alone"
        raise MismatchError(fault, fix)
    follow = FOLLOW.get(name) or partial(other.follow_other, name)
    followed = follow(source, spec, flags.explicit)
    spec = followed.spec
    if spec.train.scorer in (name, MEGATRON) and spec.train.scorer_config is None:
        # The framework's code reads the same file.
        overrides = tuple(flags.get("verl_override") or ())
        train = replace(spec.train, scorer_config=source.origin, scorer_overrides=overrides)
        spec = replace(spec, train=train)
    return spec, followed.notes()


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


TRAINER = Option("trainer", Name | None, TRAIN, "Give mismatch's own loop a framework's settings.")
CONFIGURATION = Configuration(trainer_flags=(TRAINER,), flags=FLAGS, model=model, apply=apply)
