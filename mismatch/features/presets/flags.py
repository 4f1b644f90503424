"""The feature's flags: a framework's settings, its configuration file, its sampling."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mismatch.cli.configuration import Configuration, Configured
from mismatch.cli.flags import Flags, Option
from mismatch.errors import MismatchError
from mismatch.features.presets.frameworks import NAMES, get_preset, installed_kernels
from mismatch.features.presets.trl import MODEL as TRL_MODEL
from mismatch.features.presets.trl import follow_trl, read_trl_config
from mismatch.features.presets.verl import MODEL as VERL_MODEL
from mismatch.features.presets.verl import follow_verl, read_verl_config
from mismatch.specs import PROMPTS, TRAIN, CheckSpec, Sampling

Name = Literal["verl", "trl", "skyrl", "openrlhf", "slime", "nemo-rl", "prime-rl"]
TRAINER = Option(
    "trainer",
    str | None,
    TRAIN,
    f"Give mismatch's own loop a framework's settings: {', '.join(NAMES)}.",
)
VERL_OVERRIDE_HELP = "key=value, as on verl's command line; repeatable."
FLAGS = (
    Option("verl_config", Path | None, TRAIN, "Your verl run's YAML, for both sides."),
    Option("verl_override", list[str] | None, TRAIN, VERL_OVERRIDE_HELP),
    Option("trl_config", Path | None, TRAIN, "Your GRPOConfig as YAML or JSON, for both sides."),
    Option(
        "sample_as",
        Name | None,
        PROMPTS,
        "Sample with a framework's defaults; name what it leaves to generation_config.json.",
    ),
)
DESCRIBE = ("trainer", "verl_config", "trl_config")  # the trainer
SAMPLE = ("verl_config", "trl_config", "sample_as")  # the sampling


def model(flags: Flags) -> str | None:
    """Return the model that a framework's file names."""
    if flags.get("verl_config"):
        source = read_verl_config(flags["verl_config"], flags["verl_override"] or ())
        return source.model(VERL_MODEL)
    if flags.get("trl_config"):
        return read_trl_config(flags["trl_config"]).model(TRL_MODEL)
    return None


def apply(spec: CheckSpec, flags: Flags) -> Configured:
    """Fill in what a framework's settings, file and sampling say; flags of the user win.

    Raises:
        MismatchError: two of them at once, an unknown preset, or a file that cannot be read.
    """
    for names, what in ((DESCRIBE, "trainer"), (SAMPLE, "sampling")):
        both = [f"--{name.replace('_', '-')}" for name in names if flags.get(name)]
        if len(both) > 1:
            raise MismatchError(f"{' and '.join(both)} both describe the {what}", f"drop {both[0]}")
    if flags.get("verl_override") and not flags.get("verl_config"):
        fault = "--verl-override without --verl-config"
        raise MismatchError(fault, "name the file: --verl-config FILE")
    if flags.get("trainer"):
        result = from_preset(spec, flags)
    elif flags.get("verl_config") or flags.get("trl_config"):
        result = from_file(spec, flags)
    else:
        result = Configured(spec)
    if flags.get("sample_as"):
        sampled = sample_as(flags["sample_as"], result.spec, flags.explicit)
        result = Configured(sampled.spec, (*result.notes, *sampled.notes))
    return result


def from_preset(spec: CheckSpec, flags: Flags) -> Configured:
    """Return the check with ``--trainer NAME``."""
    preset = get_preset(flags["trainer"])
    applied = preset.resolve(spec.train, flags.explicit, installed_kernels())
    notes = (
        f"trainer: {preset.title}",
        *(f"  {item.field} = {item.value}: {item.what}" for item in applied.settings),
        *(f"  kept: {line}" for line in applied.kept),
    )
    missing = applied.not_reproduced
    spec = replace(spec, train=applied.train, preset=preset.title, not_reproduced=missing)
    return Configured(spec, notes)


def from_file(spec: CheckSpec, flags: Flags) -> Configured:
    """Return the check that ``--verl-config`` or ``--trl-config`` describes."""
    from mismatch.engines.vllm.arguments import is_cpu_build

    name = "trl" if flags.get("trl_config") else "verl"
    if spec.rollout.engine.servers:
        raise MismatchError(
            f"--{name}-config describes an engine that mismatch starts, servers keep their "
            "settings",
            f"drop --{name}-config, or --server; --trainer describes the trainer alone",
        )
    file, overrides = flags[f"{name}_config"], tuple(flags.get("verl_override") or ())
    own = flags.explicit, installed_kernels(), is_cpu_build()
    if name == "trl":
        followed = follow_trl(read_trl_config(file), spec, *own)
    else:
        followed = follow_verl(read_verl_config(file, overrides), spec, *own)
    train = followed.spec.train
    if (
        train.scorer == name and train.scorer_config is None
    ):  # the framework's code reads the same file
        train = replace(train, scorer_config=str(file), scorer_overrides=overrides)
    return Configured(replace(followed.spec, train=train), followed.notes())


def sample_as(name: str, spec: CheckSpec, explicit: Collection[str]) -> Configured:
    """Return the check with a framework's sampling where the user's own flags leave it open.

    All frameworks here sample at temperature 1 from the whole vocabulary unless their user says
    otherwise. They differ in what they leave to the engine, which takes it from the checkpoint.
    """
    from mismatch.models.sampling_defaults import FILE, LEFT_OPEN, stated  # numpy: not for a help

    engine = spec.rollout.engine
    taken = {
        key: value
        for key, value in stated(engine.model, engine.revision).items()
        if key in LEFT_OPEN.get(name, ())
    }
    fields = ("temperature", "top_p", "top_k", "min_p")
    plain = Sampling()
    values: dict[str, Any] = {
        field: taken.pop(field, getattr(plain, field)) for field in fields if field not in explicit
    }
    missing = tuple(
        f"{name}: {key} is left to the engine, which takes {value:g} from {FILE}; "
        "here it is not applied"
        for key, value in taken.items()
    )
    sampling = replace(spec.rollout.sampling, **values)
    rollout = replace(spec.rollout, sampling=sampling)
    spec = replace(spec, rollout=rollout, not_reproduced=(*spec.not_reproduced, *missing))
    note = ", ".join(f"{field} {value:g}" for field, value in values.items())
    return Configured(spec, (f"sampling as {name}: {note}", *(f"  {text}" for text in missing)))


CONFIGURATION = Configuration(trainer_flags=(TRAINER,), flags=FLAGS, model=model, apply=apply)
