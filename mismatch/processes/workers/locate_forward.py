"""One loaded trainer, the float32 reference too, whose modules are recorded or replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mismatch.specs import Pass
from mismatch.training.load import load
from mismatch.training.module_capture import Boundaries, Recorder, require_known
from mismatch.training.packing import MicroBatch
from mismatch.training.sequence_parallel import SequenceParallel
from mismatch.training.validate import prepare_pass, to_device
from mismatch.types import Rollout


class Forward:
    """One loaded trainer, and its forward passes over one sequence each.

    Raises:
        MismatchError: a model that cannot be loaded, or whose modules cannot be told apart.
    """

    def __init__(self, world: Any, one: Pass, rollout: Rollout) -> None:
        self.world, self.spec, self.rollout = world, one.spec, rollout
        self.loaded = load(one.spec, world.mesh, world.device)
        require_known(self.loaded.scorer.decoder)
        self.options = prepare_pass(world, self.loaded, rollout, one.spec, None)[0]

    @property
    def count(self) -> int:
        """Of sequences."""
        return self.rollout.n_sequences

    def logprobs(self, number: int, visit: Any) -> np.ndarray:
        """Log-probabilities [A] of one sequence; ``visit``: see :class:`Boundaries`."""
        scorer, rollout = self.loaded.scorer, self.rollout
        length = int(rollout.offsets[number + 1] - rollout.offsets[number])
        parallel = SequenceParallel.of(self.world, 1)
        inputs = to_device(
            rollout, MicroBatch((number,), length), self.spec, self.options, self.world.device,
            None, parallel,
        )  # fmt: skip
        with torch.no_grad(), Boundaries(scorer.decoder, visit).shown():
            values, _ = scorer(
                scorer.score, inputs.batch, inputs.predicting, inputs.target_ids, inputs.options,
                None,
            )  # fmt: skip
        result: np.ndarray = values[0].double().cpu().numpy()
        return result

    def record(self, folder: Path) -> None:
        """Leave every boundary of every sequence."""
        for number in range(self.count):
            recorder = Recorder()
            np.save(folder / f"{number}.npy", self.logprobs(number, recorder))
            save_file(recorder.values, folder / f"{number}.safetensors")
