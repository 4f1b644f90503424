"""The probe of a weight sync under the name that users import (docs/how-to/weight-sync.md)."""

from mismatch.features.sync.library import EXTENSION, judge, probe, sglang_engine

__all__ = ["EXTENSION", "judge", "probe", "sglang_engine"]
