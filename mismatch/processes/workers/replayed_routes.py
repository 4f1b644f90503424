"""The routes that a pass of the trainer replays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mismatch.run.store import load_scoring
from mismatch.specs import TrainSpec
from mismatch.types import Rollout

if TYPE_CHECKING:
    from mismatch.training.routing.replay import ReplaySource


def routes_from(rollout: Rollout, spec: TrainSpec) -> str:
    """Return the name of the scoring whose routes a pass replays."""
    return spec.replay_source or f"{rollout.fingerprint['engine']}:decode"


def replay_source(run_dir: Path, rollout: Rollout, spec: TrainSpec) -> ReplaySource | None:
    """Return the routes that a pass replays, of the engine's decode or of an earlier pass, if any.

    Raises:
        MismatchError: no such scoring, no routes in it, or routes that cannot be true.
    """
    if spec.replay_routing is None:
        return None
    from mismatch.training.routing.replay import ReplaySource

    scoring = load_scoring(run_dir, routes_from(rollout, spec))
    return ReplaySource.of(scoring, spec.replay_routing, rollout)
