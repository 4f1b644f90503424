"""Every reported number as a function on plain arrays.

    from mismatch.metrics import k3_kl

    k3_kl(train - rollout)  # help(k3_kl) gives its formula

A dot in a metric's name is an underscore here: ``ratio_outside_1_02``. ``METRICS`` holds the
declarations by name, in the order of reports.
"""

from __future__ import annotations

# Metrics are declared in the order in which reports list them.
# ruff: noqa: F403
# isort: off
from mismatch.metrics.token import *
from mismatch.metrics.exact import *
from mismatch.metrics.sequence import *
from mismatch.metrics.routing import *
# isort: on

from mismatch.metrics.registry import METRICS as METRICS
from mismatch.metrics.registry import Metric as Metric

__all__ = sorted(["METRICS", "Metric", *(name.replace(".", "_") for name in METRICS)])
