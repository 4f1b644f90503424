"""Whether a path carries all weights, for the loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch.engines.sync_drivers import driver_class, lost_by
from mismatch.experiments.sync.types import Lost, SyncReport, SyncSpec
from mismatch.models.weight_states import Checkpoint


def tokens(spec: SyncSpec, vocabulary: int, context: int | None) -> list[list[int]]:
    """Return no tokens: a trial scores none."""
    return []


@dataclass(frozen=True)
class Probe:
    """A trial of a path."""

    spec: SyncSpec
    driver: Any
    checkpoint: Checkpoint

    @classmethod
    def of(
        cls, engine: Any, spec: SyncSpec, checkpoint: Checkpoint, rows: Any, run_dir: Path
    ) -> Probe:
        driver = driver_class(spec.engine.engine)(engine, checkpoint, run_dir / "sync")
        return cls(spec, driver, checkpoint)

    def report(self) -> SyncReport:
        lost = lost_by(self.driver, self.spec.path, self.checkpoint)
        return SyncReport(self.spec.path, tuple(Lost(name) for name in lost))
