"""Take whole distributions out of an engine while it samples, at few positions; routed experts.

Nothing waits for the device here: what is taken stays there until sampling has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import WHOLE_VOCABULARY, Distributions, priority
from mismatch.errors import CorruptCapture, MismatchError
from mismatch.types import Ints, Rollout, Sampling, SideFacts

if TYPE_CHECKING:
    import torch


Packed = tuple[tuple[int, ...], str, bytes]


def pack(array: NDArray[Any]) -> Packed:
    """Return an array as plain data that every serialiser can carry."""
    return array.shape, array.dtype.str, array.tobytes()


def unpack(packed: Packed) -> NDArray[Any]:
    """Undo :func:`pack`; the tuple may have become a list on its way."""
    shape, dtype, data = packed
    return np.frombuffer(data, dtype=dtype).reshape(tuple(shape))


def join_steps(parts: list[tuple[int, NDArray[Any]]]) -> NDArray[Any]:
    """Join the steps (first position, rows [tokens, L, K]) of one request: rows by position.

    A preempted request is forwarded again from its start: the first forward is the one whose
    logits were sampled from, so the first row of a position stays.

    Raises:
        ValueError: a position that no step forwarded (a cached prefix has no rows).
    """
    length = max(start + len(rows) for start, rows in parts)
    widest = np.result_type(*(rows.dtype for _, rows in parts))
    joined = np.zeros((length, *parts[0][1].shape[1:]), widest)
    filled = np.zeros(length, bool)
    for start, rows in parts:
        new = ~filled[start : start + len(rows)]
        joined[start : start + len(rows)][new] = rows[new]
        filled[start : start + len(rows)] = True
    if not filled.all():
        raise ValueError(f"no experts for position {int(np.flatnonzero(~filled)[0])}")
    return joined


def stable_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return ids of the k largest logits of each row, [T, k]; of equal logits the lower id wins.

    The tie rule of the package triton_kernels (``topk_details/_topk_forward.py``), whose fused
    kernels say no ids. ``torch.topk`` promises none, and router logits in bf16 do tie.
    """
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def keep_mask(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Tell which tokens survive the cuts, [..., V] bool; ``logits`` are tempered.

    The order is vLLM's: min-p, top-k, top-p (SGLang's has min-p last, which differs only where
    top-p cuts too). Min-p keeps what has that share of the likeliest's probability; top-k all that
    equal the k-th largest; top-p, over what is left, renormalised, the smallest set of most likely
    tokens whose mass reaches ``top_p``, and always the most likely one.
    """
    import torch

    keep = torch.ones_like(logits, dtype=torch.bool)
    if sampling.min_p > 0.0:
        keep = logits >= logits.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
    if 0 < sampling.top_k < logits.shape[-1]:
        keep &= logits >= logits.topk(sampling.top_k, dim=-1).values[..., -1:]
    if sampling.top_p < 1.0:
        left = logits.masked_fill(~keep, -torch.inf)
        ordered, order = left.sort(dim=-1)
        below = ordered.softmax(dim=-1).cumsum(dim=-1)  # mass of this token and all less likely
        dropped = below <= 1.0 - sampling.top_p
        dropped[..., -1] = False
        keep &= ~torch.zeros_like(keep).scatter(-1, order, dropped)
    return keep


def law_logprobs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return logprobs of the distribution that samples, float32, -inf for what it never samples.

    At T = 0 (greedy) there is none: the raw log-probabilities at T = 1.
    """
    import torch

    if sampling.temperature == 0:
        return logits.float().log_softmax(dim=-1)
    tempered = logits.float() / sampling.temperature
    if sampling.truncates:
        tempered = tempered.masked_fill(~keep_mask(tempered, sampling), -torch.inf)
    return tempered.log_softmax(dim=-1)


