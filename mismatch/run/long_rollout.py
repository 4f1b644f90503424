"""Tokens that are scored apart: one long sequence, or first samples, each in a folder of a run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from mismatch.keys import LONG, SAMPLES
from mismatch.run import store
from mismatch.types import Rollout

FOLDER = LONG


def leave(run_dir: Path, length: int) -> None:
    """Write the long sequence, unless no token would lie beyond the run's own sequences.

    One of the same tokens stays as it is. One that an earlier sampling left is deleted with its
    scorings: they are of other tokens.
    """
    folder = run_dir / FOLDER
    rollout = store.load_rollout(run_dir)
    if (folder / store.ROLLOUT).exists():
        held = store.load_rollout(folder).token_ids
        if np.array_equal(held, np.resize(rollout.token_ids, len(held))):
            return
        shutil.rmtree(folder)
    if length > int(np.diff(rollout.offsets).max()):
        folder.mkdir(exist_ok=True)
        store.save_rollout(folder, long_rollout(rollout, length))


def leave_first_samples(run_dir: Path) -> None:
    """Write the first sample of each prompt; delete those of an earlier sampling."""
    folder, rollout = run_dir / SAMPLES, store.load_rollout(run_dir)
    part = rollout.only(rollout.first_samples)
    if (folder / store.ROLLOUT).exists():
        if np.array_equal(store.load_rollout(folder).token_ids, part.token_ids):
            return
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    store.save_rollout(folder, part)


def long_rollout(rollout: Rollout, length: int) -> Rollout:
    """Return one sequence made of the run's own sequences, in their order.

    Every token but the first is an action: it is scored as if the policy had sampled it.
    """
    ids = np.resize(rollout.token_ids, length)
    actions = np.arange(length) > 0
    return replace(
        rollout,
        token_ids=ids,
        offsets=np.asarray([0, length]),
        action_mask=actions,
        turn=actions.astype(rollout.turn.dtype),
        prompt_index=np.zeros(1, rollout.prompt_index.dtype),
        finish_reason=("length",),
        rewards=None,
        sampling=rollout.sampling.uncut(),
    )
