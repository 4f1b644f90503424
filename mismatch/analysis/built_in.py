"""The analyses that every check makes of its artefacts, as plug-ins."""

from __future__ import annotations

from mismatch.analysis.plugins import Analysis, RunArtefacts
from mismatch.analysis.two_passes import two_passes
from mismatch.metrics.ppo_passes import TwoPasses
from mismatch.specs import CheckSpec


def _two_passes(run: RunArtefacts, spec: CheckSpec) -> TwoPasses | None:
    return two_passes(spec, run.rollout, run.usable, spec.seed)


ANALYSES = (Analysis("two_passes", TwoPasses, _two_passes, order=4),)
