"""What is measured at every step of the loop, one JSON file a step."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mismatch import metrics
from mismatch.metrics.routing_pairs import pair_routing
from mismatch.metrics.sequence import per_sequence_mean
from mismatch.run.store import read_json, write_json
from mismatch.types import Floats, Pair, Rollout, Scoring

ROWS, STEPS, WEIGHTS, CHECKPOINTS = "rows", "steps", "weights", "checkpoints"
GO, DONE = "go", "engine.json"  # what the two sides wait for
PATH = "path.json"  # the way of the weights into the engine
PACE = 5  # steps whose median says how long one takes
Row = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Column:
    """One number of a step; its unit is "" for plain numbers."""

    label: str
    unit: str = ""


COLUMNS: Mapping[str, Column] = {
    "step": Column("step"),
    "reward": Column("reward, mean"),
    "k3_kl": Column("k3 KL", "nats"),
    "logprob_abs_diff_mean": Column("mean |delta|", "nats"),
    "seq_logratio_mean": Column("sequence log-ratio, mean", "nats"),
    "seq_logratio_std": Column("sequence log-ratio, sd", "nats"),
    "ess_token": Column("ESS of tokens"),
    "ess_seq": Column("ESS of sequences"),
    "log_ppl_diff_max": Column("largest |log-perplexity difference|", "nats"),
    "routing_disagree_layer": Column("routings that differ"),
    "entropy": Column("entropy", "nats"),
    "ratio_max": Column("largest PPO ratio"),
    "clip_share": Column("gradients that the clip removes"),
    "grad_norm": Column("gradient norm before clipping"),
    "loss": Column("loss"),
    "response_length": Column("response length", "tokens"),
    "truncated": Column("responses cut at the longest length"),
    "tokens": Column("action tokens"),
    "parameters_verified": Column("parameters verified in the engine"),
    "push_s": Column("weights into the engine", "s"),
    "verify_s": Column("reading them back", "s"),
    "generate_s": Column("generation", "s"),
    "score_s": Column("scoring before the update", "s"),
    "update_s": Column("forward, backward and optimiser", "s"),
    "export_s": Column("weights out of the trainer", "s"),
    "seconds": Column("whole step", "s"),
}


def measure(rollout: Rollout, decode: Scoring, train: Scoring) -> Row:
    """Measure one rollout, before the trainer's update."""
    pair = Pair.of(rollout, decode, train)
    delta, sequence = pair.delta, pair.sequence
    lengths = np.bincount(sequence, minlength=rollout.n_sequences)
    cut = [reason == "length" for reason in rollout.finish_reason]
    row: Row = {
        "reward": _mean(rollout.rewards),
        "k3_kl": metrics.k3_kl(delta),
        "logprob_abs_diff_mean": metrics.logprob_abs_diff_mean(delta),
        "seq_logratio_mean": metrics.seq_logratio_mean(delta, sequence),
        "seq_logratio_std": metrics.seq_logratio_std(delta, sequence),
        "ess_token": metrics.ess_token(delta),
        "ess_seq": metrics.ess_seq(delta, sequence),
        "log_ppl_diff_max": float(np.abs(per_sequence_mean(delta, sequence)).max()),
        "routing_disagree_layer": None,
        "entropy": _mean(train.entropy),
        "response_length": float(lengths.mean()),
        "truncated": float(np.mean(cut)),
        "tokens": float(len(delta)),
    }
    if decode.routing is not None and train.routing is not None:
        routes = pair_routing(rollout, decode.routing, train.routing)
        row["routing_disagree_layer"] = metrics.routing_disagree_layer(routes.differs)
    return row


def _mean(values: Floats | None) -> float | None:
    return None if values is None else float(np.mean(values))


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


def in_words(rows: Sequence[Row], steps: int) -> str:
    """One line of progress: the last step, and how long those that are left take at its pace."""
    row, shown = rows[-1], ("reward", "k3_kl", "entropy", "grad_norm")
    parts = [f"{name} {value:.3g}" for name in shown if (value := row.get(name)) is not None]
    step, seconds = int(row["step"] or 0), row.get("seconds") or 0.0
    usual = float(np.median([earlier.get("seconds") or 0.0 for earlier in rows[-PACE:]]))
    left = math.ceil(usual * (steps - step - 1) / 60)
    return f"step {step}: {', '.join(parts)}, {seconds:.1f} s; {left} min left"