# Between the logprob that an engine reported and the one taken from the same logits; the engine's
# own arithmetic is float32, whatever the model's.
SAME = 1e-3


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What to take, as plain data that can be sent to an engine's worker.

    >>> CaptureRequest(positions=512, top_k=64, seed=0, law=Sampling()).positions
    512

    Attributes:
        positions: how many action tokens, at most.
        top_k: ids to keep of each distribution, where the vocabulary is too large to keep it whole.
        law: how the engine's own logprobs are distributed.
        places: of every request its sequence and how many action tokens that has already; empty:
            each request begins a sequence.
    """

    positions: int
    top_k: int
    seed: int
    law: Sampling
    places: tuple[tuple[int, int], ...] = ()


def reported_law(facts: SideFacts, sampling: Sampling) -> Sampling:
    """Return the sampling whose logprobs an engine reports while decoding, by its fingerprint."""
    cut, temperature = bool(facts["logprobs_truncated"]), facts["logprobs_temperature"]
    assert temperature is not None, "an engine that takes distributions knows it"
    law = sampling if cut else sampling.uncut()
    return replace(law, temperature=temperature)


@dataclass
class DistributionRecorder:
    """Keeps the distributions of the positions with the smallest priorities seen so far.

    Of A action tokens it takes about M (1 + log(A / M)), holds at most 2 M, and gives M.
    """

    wanted: CaptureRequest
    taken: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(sequence, index) -> (priority, columns of its step, its row there)."""
    largest: int = (1 << 64) - 1
    """Priorities above it are not among the M smallest."""

    def take(self, sequence: Ints, index: Ints, logits: torch.Tensor) -> None:
        """Look at one step of sampling: row i of ``logits`` [B, V] gives token i its distribution.

        Args:
            sequence: of each token, the place of its request among those of this call.
            index: from 0, its place in the response; below 0: no action.
        """
        if self.wanted.places:
            places = np.asarray(self.wanted.places, np.int64)
            inside = (index >= 0) & (sequence >= 0) & (sequence < len(places))
            sequence, before = places[np.where(inside, sequence, 0)].T
            index = np.where(inside, before + index, -1)
        numbers = priority(self.wanted.seed, sequence, index)
        keys = list(zip(sequence.tolist(), index.tolist(), strict=True))
        small = np.flatnonzero((index >= 0) & (numbers <= np.uint64(self.largest)))
        ranked = small[np.argsort(numbers[small], kind="stable")].tolist()
        # One that is there was forwarded again after a preemption: the first was sampled from.
        rows = [row for row in ranked if keys[row] not in self.taken][: self.wanted.positions]
        if not rows:
            return
        part = kept_columns(law_logprobs(logits[rows], self.wanted.law), self.wanted.top_k)
        for column, row in enumerate(rows):
            self.taken[keys[row]] = (int(numbers[row]), part, column)
        if len(self.taken) >= 2 * self.wanted.positions:
            self._drop_largest()

    def _drop_largest(self) -> None:
        ranked = sorted(self.taken.items(), key=lambda item: item[1][0])
        self.taken = dict(ranked[: self.wanted.positions])
        if len(ranked) >= self.wanted.positions:
            self.largest = ranked[self.wanted.positions - 1][1][0]

    def collected(self) -> dict[str, NDArray[Any]]:
        """Return all as arrays: "keys" [M, 2] and the columns of :func:`kept_columns`."""
        self._drop_largest()
        if not self.taken:
            return {}
        import torch

        keys = sorted(self.taken)
        spots = [self.taken[key][1:] for key in keys]
        arrays: dict[str, NDArray[Any]] = {"keys": np.asarray(keys, np.int64)}
        for name in spots[0][0]:
            rows = [part[name][column] for part, column in spots]
            arrays[name] = torch.stack(rows).cpu().numpy()
        return arrays


def join_collected(
    parts: Sequence[dict[str, NDArray[Any]]], wanted: CaptureRequest
) -> dict[str, NDArray[Any]]:
    """Return what one recorder would have collected, from several of other sequences."""
    filled = [part for part in parts if part]
    if not filled:
        return {}
    joined = {name: np.concatenate([part[name] for part in filled]) for name in filled[0]}
    numbers = priority(wanted.seed, *joined["keys"].T)
    kept = np.sort(np.argsort(numbers, kind="stable")[: wanted.positions])
    return {name: values[kept] for name, values in joined.items()}


def kept_columns(logprobs: torch.Tensor, top_k: int) -> dict[str, torch.Tensor]:
    """Return what is kept of rows [B, V]: all, or the ``top_k`` likeliest and the rest's mass."""
    if logprobs.shape[-1] <= max(WHOLE_VOCABULARY, top_k):
        return {"logprobs": logprobs}
    import torch

    values, ids = logprobs.topk(top_k, dim=-1)
    rest = logprobs.scatter(-1, ids, -torch.inf).logsumexp(dim=-1)
    return {"logprobs": values, "ids": ids, "rest": rest}


def build_distributions(
    collected: dict[str, NDArray[Any]], rollout: Rollout, logprobs: NDArray[Any], vocabulary: int
) -> Distributions:
    """Return what a recorder has collected, in the rollout's order and compared with reports.

    Args:
        logprobs: [A] as the engine reported them for the tokens that it sampled.

    Raises:
        CorruptCapture: nothing, or distributions that are not those that the tokens came from.
    """
    if not collected:
        raise CorruptCapture("no distribution was taken", "--exact-kl 0 switches it off")
    actions = np.concatenate([[0], np.cumsum(rollout.action_mask)])[rollout.offsets]
    sequence, index = collected["keys"].T
    # A scheduler that runs ahead computes a token after the last: no action, dropped.
    real = (sequence < rollout.n_sequences) & (index >= 0)
    real &= index < np.diff(actions)[np.where(real, sequence, 0)]
    positions = (actions[np.where(real, sequence, 0)] + index)[real]
    order = np.argsort(positions)
    parts = {name: values[real][order] for name, values in collected.items() if name != "keys"}
    ids = parts.get("ids")
    distributions = Distributions(
        positions=positions[order].astype(np.int64),
        logprobs=parts["logprobs"].astype(np.float32),
        vocabulary=parts["logprobs"].shape[1] if ids is None else vocabulary,
        ids=None if ids is None else ids.astype(np.int64),
        rest=parts.get("rest"),
    )
    # The sampled token must have the log-probability there that the engine reported for it; with
    # another value, rows were mixed up, or the distribution is not the one reported.
    tokens = rollout.token_ids[rollout.actions][distributions.positions]
    try:
        law = distributions.law("the engine")
    except MismatchError as error:
        raise CorruptCapture(error.message, error.fix) from error
    column = distributions.column(tokens)
    kept = np.ones(len(column), bool) if distributions.whole else column < law.shape[1] - 1
    given = law[np.arange(len(law)), column][kept]
    with np.errstate(invalid="ignore"):
        off = ~(np.abs(given - logprobs[distributions.positions][kept]) <= SAME)
    if off.any():
        raise CorruptCapture(
            f"{int(off.sum())} of {len(off)} distributions give the sampled token another "
            "log-probability than the engine reported",
            "--exact-kl 0 switches it off",
        )
    return distributions
