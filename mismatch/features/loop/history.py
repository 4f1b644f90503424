"""What is measured at every step of the loop, one JSON file a step."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np

from mismatch import metrics
from mismatch.metrics.sequence import per_sequence_mean
from mismatch.run.store import read_json, write_json
from mismatch.types import Pair, Rollout, Scoring

ROWS, STEPS, WEIGHTS, CHECKPOINTS = "rows", "steps", "weights", "checkpoints"
GO, DONE = "go", "engine.json"  # what the two sides wait for
Row = dict[str, float | None]


def measure(rollout: Rollout, decode: Scoring, train: Scoring) -> Row:
    """Measure one rollout, before the trainer's update; log-ratios are in nats."""
    pair = Pair.of(rollout, decode, train)
    delta, sequence = pair.delta, pair.sequence
    return {
        "reward": None if rollout.rewards is None else float(np.mean(rollout.rewards)),
        "k3_kl": metrics.k3_kl(delta),
        "ess_seq": metrics.ess_seq(delta, sequence),
        "log_ppl_diff_max": float(np.abs(per_sequence_mean(delta, sequence)).max()),
        "entropy": None if train.entropy is None else float(np.mean(train.entropy)),
        "response_length": len(delta) / rollout.n_sequences,
    }


def save_row(folder: Path, row: Row) -> None:
    """One step's numbers, at once: what was measured outlives the process."""
    write_json(folder / ROWS / f"{int(row['step'] or 0):06d}.json", row)


def rows_of(folder: Path) -> list[Row]:
    """Return all steps so far, in order."""
    return [read_json(path) for path in sorted((folder / ROWS).glob("*.json"))]


def forget_from(folder: Path, step: int) -> None:
    """Drop what belongs to this step and later steps, which are made again, and what a kill left
    half written."""
    for name in (ROWS, GO, STEPS):
        for path in (folder / name).glob("*"):
            if path.name.startswith(".") or int(path.stem) >= step:
                path.unlink() if path.is_file() else shutil.rmtree(path)


def in_words(row: Row, steps: int) -> str:
    """One line of progress: the last step, and how long those that are left take at its pace."""
    shown = ("reward", "k3_kl", "entropy", "grad_norm")
    parts = [f"{name} {value:.3g}" for name in shown if (value := row.get(name)) is not None]
    step, seconds = int(row["step"] or 0), row["seconds"] or 0.0
    left = math.ceil(seconds * (steps - step - 1) / 60)
    return f"step {step}: {', '.join(parts)}, {seconds:.1f} s; {left} min left"
