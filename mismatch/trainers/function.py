"""A user's own function as a trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from mismatch.errors import MismatchError, first_line
from mismatch.facts import FUNCTION
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
        self.function, self.name, self.job = function, name, job

    def score(self, tokens: Tokens, variant: Variant) -> Scored:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        own = list(range(rank, len(tokens.lengths), world))
        calls = {"alone": [[n] for n in own], "regrouped": [own[0::2], own[1::2]]}
        sequences, masks = tokens.sequences(), tokens.masks()
        logprobs: dict[int, Any] = {}
        for group in filter(None, calls.get(variant, [own])):
            ids = np.concatenate([sequences[number] for number in group])
            mask = np.concatenate([masks[number] for number in group])
            answer = self.function(ids, tokens.lengths[group], mask, self.job.temperature)
            values = self._numbers(answer)
            actions = int(mask.sum())
            if len(values) == len(ids) != actions:
                values = values[mask]
            if len(values) != actions:
                raise MismatchError(
                    f"{self.name} returned {len(values)} numbers for {len(ids)} tokens, "
                    f"{actions} of them action tokens",
                    "return one log-probability per action token, or one per token",
                )
            ends = np.cumsum([int(masks[number].sum()) for number in group])[:-1]
            logprobs |= dict(zip(group, np.split(values, ends), strict=True))
        return Scored(tuple(own), tuple(logprobs[number] for number in own))

    def _numbers(self, answer: Any) -> Any:
        """Return what the function gave as float32: a tensor of torch, an array, or a list."""
        if hasattr(answer, "detach"):
            answer = answer.detach().float().cpu().numpy()
        try:
            if answer is None:
                raise TypeError("None is no array")
            return np.asarray(answer, np.float32).reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise MismatchError(
                f"{self.name} returned no array of numbers: {first_line(error)}",
                "return a tensor, an array or a list of floats",
            ) from error

    def facts(self) -> Facts:
        stated = f"the dtype {self.job.dtype} is what --train-dtype says"
        return Facts(code=f"{FUNCTION}{self.name}", dtype=self.job.dtype, notes=(stated,))
