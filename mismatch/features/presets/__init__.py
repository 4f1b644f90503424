"""What the trainers of known RL frameworks really run, as settings of our own trainer.

>>> from mismatch.features.presets import get_preset
>>> from mismatch.specs import TrainSpec
>>> get_preset("verl").apply(TrainSpec()).autocast
'bf16'
"""

from __future__ import annotations

from mismatch.errors import MismatchError, did_you_mean
from mismatch.features.presets.frameworks import (
    Applied,
    Gap,
    Preset,
    Setting,
    installed_kernels,
    read_preset,
)

NAMES = ("verl", "verl-legacy", "trl", "skyrl")
PRESETS: dict[str, Preset] = {name: read_preset(name) for name in NAMES}

__all__ = [
    "PRESETS",
    "Applied",
    "Gap",
    "Preset",
    "Setting",
    "get_preset",
    "installed_kernels",
]


def get_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        MismatchError: no such preset; names the nearest.
    """
    if name in PRESETS:
        return PRESETS[name]
    hint = did_you_mean(name, PRESETS, cutoff=0.4)
    raise MismatchError(
        f"--trainer {name!r}: no such preset",
        f"{hint}use one of {', '.join(PRESETS)}; or describe your trainer with --train-dtype, "
        "--master-dtype, --autocast, --attention, --layout",
    )
