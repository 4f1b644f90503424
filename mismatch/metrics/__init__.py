"""Every reported number, one function each; docs/metrics.md describes them all."""

from __future__ import annotations

from mismatch.metrics import routing, sequence, token
from mismatch.metrics.registry import METRICS, Metric

__all__ = ["METRICS", "Metric", "routing", "sequence", "token"]
