"""A recorded run and blocks of its prompts, with all that detectors of causes read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.analysis.plugins import RunArtefacts
from mismatch.pipeline.build import Artefacts
from mismatch.run.directory import load_spec
from mismatch.specs import CheckSpec
from mismatch.types import Scoring

BLOCK = 64  # prompts


def measured(place: Path) -> tuple[RunArtefacts, CheckSpec]:
    """Return what a run left, without its comparison."""
    spec = load_spec(place)
    found = Artefacts.load(place, spec)
    nothing: Any = None
    run = RunArtefacts(found.rollout, found.decode, found.train, nothing, found.scorings, {})
    return run, spec


def of_prompts(run: RunArtefacts, prompts: np.ndarray) -> RunArtefacts:
    """Return the same run with some of its prompts only."""
    old = run.rollout
    keep = np.isin(old.prompt_index, prompts)
    tokens, actions = keep[old.sequence_of_token], keep[old.sequence_of_token[old.actions]]
    lengths = np.diff(old.offsets)[keep]
    rollout = replace(
        old,
        token_ids=old.token_ids[tokens],
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        action_mask=old.action_mask[tokens],
        turn=old.turn[tokens],
        prompt_index=old.prompt_index[keep],
        finish_reason=tuple(r for r, kept in zip(old.finish_reason, keep, strict=True) if kept),
        rewards=None,
    )
    cut = {name: _cut(scoring, actions) for name, scoring in run.usable.items()}
    return RunArtefacts(
        rollout, cut[run.decode.name], cut[run.train.name], run.comparison, cut, run.refused
    )


def _cut(scoring: Scoring, keep: np.ndarray) -> Scoring:
    return replace(
        scoring,
        token_ids=scoring.token_ids[keep],
        logprobs=scoring.logprobs[keep],
        entropy=None if scoring.entropy is None else scoring.entropy[keep],
        top1=None,
        extra={name: values[keep] for name, values in scoring.extra.items()},
        routing=None,
        distributions=None,
    )
