"""A user's own function as a trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from mismatch.errors import MismatchError
from mismatch.trainers.protocol import Facts, Scored, Tokens, TrainerJob, Variant


class FunctionTrainer:
    """Calls ``function(token_ids, lengths, mask, temperature) -> logprobs`` on each rank's share.

    Args:
        function: gets token ids [N] int64, lengths [S] int64, action mask [N] bool and the
            temperature; returns [A] (action tokens alone) or [N] (all tokens) natural
            log-probabilities. It loads the model itself, at the first call.
        name: as the user wrote it.
    """

    def __init__(self, function: Callable[..., Any], name: str, job: TrainerJob) -> None:
        if job.precision == "fp32":
            raise MismatchError(
                f"{name} is a function: it cannot be asked for float32",
                "write a class that takes a TrainerJob (docs/how-to/your-trainer.md)",
            )
        self.function, self.name, self.job = function, name, job

    def score(self, tokens: Tokens, variant: Variant) -> Scored:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        own = list(range(rank, len(tokens.lengths), world))
        groups = [[number] for number in own] if variant == "alone" else [own]
        sequences, masks = tokens.sequences(), tokens.masks()
        scores: list[Any] = []
        for group in groups if own else ():
            ids = np.concatenate([sequences[number] for number in group])
            mask = np.concatenate([masks[number] for number in group])
            answer = self.function(ids, tokens.lengths[group], mask, self.job.temperature)
            values = np.asarray(
                answer.detach().float().cpu().numpy() if hasattr(answer, "detach") else answer,
                np.float32,
            ).reshape(-1)
            actions = int(mask.sum())
            if len(values) == len(ids) != actions:
                values = values[mask]
            if len(values) != actions:
                raise MismatchError(
                    f"{self.name} returned {len(values)} numbers for {len(ids)} tokens, "
                    f"{actions} of them action tokens",
                    "return one log-probability per action token, or one per token",
                )
            counts = [int(masks[number].sum()) for number in group]
            scores += np.split(values, np.cumsum(counts)[:-1])
        return Scored(tuple(own), tuple(scores))

    def facts(self) -> Facts:
        return Facts(code=f"the function {self.name}", dtype="unknown")
