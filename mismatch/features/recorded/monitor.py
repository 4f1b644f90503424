"""Record some rows of a training run while it trains, and log its headline numbers.

Runs inside a framework's process: it imports numpy and this package's metrics. Nothing that goes
wrong here ends the run; the first failure of a kind is written to standard error. Set by the
environment:

- ``MISMATCH_WATCH_DIR``: where rows are written (``step_N.jsonl``, read by ``mismatch watch`` and
  ``mismatch postmortem``); unset: nothing happens;
- ``MISMATCH_WATCH_EVERY``: steps between records, 10 by default;
- ``MISMATCH_WATCH_ROWS``: rows of a record, 64 by default.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

DIRECTORY, EVERY, ROWS = "MISMATCH_WATCH_DIR", "MISMATCH_WATCH_EVERY", "MISMATCH_WATCH_ROWS"


@dataclass(frozen=True)
class Batch:
    """Rows of one step, as a framework holds them: padded arrays or tensors, a row per sequence."""

    prompt_ids: Any
    """[N, P]; None: the framework hands over numbers alone, and rows are written without ids."""
    response_ids: Any
    """[N, R]"""
    response_mask: Any
    """[N, R] 1 where the policy sampled the token."""
    rollout_logprobs: Any
    """[N, R] nats."""
    train_logprobs: Any
    """[N, R] nats."""
    prompt_mask: Any = None
    """[N, P] 0 at padding; None: no padding."""


@dataclass
class Monitor:
    """Counts the steps of a run, and records every n-th."""

    directory: Path
    every: int = 10
    rows: int = 64
    step: int = 0
    rank: int | None = None
    """Of the process, where several write; None: one does."""
    _failed: set[str] = field(default_factory=set, repr=False)

    @classmethod
    def from_environment(cls) -> Monitor | None:
        """Return a monitor as the environment asks; None where it asks for none."""
        folder = os.environ.get(DIRECTORY)
        if not folder:
            return None
        every, rows = (int(os.environ.get(name, n)) for name, n in ((EVERY, 10), (ROWS, 64)))
        return cls(Path(folder), max(1, every), max(1, rows))

    def see(self, batch_of: Callable[[], Batch], step: int | None = None) -> dict[str, float]:
        """Record a step if it is one to record.

        Args:
            batch_of: gives the batch; called only for a step that is recorded.
            step: None: counted from the calls.

        Returns:
            Headline numbers by their names in a tracker; empty for other steps, and after a
            failure.
        """
        self.step = self.step + 1 if step is None else step
        if self.step % self.every and self.step != 1:
            return {}
        try:
            return self._write(batch_of())
        except Exception as error:  # whatever a framework of another version holds
            kind = f"{type(error).__name__} {error!s:.60}"
            if kind not in self._failed:
                said = f"mismatch: step {self.step} is not recorded: {error!r}"
                print(said, "(said once)", file=sys.stderr)
            self._failed.add(kind)
            return {}

    def _write(self, batch: Batch) -> dict[str, float]:
        """Write some rows; return their headline numbers, by their names in a tracker."""
        from mismatch.metrics.registry import plain_array
        from mismatch.metrics.row_sums import Row, Sums
        from mismatch.run.manifest import write_atomic

        sums = Sums()
        rank = "" if self.rank is None else f"-rank_{self.rank}"
        path = self.directory / f"step_{self.step}{rank}.jsonl"
        lines = []
        for row in range(min(self.rows, len(batch.response_ids))):
            alone = batch.prompt_ids is None
            prompt = np.zeros(1, np.int64)  # what a response without its prompt is counted with
            if not alone:
                prompt = plain_array("prompt_ids", batch.prompt_ids[row])
            if not alone and batch.prompt_mask is not None:
                prompt = prompt[plain_array("prompt_mask", batch.prompt_mask[row]) > 0]
            mask = plain_array("response_mask", batch.response_mask[row]) > 0
            end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
            ids = np.concatenate(
                [prompt, plain_array("response_ids", batch.response_ids[row])[:end]]
            )
            sampled = np.concatenate([np.zeros(len(prompt), np.bool_), mask[:end]])
            rollout = plain_array("rollout_logprobs", batch.rollout_logprobs[row])[mask].astype(
                np.float64
            )
            train = plain_array("train_logprobs", batch.train_logprobs[row])[mask].astype(
                np.float64
            )
            sums.add([Row(ids, sampled, rollout, train, number=row)])
            entry = {
                "token_ids": ids.tolist(),
                "action_mask": sampled.astype(int).tolist(),
                "rollout_logprobs": rollout.tolist(),
                "train_logprobs": train.tolist(),
                "prompt_id": str(hash(tuple(prompt.tolist()))),
                "step": self.step,
            }
            for name in ("token_ids", "action_mask", "prompt_id") if alone else ():
                del entry[name]
            lines.append(json.dumps(entry) + "\n")
        write_atomic(path, lambda file: file.write("".join(lines).encode()))
        found = {"mismatch/not_finite": float(sums.not_finite.total())}
        if sums.whole.tokens:
            step = sums.whole.step(self.step)
            found["mismatch/logprob_abs_diff_mean"] = step.abs_diff
            found |= {"mismatch/k3_kl": step.k3, "mismatch/ess_seq": step.ess}
        return found
