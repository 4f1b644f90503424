"""The feature's flags: a framework's settings, its configuration file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mismatch.cli.configuration import Configuration, Configured
from mismatch.cli.flags import Flags, Option
from mismatch.errors import MismatchError
from mismatch.features.presets.apply import Followed
from mismatch.features.presets.rules import Name
from mismatch.features.presets.trl import MODEL as TRL_MODEL
from mismatch.features.presets.trl import follow_trl, read_trl_config
from mismatch.features.presets.verl import MODEL as VERL_MODEL
from mismatch.features.presets.verl import follow_verl, read_verl_config
from mismatch.specs import TRAIN, CheckSpec

VERL_OVERRIDE_HELP = "key=value, as on verl's command line; repeatable."
FLAGS = (
    Option("verl_config", Path | None, TRAIN, "Your verl run's YAML, for both sides."),
    Option("verl_override", list[str] | None, TRAIN, VERL_OVERRIDE_HELP),
    Option("trl_config", Path | None, TRAIN, "Your GRPOConfig as YAML or JSON, for both sides."),
)
DESCRIBE = ("trainer", "verl_config", "trl_config")


def model(flags: Flags) -> str | None:
    """Return the model that a framework's file names."""
    if flags.get("verl_config"):
        source = read_verl_config(flags["verl_config"], flags["verl_override"] or ())
        return source.model(VERL_MODEL)
    if flags.get("trl_config"):
        return read_trl_config(flags["trl_config"]).model(TRL_MODEL)
    return None


def apply(spec: CheckSpec, flags: Flags) -> Configured:
    """Fill in what a framework's settings or file say; flags of the user win.

    Raises:
        MismatchError: two of them at once, or a file that cannot be read.
    """
    both = [f"--{name.replace('_', '-')}" for name in DESCRIBE if flags.get(name)]
    if len(both) > 1:
        fault = f"{' and '.join(both)} both describe the trainer"
        raise MismatchError(fault, f"drop {both[0]}")
    if flags.get("verl_override") and not flags.get("verl_config"):
        fault = "--verl-override without --verl-config"
        raise MismatchError(fault, "name the file: --verl-config FILE")
    if flags.get("trainer"):
        followed = Followed(spec, flags.explicit)
        followed.preset(flags["trainer"])
        return Configured(followed.spec, followed.notes())
    if not both:
        return Configured(spec)
    name = "trl" if flags.get("trl_config") else "verl"
    if spec.rollout.engine.servers:
        raise MismatchError(
            f"--{name}-config describes an engine that mismatch starts, servers keep their "
            "settings",
            f"drop --{name}-config, or --server; --trainer describes the trainer alone",
        )
    file, overrides = flags[f"{name}_config"], tuple(flags.get("verl_override") or ())
    if name == "trl":
        followed = follow_trl(read_trl_config(file), spec, flags.explicit)
    else:
        followed = follow_verl(read_verl_config(file, overrides), spec, flags.explicit)
    spec = followed.spec
    if spec.train.scorer == name and spec.train.scorer_config is None:
        # The framework's code reads the same file.
        train = replace(spec.train, scorer_config=str(file), scorer_overrides=overrides)
        spec = replace(spec, train=train)
    return Configured(spec, followed.notes())


TRAINER = Option("trainer", Name | None, TRAIN, "Give mismatch's own loop a framework's settings.")
CONFIGURATION = Configuration(trainer_flags=(TRAINER,), flags=FLAGS, model=model, apply=apply)
