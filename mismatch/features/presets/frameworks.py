"""What the trainer of a framework runs, read from one TOML file per framework.

Each setting names its place in the framework's source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from mismatch.specs import TrainSpec

# Fields of TrainSpec whose command-line parameter has another name.
PARAMETERS = {"dtype": "train_dtype", "experts": "experts_implementation"}
KERNEL_PACKAGES = ("flash_attn",)
_DEFAULT = TrainSpec()


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that the framework does and our trainer can do as well.

    Attributes:
        field: of :class:`TrainSpec`.
        what: what the framework does, in its own terms.
        needs: Python package without which it cannot run here; "": none.
    """

    field: str
    value: Any
    what: str
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """One thing that the framework does and our trainer does not.

    Attributes:
        what: the difference and what it can change, one sentence without a full stop.
        strategy: of FSDP that it belongs to ("fsdp", which is FSDP1); "": to all.
    """

    what: str
    strategy: str = ""


@dataclass(frozen=True, slots=True)
class Applied:
    """A trainer with a preset on.

    Attributes:
        settings: those that took effect, or that the trainer had already.
        kept: choices of the user that differ from the preset, one sentence each.
        not_reproduced: one sentence each.
    """

    train: TrainSpec
    settings: tuple[Setting, ...]
    kept: tuple[str, ...]
    not_reproduced: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Preset:
    """What one framework's trainer runs.

    Attributes:
        title: framework, version and worker, for reports.
    """

    name: str
    title: str
    settings: tuple[Setting, ...]
    gaps: tuple[Gap, ...]

    def apply(
        self, train: TrainSpec, explicit: Collection[str] = (), packages: Iterable[str] = ()
    ) -> TrainSpec:
        """The trainer with this preset's settings; arguments as for :meth:`resolve`."""
        return self.resolve(train, explicit, packages).train

    def resolve(
        self,
        train: TrainSpec,
        explicit: Collection[str] = (),
        packages: Iterable[str] = (),
        settled: Collection[str] = (),
    ) -> Applied:
        """Like :meth:`apply`, with what took effect, what was kept and what is missing.

        Args:
            explicit: command-line parameters (``train_dtype``, ``attention`` …) that the user has
                given; a field that is not at its default counts as given too.
            packages: installed kernel packages, as of :func:`installed_kernels`.
            settled: fields that the framework's own config decides; they are not mentioned.
        """
        have, used, kept, missing = set(packages), [], [], []
        for item in self.settings:
            current = getattr(train, item.field)
            if current == item.value:
                used.append(item)
            elif item.field in settled:
                continue
            elif is_users(train, item.field, explicit):
                kept.append(f"{item.field} is {current}, by request; {self.name}: {item.what}")
            elif item.needs and item.needs not in have:
                missing.append(
                    f"{self.name}: {item.what}; {item.needs} is not installed here, so "
                    f"{item.field} stays {current}"
                )
            else:
                train = replace(train, **{item.field: item.value})
                used.append(item)
        gaps = [f"{self.name}: {gap.what}" for gap in self.gaps]
        return Applied(train, tuple(used), tuple(kept), (*missing, *gaps))


def is_users(train: TrainSpec, field: str, explicit: Collection[str]) -> bool:
    """Whether a field holds the user's own choice."""
    given = PARAMETERS.get(field, field) in explicit
    changed: bool = getattr(train, field) != getattr(_DEFAULT, field)
    return given or changed


def installed_kernels() -> frozenset[str]:
    """Kernel packages that presets ask for and that are installed; imports none of them."""
    from importlib.util import find_spec

    return frozenset(name for name in KERNEL_PACKAGES if find_spec(name) is not None)


def preset_file(name: str) -> dict[str, Any]:
    """Return ``NAME.toml`` beside this file; its rows also say where each was read."""
    text = files("mismatch.features.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def read_preset(name: str) -> Preset:
    """Return the preset of a file."""
    data = preset_file(name)
    settings = [
        Setting(row["field"], row["value"], row["what"], row.get("needs", ""))
        for row in data["setting"]
    ]
    gaps = [Gap(row["what"], row.get("strategy", "")) for row in data["gap"]]
    return Preset(name, data["title"], tuple(settings), tuple(gaps))
