"""The name under which users import the probe of their own weight sync; see docs/sync-probe.md."""

from mismatch.features.sync.library import EXTENSION, judge, probe, sglang_engine

__all__ = ["EXTENSION", "judge", "probe", "sglang_engine"]
