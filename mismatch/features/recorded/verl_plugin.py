"""Record rows of a verl run: loaded by verl itself, through its entry points ``verl.plugins``.

It wraps two functions of verl 0.9.1, and what it finds goes to verl's own trackers:

- ``verl.utils.debug.metrics.calculate_debug_metrics``, which both trainers call at every step with
  the sampler's and the recomputed log-probabilities (V1, verl's default, hands it no prompts: rows
  have no ids then), where ``actor_rollout_ref.rollout.calculate_log_probs`` is on;
- ``verl.workers.utils.losses.ppo_loss``, for bypass mode, in which nothing is recomputed: the old
  log-probabilities are the sampler's there. V1's ``_compute_old_log_prob`` and the legacy trainer's
  ``apply_bypass_mode`` mark the batches of that mode, and the workers record the first micro-batch
  of a step, a file per rank.

Nothing happens unless ``MISMATCH_WATCH_DIR`` is set, see monitor.py.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial, wraps
from typing import Any

from mismatch.features.recorded.monitor import DIRECTORY, Batch, Monitor

SILENT = 5  # steps, after which a run that records nothing says so
MARK = "mismatch_bypass_step"  # of a batch in bypass mode: the step, for the workers


def install() -> None:
    """Wrap verl's functions once, and say which."""
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
            prompts = held.get("prompts", None)
            padded = None if attended is None or prompts is None else attended[:, :-width]
            return Batch(
                prompts,
                held["responses"],
                masked[:, -width:],
                held["rollout_log_probs"],
                held["old_log_probs"],
                padded,
            )

        return {**original(data), **monitor.see(batch)}

    metrics.calculate_debug_metrics = calculate_debug_metrics
    hooks = ["calculate_debug_metrics"]
    for hook in (partial(_follow_steps, monitor), _mark_legacy, _record_bypass):
        try:
            hooks.append(hook())
        except (ImportError, AttributeError) as error:  # another version of verl, or no torch here
            print(f"mismatch: bypass mode is not recorded: {error!r}", file=sys.stderr)
    print(f"mismatch: records steps at {', '.join(hooks)}", file=sys.stderr)


def _follow_steps(monitor: Monitor) -> str:
    """Follow the count of steps of both trainers, by when V1's trainer is imported."""
    from verl.utils.skip.skip_manager import SkipManager

    original, said = SkipManager.set_step, list[str]()

    @wraps(original)
    def set_step(step: int) -> Any:
        v1 = sys.modules.get("verl.trainer.ppo.v1.trainer_base")
        if v1 is not None and not hasattr(v1.PPOTrainer._compute_old_log_prob, "__wrapped__"):
            mark_v1(v1.PPOTrainer, monitor)
        if step > SILENT and not monitor.step and not said:
            said.append("mismatch: no step was recorded so far: is calculate_log_probs on?")
            print(*said, file=sys.stderr)
        return original(step)

    SkipManager.set_step = staticmethod(set_step)
    return "set_step"


def _mark_legacy() -> str:
    """Let the legacy trainer mark its batches in bypass mode; return the hook's name."""
    from verl.trainer.ppo import rollout_corr_helper

    original, steps = rollout_corr_helper.apply_bypass_mode, [0]

    @wraps(original)
    def apply_bypass_mode(batch: Any, *args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        batch.meta_info[MARK] = steps[0]
        return original(batch, *args, **kwargs)

    rollout_corr_helper.apply_bypass_mode = apply_bypass_mode
    return "apply_bypass_mode"


def mark_v1(trainer: Any, monitor: Monitor) -> None:
    """Let V1's trainer (a class) mark its batches in bypass mode."""
    original = trainer._compute_old_log_prob

    @wraps(original)
    def _compute_old_log_prob(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        found = self.config.algorithm.get("rollout_correction", None)
        if found and found.get("bypass_mode", False):
            batch.extra_info[MARK] = monitor.step = self.global_steps
        return original(self, batch, metrics)

    trainer._compute_old_log_prob = _compute_old_log_prob


def _record_bypass() -> str:
    """Record the loss's micro-batches that are marked; return the hook's name."""
    from verl.workers.utils import losses

    monitor, original, seen = Monitor.from_environment(), losses.ppo_loss, set[int]()
    assert monitor is not None
    monitor.rank = int(os.environ.get("RANK", 0))

    @wraps(original)
    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        loss, metrics = original(config, model_output, data, dp_group)
        step = None
        with suppress(Exception):  # whatever carries the mark, the training goes on
            held = data.get(MARK, None)
            step = held if held is None else int(getattr(held, "data", held))
        if step is not None and step not in seen:
            seen.add(step)

            def batch() -> Batch:
                held = data.select("response_mask", "old_log_probs").to_padded_tensor()
                current = losses.no_padding_2_padding(model_output["log_probs"], data).detach()
                old = held["old_log_probs"]  # the sampler's, in this mode
                return Batch(None, old, held["response_mask"], old, current)

            metrics = {**metrics, **monitor.see(batch, step)}
        return loss, metrics

    losses.ppo_loss = ppo_loss
    return "ppo_loss (bypass mode)"


if os.environ.get(DIRECTORY):
    install()
