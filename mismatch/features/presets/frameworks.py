"""What the trainers of known RL frameworks run, as settings of our own trainer.

One TOML file per framework; each setting names its place in the framework's source. verl and TRL
also have adapters, which run the framework's code: a preset is for what only our own loop measures.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from mismatch.errors import MismatchError, did_you_mean
from mismatch.specs import TrainSpec

NAMES = ("verl", "trl", "skyrl")
# Fields of TrainSpec whose command-line parameter has another name.
PARAMETERS = {"dtype": "train_dtype", "experts": "experts_implementation"}
KERNEL_PACKAGES = ("flash_attn",)
_DEFAULT = TrainSpec()


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that the framework does and our trainer can do as well."""

    field: str
    """Of :class:`TrainSpec`."""
    value: Any
    what: str
    """What the framework does, in the framework's terms."""
    needs: str = ""
    """Python package without which it cannot run here; "": none."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A trainer with a preset on."""

    train: TrainSpec
    settings: tuple[Setting, ...]
    """Those that took effect, or that the trainer had already."""
    kept: tuple[str, ...]
    """Choices of the user that differ from the preset, one sentence each."""
    not_reproduced: tuple[str, ...]
    """One sentence each."""


@dataclass(frozen=True, slots=True)
class Preset:
    """What one framework's trainer runs."""

    name: str
    title: str
    """Framework, version and worker, for reports."""
    settings: tuple[Setting, ...]
    gaps: tuple[str, ...]
    """What the framework does and our trainer does not, one sentence each without a full stop."""

    def resolve(
        self,
        train: TrainSpec,
        explicit: Collection[str] = (),
        packages: Collection[str] = (),
        settled: Collection[str] = (),
    ) -> Applied:
        """Return the trainer with these settings, and what of them took effect.

        Args:
            explicit: command-line parameters (``train_dtype``, ``attention`` …) that the user has
                given; a field that is not at its default counts as given too.
            packages: installed kernel packages, as of :func:`installed_kernels`.
            settled: fields that the framework's own config decides; they are not mentioned.
        """
        used, kept, missing = [], [], []
        for item in self.settings:
            current = getattr(train, item.field)
            own = PARAMETERS.get(item.field, item.field) in explicit
            if current == item.value:
                used.append(item)
            elif item.field in settled:
                continue
            elif own or current != getattr(_DEFAULT, item.field):
                kept.append(f"{item.field} is {current}, by request; {self.name}: {item.what}")
            elif item.needs and item.needs not in packages:
                missing.append(
                    f"{self.name}: {item.what}; {item.needs} is not installed here, so "
                    f"{item.field} stays {current}"
                )
            else:
                train = replace(train, **{item.field: item.value})
                used.append(item)
        gaps = [f"{self.name}: {gap}" for gap in self.gaps]
        return Applied(train, tuple(used), tuple(kept), (*missing, *gaps))


def installed_kernels() -> frozenset[str]:
    """Return the kernel packages that presets ask for and that are installed; import none."""
    from importlib.util import find_spec

    return frozenset(name for name in KERNEL_PACKAGES if find_spec(name) is not None)


def preset_file(name: str) -> dict[str, Any]:
    """Return ``NAME.toml`` next to this file; its rows also say where each was read."""
    text = files("mismatch.features.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def get_preset(name: str) -> Preset:
    """Return the preset of that name.

    Raises:
        MismatchError: no such preset; names the nearest.
    """
    if name not in NAMES:
        hint = did_you_mean(name, NAMES, cutoff=0.4)
        raise MismatchError(
            f"--trainer {name!r}: no such preset",
            f"{hint}use one of {', '.join(NAMES)}; or describe your trainer with --train-dtype, "
            "--master-dtype, --autocast, --attention, --layout",
        )
    data = preset_file(name)
    settings = [
        Setting(row["field"], row["value"], row["what"], row.get("needs", ""))
        for row in data["setting"]
    ]
    gaps = tuple(row["what"] for row in data["gap"])
    return Preset(name, data["title"], tuple(settings), gaps)
