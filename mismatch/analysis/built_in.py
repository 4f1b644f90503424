"""The analyses that every check makes of its artefacts, as plug-ins."""

from __future__ import annotations

from mismatch.analysis.corrections.preview import preview
from mismatch.analysis.corrections.recipes import Corrections
from mismatch.analysis.plugins import Analysis, RunArtefacts
from mismatch.analysis.two_passes import two_passes
from mismatch.metrics.ppo_passes import TwoPasses
from mismatch.specs import CheckSpec


def _corrections(run: RunArtefacts, spec: CheckSpec) -> Corrections:
    lawful = run.comparison.sampled_by_left
    return preview(run.rollout, run.decode, run.train, sampled_by_left=lawful, seed=spec.seed)


def _two_passes(run: RunArtefacts, spec: CheckSpec) -> TwoPasses | None:
    return two_passes(spec, run.rollout, run.usable, spec.seed)


ANALYSES = (
    Analysis(
        "corrections", Corrections, _corrections, unseen=lambda result: result.not_tested, order=1
    ),
    Analysis("two_passes", TwoPasses, _two_passes, order=4),
)
