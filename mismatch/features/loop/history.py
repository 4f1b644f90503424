"""What is measured at every step of the loop, one JSON file a step."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np

from mismatch import metrics
from mismatch.metrics.routing_pairs import pair_routing
from mismatch.metrics.sequence import per_sequence_mean
from mismatch.run.store import read_json, write_json
from mismatch.types import Pair, Rollout, Scoring

ROWS, STEPS, WEIGHTS, CHECKPOINTS = "rows", "steps", "weights", "checkpoints"
GO, DONE = "go", "engine.json"  # what the two sides wait for
PATH = "path.json"  # the way of the weights into the engine
Row = dict[str, float | None]


def measure(rollout: Rollout, decode: Scoring, train: Scoring) -> Row:
    """Measure one rollout, before the trainer's update; log-ratios are in nats."""
    pair = Pair.of(rollout, decode, train)
    delta, sequence = pair.delta, pair.sequence
    row: Row = {
        "reward": None if rollout.rewards is None else float(np.mean(rollout.rewards)),
        "k3_kl": metrics.k3_kl(delta),
        "logprob_abs_diff_mean": metrics.logprob_abs_diff_mean(delta),
        "seq_logratio_mean": metrics.seq_logratio_mean(delta, sequence),
        "seq_logratio_std": metrics.seq_logratio_std(delta, sequence),
        "ess_token": metrics.ess_token(delta),
        "ess_seq": metrics.ess_seq(delta, sequence),
        "log_ppl_diff_max": float(np.abs(per_sequence_mean(delta, sequence)).max()),
        "routing_disagree_layer": None,
        "entropy": None if train.entropy is None else float(np.mean(train.entropy)),
        "response_length": len(delta) / rollout.n_sequences,
        "truncated": float(np.mean([reason == "length" for reason in rollout.finish_reason])),
        "tokens": float(len(delta)),
    }
    if decode.routing is not None and train.routing is not None:
        routes = pair_routing(rollout, decode.routing, train.routing)
        row["routing_disagree_layer"] = metrics.routing_disagree_layer(routes.differs)
    return row


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
