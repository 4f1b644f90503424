"""Sequences of several turns: an engine answers, an environment replies, the engine answers again.

Ids are only ever appended: what an engine sampled goes into its next context as it is, and never
through text. Observations are encoded once, where they are made (mismatch/prompts/environments.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch.engines.base import Engine, Progress, Sample
from mismatch.engines.distribution_capture import CaptureRequest, join_collected
from mismatch.types import Bools, Floats, Ints

# (number of the sequence, its responses so far) -> ids that go before its next response, or None
Reply = Callable[[int, Sequence[Sample]], list[int] | None]


@dataclass
class Trajectory:
    """One sequence over its turns.

    Attributes:
        prompt: index of its prompt.
        token_ids: prompt, responses and what came between them.
        responses: one sample per turn.
        contexts: tokens before each response.
    """

    prompt: int
    token_ids: list[int]
    responses: list[Sample]
    contexts: list[int]

    @classmethod
    def starting(cls, prompt: int, ids: Sequence[int], sample: Sample) -> Trajectory:
        """Return the first response to a prompt."""
        return cls(prompt, [*ids, *sample.token_ids], [sample], [len(ids)])

    def answer(self, sample: Sample) -> None:
        """Append a response to all that is there."""
        self.contexts.append(len(self.token_ids))
        self.token_ids.extend(sample.token_ids)
        self.responses.append(sample)

    @property
    def n_actions(self) -> int:
        """Tokens that were sampled."""
        return sum(len(sample.token_ids) for sample in self.responses)

    @property
    def finish_reason(self) -> str:
        """Of the last response."""
        return self.responses[-1].finish_reason

    @property
    def logprobs(self) -> Floats:
        """Of the sampled tokens of all turns, nats."""
        return np.concatenate([sample.logprobs for sample in self.responses])

    @property
    def cached(self) -> Floats:
        """Of the sampled tokens: tokens of their turn's context read from the prefix cache.

        NaN where the engine does not say.
        """
        counts = [np.nan if s.cached is None else s.cached for s in self.responses]
        return np.repeat(counts, [len(sample.token_ids) for sample in self.responses])

    @property
    def turn(self) -> Ints:
        """[tokens] 0 in the prompt, n from the first token of response n on."""
        turn = np.zeros(len(self.token_ids), np.int64)
        for start in self.contexts:
            turn[start:] += 1
        return turn

    @property
    def sampled(self) -> Bools:
        """[tokens] True where the policy sampled the token."""
        mask = np.zeros(len(self.token_ids), np.bool_)
        for start, sample in zip(self.contexts, self.responses, strict=True):
            mask[start : start + len(sample.token_ids)] = True
        return mask

    @property
    def routed(self) -> NDArray[np.generic] | None:
        """Experts of every forwarded token, [tokens - 1, L, K], as the turns' own forwards chose.

        A response's tokens keep what decoding chose; the next turn's prefill says what its last
        token and the observation went to. None: a turn has none.
        """
        return joined(sample.routed for sample in self.responses)

    @property
    def keys(self) -> NDArray[np.generic] | None:
        """Return what sparse attention selected, as ``Sample.keys``, over all turns."""
        return joined(sample.keys for sample in self.responses)


def joined(parts: Iterable[NDArray[np.generic] | None]) -> NDArray[np.generic] | None:
    """Rows of a growing sequence: of each part those that the parts before it do not have."""
    rows: NDArray[np.generic] | None = None
    for part in parts:
        if part is None:
            return None
        rows = part if rows is None else np.concatenate([rows, part[len(rows) :]])
    return rows


def starting(prompts: Sequence[list[int]], samples: Sequence[Sequence[Sample]]) -> list[Trajectory]:
    """Return sequences of one turn, those of prompt 0 first."""
    return [
        Trajectory.starting(index, ids, sample)
        for index, (ids, group) in enumerate(zip(prompts, samples, strict=True))
        for sample in group
    ]


class TurnDistributions:
    """Whole distributions over all turns: each is captured for itself, and the choice is joined."""

    def __init__(self, engine: Engine, wanted: CaptureRequest) -> None:
        self.engine, self.wanted = engine, wanted
        self.parts: list[dict[str, NDArray[Any]]] = []
        engine.capture_distributions(wanted)

    def begin(self, trajectories: Iterable[tuple[int, Trajectory]]) -> None:
        """Before the next responses to these sequences, given with their numbers."""
        places = tuple((number, each.n_actions) for number, each in trajectories)
        self.wanted = replace(self.wanted, places=places)
        self.engine.capture_distributions(self.wanted)

    def end(self, trajectories: Iterable[tuple[int, Trajectory]]) -> None:
        """After them: keep what was taken of tokens that are theirs.

        A scheduler that runs ahead computes a token after the last of a response, at the place of
        the first of the next one.
        """
        taken = self.engine.captured_distributions()
        counts = {number: each.n_actions for number, each in trajectories}
        if taken:
            own = [index < counts.get(number, 0) for number, index in taken["keys"].tolist()]
            taken = {name: values[own] for name, values in taken.items()}
        self.parts.append(taken)

    def collected(self) -> dict[str, NDArray[Any]]:
        """Of all turns; nothing where one of them could not be captured."""
        return join_collected(self.parts, self.wanted) if all(self.parts) else {}


def play(
    engine: Engine,
    trajectories: Sequence[Trajectory],
    reply: Reply,
    *,
    most_turns: int,
    longest: int,
    max_tokens: int,
    progress: Progress,
    captured: TurnDistributions | None = None,
) -> None:
    """Let the sequences go on, all of a turn together, until nobody replies to them.

    A sequence ends where it was cut (a response without an end cannot be replied to), where there
    is no reply, after ``most_turns`` responses, or where reply and response might not fit into
    ``longest`` tokens. It always ends in a token that was sampled.

    Args:
        trajectories: after their first turn; they grow in place.
    """
    going = list(enumerate(trajectories))
    for turn in range(2, most_turns + 1):
        replied = []
        for number, trajectory in going:
            if trajectory.finish_reason == "length":
                continue
            observation = reply(number, trajectory.responses)
            if observation is None:
                continue
            if len(trajectory.token_ids) + len(observation) + max_tokens > longest:
                continue
            trajectory.token_ids.extend(observation)
            replied.append((number, trajectory))
        if not replied:
            return
        if captured is not None:
            captured.begin(replied)
        answers = engine.generate([t.token_ids for _, t in replied], progress, turn)
        for (_, trajectory), (sample,) in zip(replied, answers, strict=True):
            trajectory.answer(sample)
        if captured is not None:
            captured.end(replied)
        going = replied
