"""What training frameworks call our metrics, and where their number differs.

The names are data, in framework_names.toml. Their numbers are not computed here: an alias says in
words how the framework's number differs from ours.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from mismatch.frameworks import FRAMEWORKS


@dataclass(frozen=True, slots=True)
class Alias:
    """One metric's name in one framework."""

    framework: str
    name: str
    """As the framework logs it."""
    source: str
    """Version or commit, and path, that was read; or "second-hand"."""
    reduction: str = ""
    """What a unit of its mean is, where that is not ours."""
    sign: str = "same"
    """"opposite" where it is minus ours."""
    clipping: str = ""
    """What it clamps, truncates or masks before it averages."""
    note: str = ""
    """What else a reader must know, for instance the setting that switches it on."""
    differs: bool = False
    """Whether it is another number than ours."""

    @property
    def label(self) -> str:
        """Return framework and name.

        >>> of("k2_kl"), of("k3_kl", "verl")[0].label
        ((), 'verl rollout_corr/k3_kl')
        """
        return f"{FRAMEWORKS[self.framework].title} {self.name}"

    @property
    def remark(self) -> str:
        """Say how it differs from ours; "" where it does not.

        >>> of("logprob_abs_diff_mean", "slime")[0].remark
        'mean of per-sequence means; per token with calculate_per_token_loss'
        """
        sign = "opposite sign" if self.sign == "opposite" else ""
        parts = (sign, _REDUCTIONS[self.reduction], self.clipping, self.note)
        return "; ".join(part for part in parts if part)


_REDUCTIONS = {
    "": "",
    "token": "mean over tokens",
    "sequence": "mean of per-sequence means",
    "sequence, by tokens": "a sequence's product of ratios, averaged over tokens",
    "sequence product": "over sequences, each the product of its tokens' ratios",
}


@cache
def _table() -> dict[str, Any]:
    text = resources.files("mismatch.metrics").joinpath("framework_names.toml").read_text("utf-8")
    return tomllib.loads(text)


def anchors() -> dict[str, str]:
    """Return framework -> which policy its PPO ratio is anchored to, by its default settings."""
    entries = _table()["anchors"].items()
    return {name: f"{entry['anchor']}, by its default settings" for name, entry in entries}


@cache
def aliases() -> dict[str, tuple[Alias, ...]]:
    """Return every alias, by our metric."""
    table = _table()
    return {
        metric: tuple(
            Alias(**{**entry, "source": table["sources"][entry["source"]]}) for entry in entries
        )
        for metric, entries in table["aliases"].items()
    }


def of(metric: str, framework: str | None = None) -> tuple[Alias, ...]:
    """Return the aliases of a metric, all of them or one framework's; () where there is none."""
    return tuple(
        alias for alias in aliases().get(metric, ()) if framework in (None, alias.framework)
    )
