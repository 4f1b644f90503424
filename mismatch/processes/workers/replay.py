"""Whose routes a pass of the training world replays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mismatch.run.store import load_scoring
from mismatch.specs import TrainSpec
from mismatch.types import Rollout

if TYPE_CHECKING:
    from mismatch.training.routing.replay import ReplaySource


def routes_from(rollout: Rollout, spec: TrainSpec) -> str:
    """Name of the scoring whose routes a pass replays."""
    return spec.replay_source or f"{rollout.fingerprint['engine']}:decode"


def replay_source(job: dict[str, Any], rollout: Rollout, spec: TrainSpec) -> ReplaySource | None:
    """The routes that a pass replays, if it does: of the engine's decode, or of an earlier pass.

    Raises:
        MismatchError: no such scoring, no routes in it, or routes that cannot be true.
    """
    if spec.replay_routing is None:
        return None
    from mismatch.training.routing.replay import ReplaySource

    scoring = load_scoring(job["run_dir"], routes_from(rollout, spec))
    return ReplaySource.of(scoring, spec.replay_routing, rollout)
