"""Record rows of a verl run: loaded by verl itself, through its entry points ``verl.plugins``.

It wraps the function that verl calls with both log-probabilities at every step
(``verl.utils.debug.metrics.calculate_debug_metrics``, where
``actor_rollout_ref.rollout.calculate_log_probs`` is on). What it returns goes to verl's own
trackers. Nothing happens unless ``MISMATCH_WATCH_DIR`` is set, see monitor.py.
"""

from __future__ import annotations

import os
from typing import Any

from mismatch.features.recorded.monitor import DIRECTORY, Batch, Monitor


def install() -> None:
    """Wrap verl's function once."""
    from functools import wraps

    from verl.utils.debug import metrics

    monitor, original = Monitor.from_environment(), metrics.calculate_debug_metrics
    if monitor is None or hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def calculate_debug_metrics(data: Any) -> dict[str, float]:
        def batch() -> Batch:
            held = data.batch
            width = held["responses"].shape[1]
            attended = held.get("attention_mask", None)
            masked = held.get("response_mask", attended)
            return Batch(
                held["prompts"],
                held["responses"],
                masked[:, -width:],
                held["rollout_log_probs"],
                held["old_log_probs"],
                None if attended is None else attended[:, :-width],
            )

        return {**original(data), **monitor.see(batch)}

    metrics.calculate_debug_metrics = calculate_debug_metrics


if os.environ.get(DIRECTORY):
    install()
