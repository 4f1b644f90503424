"""Record rows of a TRL run: a callback for a GRPOTrainer that samples with vLLM.

    trainer.add_callback(MismatchCallback(trainer, "runs/watch"))

AsyncGRPOTrainer is refused: it scores samples inside its loss, and keeps no batch.

The trainer needs importance sampling correction on (``vllm_importance_sampling_correction``, TRL's
default), which keeps the sampler's log-probabilities. Numbers go to the trainer's own log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mismatch.features.recorded.monitor import Batch, Monitor


class MismatchCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Writes 64 rows each 10 steps, and logs their headline numbers."""

    def __init__(
        self, trainer: Any, directory: str | Path, every: int = 10, rows: int = 64
    ) -> None:
        """Refuse a trainer that keeps no batch, before it trains.

        Raises:
            ValueError: e.g. AsyncGRPOTrainer, whose samples hold the sampler's side alone.
        """
        if not hasattr(trainer, "_buffered_inputs"):
            raise ValueError(
                f"{type(trainer).__name__} keeps no scored batch, so nothing can be recorded. Its "
                "log has the numbers of each step: mismatch postmortem LOG"
            )
        self.trainer = trainer
        self.monitor = Monitor(Path(directory), every, rows)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the batch that this step trained on."""
        if not state.is_world_process_zero:
            return
        found = self.monitor.see(self._batch, step=state.global_step)
        for name, value in found.items():
            self.trainer._metrics["train"][name].append(value)

    def _batch(self) -> Batch:
        held = self.trainer._buffered_inputs[0]
        if held.get("sampling_per_token_logps") is None or held.get("old_per_token_logps") is None:
            switches = "use_vllm=True and vllm_importance_sampling_correction=True"
            raise ValueError(f"the trainer keeps no sampler's log-probabilities: set {switches}")
        mask = held["completion_mask"]
        return Batch(
            held["prompt_ids"],
            held["completion_ids"],
            mask * held["tool_mask"] if "tool_mask" in held else mask,
            held["sampling_per_token_logps"],
            held["old_per_token_logps"],
            held["prompt_mask"],
        )
