"""``--trainer`` and ``--verl-config``: a framework's settings where the user has set none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mismatch.cli.flags import Flags
from mismatch.errors import MismatchError

if TYPE_CHECKING:
    from mismatch.specs import CheckSpec


def with_trainer(spec: CheckSpec, flags: Flags) -> tuple[CheckSpec, list[str]]:
    """The check as the named framework would run it, and what the user should know about it.

    Explicit flags win over a preset or a config.

    Raises:
        MismatchError: unknown preset, both options at once, or a config that cannot be read.
    """
    config = flags.get("verl_config")
    if flags["trainer"] and config is not None:
        raise MismatchError(
            "--trainer and --verl-config both describe the trainer", "drop --trainer"
        )
    if config is not None:
        return _from_verl(spec, flags)
    if flags.get("verl_override"):
        raise MismatchError(
            "--verl-override without --verl-config", "name the file: --verl-config FILE"
        )
    if flags["trainer"]:
        return _from_preset(spec, flags)
    return spec, []


def _from_preset(spec: CheckSpec, flags: Flags) -> tuple[CheckSpec, list[str]]:
    from mismatch.presets import get_preset, installed_kernels

    preset = get_preset(flags["trainer"])
    applied = preset.resolve(spec.train, flags.explicit, installed_kernels())
    notes = [f"trainer: {preset.title}"]
    notes += [f"  {item.field} = {item.value}: {item.what}" for item in applied.settings]
    notes += [f"  kept: {line}" for line in applied.kept]
    missing = applied.not_reproduced
    spec = replace(spec, train=applied.train, preset=preset.title, not_reproduced=missing)
    return spec, notes


def _from_verl(spec: CheckSpec, flags: Flags) -> tuple[CheckSpec, list[str]]:
    from mismatch.engines.vllm.arguments import is_cpu_build
    from mismatch.presets import installed_kernels
    from mismatch.presets.verl_config import read_verl_config

    config = read_verl_config(flags["verl_config"], flags["verl_override"] or ())
    applied = config.apply(spec, flags.explicit, installed_kernels(), is_cpu_build())
    notes = [f"trainer: {applied.spec.preset}"]
    notes += [f"  {used}" for used in applied.used]
    notes += [f"  kept: {line}" for line in applied.kept]
    notes += [f"  unknown: {key}" for key in applied.ignored if "did you mean" in key]
    return applied.spec, notes
