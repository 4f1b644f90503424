"""Every reported number, one function each on plain arrays; docs/metrics.md describes them all.

    from mismatch.metrics import k3_kl

    k3_kl(train - rollout)  # help(k3_kl) says what it takes, how it is made and what others call it

A dot in a metric's name is an underscore here: ``ratio_outside_1_02``.
"""

from __future__ import annotations

from mismatch.metrics import exact, ratios, routing, sequence, token
from mismatch.metrics.describe import docstring
from mismatch.metrics.registry import METRICS, Metric

__all__ = ["METRICS", "Metric", "exact", "ratios", "routing", "sequence", "token"]

for _metric in METRICS.values():
    object.__setattr__(_metric, "__doc__", docstring(_metric))
_FUNCTIONS = {name.replace(".", "_"): metric for name, metric in METRICS.items()}


def __getattr__(name: str) -> Metric:
    """Every metric by its name, as a function."""
    try:
        return _FUNCTIONS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no metric {name!r}") from None


def __dir__() -> list[str]:
    return sorted([*__all__, *_FUNCTIONS])
