"""Logprobs and entropies from hidden states, without ever holding [tokens, vocabulary].

The numerics are the trainer's: the matmul in the head's dtype, then a float32 log-softmax over
the whole vocabulary. Only the token axis is cut, so each row sees the same arithmetic as in the
naive way; an online logsumexp over vocabulary chunks would differ in the last bits.

It is cut twice. Chunks are large, for the head: few rows read the whole weight for little work, and
some matmul kernels round differently below a few hundred rows (bfloat16 on AMX: at 256 and fewer).
Strips of a chunk are small, for the float32 rows that the softmax takes. Without gradients two
buffers serve all strips: fresh memory of this size goes back to the system at every step, and
getting it again costs more than the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint

from mismatch.captures import Distributions
from mismatch.errors import MismatchError
from mismatch.specs import Sampling, TemperatureIn
from mismatch.training.packing import CHUNK_BYTES, STRIP_BYTES
from mismatch.types import Ints, Rollout


@dataclass(frozen=True, slots=True)
class DistributionCapture:
    """Which distributions of a pass to keep.

    Attributes:
        engine: the engine's distributions; their positions and ids are used, not their logprobs.
        slots: [T] row of ``engine`` for each token of the rollout, or -1.
    """

    engine: Distributions
    slots: Ints

    @classmethod
    def of(cls, engine: Distributions | None, rollout: Rollout) -> DistributionCapture | None:
        """Return the positions of this rollout that the engine captured; None without any."""
        if engine is None:
            return None
        slots = np.full(len(rollout.token_ids), -1, np.int64)
        slots[rollout.actions[engine.positions]] = np.arange(len(engine.positions))
        return cls(engine, slots)

    def rows(self, targets: Ints) -> CapturedRows:
        """Return which rows to keep of the tokens ``targets`` [n], indices into T."""
        slots = self.slots[targets]
        ids = self.engine.ids
        return CapturedRows(torch.from_numpy(slots), None if ids is None else torch.from_numpy(ids))

    def joined(self, parts: Sequence[tuple[Ints, NDArray[np.float32]]]) -> Distributions:
        """Return the distributions of all micro-batches, in the engine's order.

        Args:
            parts: (targets, indices into T; rows of :func:`select_rows`) of each micro-batch.

        Raises:
            MismatchError: a position is missing, or occurs twice.
        """
        slots = np.concatenate([self.slots[targets] for targets, _ in parts])
        slots = slots[slots >= 0]
        order = np.argsort(slots, kind="stable")
        if not np.array_equal(slots[order], np.arange(len(self.engine.positions))):
            fault = f"{len(slots)} distributions were taken, {len(self.engine.positions)} asked for"
            raise MismatchError(fault, "a rank lost its part; run the pass again")
        values = np.concatenate([rows for _, rows in parts])[order]
        if self.engine.ids is None:
            return Distributions(self.engine.positions, values, values.shape[1])
        return Distributions(
            self.engine.positions,
            values[:, :-1],
            self.engine.vocabulary,
            self.engine.ids,
            values[:, -1],
        )


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Which rows of one forward pass to keep; CPU tensors, so that reading them never syncs.

    Attributes:
        slots: [n] row of ``ids`` for each forwarded row, or -1: not kept.
        ids: [M, k], or None: keep the whole vocabulary.
    """

    slots: torch.Tensor
    ids: torch.Tensor | None


def select_rows(logps: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Return the rows to keep of log-probabilities [n, V]: whole, or at the ids and the rest's log.

    Returns:
        [kept, V] or [kept, k + 1], float32, in the order of the rows.
    """
    selected = slots >= 0
    if not selected.any():
        return logps.new_empty((0, logps.shape[-1] if ids is None else ids.shape[-1] + 1))
    rows = logps.detach()[selected.nonzero()[:, 0].to(logps.device)]
    if ids is None:
        return rows
    columns = ids[slots[selected]].to(logps.device)
    rest = rows.scatter(-1, columns, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([rows.gather(-1, columns), rest], dim=-1)


@dataclass(frozen=True, slots=True)
class Earlier:
    """The distinct ids in front of each row: the first ``places[:, 1]`` of a row of ``ids``.

    Attributes:
        ids: [B, F] ids of each sequence in the order of their first appearance, filled with 0.
        places: [n, 2] row of ``ids``, and how many of them came before.
    """

    ids: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, rollout: Rollout, targets: Ints, device: torch.device) -> Earlier:
        """Of action tokens of a rollout, by their indices into T."""
        sequences = np.asarray(rollout.sequence_of_token[targets])
        rows, row_of = np.unique(sequences, return_inverse=True)
        firsts = []
        for a, b in zip(rollout.offsets[rows], rollout.offsets[rows + 1], strict=True):
            firsts.append(np.sort(np.unique(rollout.token_ids[a:b], return_index=True)[1]) + a)
        ids = np.zeros((len(rows), max(map(len, firsts), default=0)), np.int64)
        places = np.zeros((len(targets), 2), np.int64)
        for row, at in enumerate(firsts):
            ids[row, : len(at)] = rollout.token_ids[at]
            own = row_of == row
            places[own, 0], places[own, 1] = row, np.searchsorted(at, targets[own])
        return cls(torch.from_numpy(ids).to(device), torch.from_numpy(places).to(device))

    def mass(self, logps: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the probability of these ids together, [n], from log-probabilities [n, V]."""
        there = torch.arange(self.ids.shape[1], device=places.device) < places[:, 1:]
        return (logps.gather(-1, self.ids[places[:, 0]]).exp() * there).sum(-1)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Where a trainer rounds on its way from logits to logprobs; the default: nowhere."""

    temperature_in: TemperatureIn = "fp32"
    """As in :class:`mismatch.specs.TrainSpec`."""
    logprobs: torch.dtype | None = None
    """The dtype that logprobs and entropies are rounded to; None: they stay float32."""


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Per row, [n], float32 nats (top1: int64).

    Attributes:
        untempered: logprob at T = 1, where the sampling temperature is another; else None.
        kept_mass: probability that survives the cuts; None where nothing is cut.
        distributions: of the captured rows, as from :func:`select_rows`.
        likeliest_ids, likeliest: [n, k] the k most likely ids (int32), and their logprobs.
        end_mass: probability that an end token comes; None where it was not asked for.
        earlier_mass: likewise, of a token that stood before in the sequence.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    top1: torch.Tensor
    untempered: torch.Tensor | None = None
    kept_mass: torch.Tensor | None = None
    distributions: torch.Tensor | None = None
    likeliest_ids: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None
    end_mass: torch.Tensor | None = None
    earlier_mass: torch.Tensor | None = None


Columns = tuple[Any, ...]  # the fields of TokenStats


def token_stats(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    sampling: Sampling | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    rounding: Rounding | None = None,
    captured: CapturedRows | None = None,
    likeliest: int = 0,
    ends: tuple[int, ...] = (),
    earlier: Earlier | None = None,
) -> TokenStats:
    """Return logprobs and entropies of ``targets`` [n] as predicted from ``hidden`` [n, H].

    Args:
        head: hidden states [c, H] to logits [c, V], in the dtype that the trainer would have.
        vocabulary: V, which sets how many rows fit into ``chunk_bytes``.
        sampling: default: temperature 1, nothing cut.
        rounding: where the trainer rounds in addition to the head.
        captured: the rows whose full distributions are kept.
        likeliest: k, of the most likely ids that are kept of every row.
        ends: ids whose probabilities are summed in every row.
        earlier: those of each row; None: they are not summed.

    With gradients on, each strip is recomputed in the backward pass instead of being kept.
    """
    sampling, rounding = sampling or Sampling(), rounding or Rounding()
    temperature, k = sampling.scored_temperature, min(likeliest, vocabulary)
    strip_rows = max(1, min(STRIP_BYTES // (4 * vocabulary), len(targets)))
    chunk_rows = chunk_bytes // (head(hidden[:0]).element_size() * vocabulary)
    slots = targets.new_full((len(targets),), -1) if captured is None else captured.slots
    places = slots if earlier is None else earlier.places
    buffers = None  # autograd needs separate memory for every strip
    if not torch.is_grad_enabled():
        buffers = hidden.new_empty(2, strip_rows, vocabulary, dtype=torch.float32)

    def recomputed(work: Callable[..., Columns], *columns: torch.Tensor) -> Columns:
        if not torch.is_grad_enabled():
            return work(*columns)
        result: Columns = checkpoint(work, *columns, use_reentrant=False)
        return result

    def chunk(states: torch.Tensor, *rest: torch.Tensor) -> Columns:
        return _joined(recomputed(strip, *part) for part in _cut(strip_rows, head(states), *rest))

    def strip(
        raw: torch.Tensor, ids: torch.Tensor, slot: torch.Tensor, place: torch.Tensor
    ) -> Columns:
        # ``first`` holds logits, then divided logits, then probabilities.
        first, second = (None, None) if buffers is None else buffers[:, : len(raw)]
        logits = raw.float() if first is None else first.copy_(raw)
        top1 = logits.detach().max(-1).indices
        untempered = mass = whole = top_ids = top = ending = before = None
        if temperature != 1.0:
            plain = torch.log_softmax(logits, -1, out=second)
            untempered = plain.gather(-1, ids[:, None])[:, 0]
            if rounding.temperature_in == "fp32":
                logits = torch.div(logits, temperature, out=first)
            else:
                divided = divide(raw, temperature, rounding.temperature_in)
                logits = divided if first is None else first.copy_(divided)
        logps = torch.log_softmax(logits, -1, out=second)
        picked = logps.gather(-1, ids[:, None])[:, 0]
        if sampling.truncates:
            with torch.no_grad():
                mass = kept_mass(logps, sampling)
        if captured is not None:
            whole = select_rows(logps, slot, captured.ids)
        if k:
            best = logps.detach().topk(k, dim=-1)
            top_ids, top = best.indices.int(), best.values
        if ends:
            ending = logps.detach()[:, ends].exp().sum(-1)
        if earlier is not None:
            before = earlier.mass(logps.detach(), place)
        terms = torch.exp(logps, out=first)
        entropy = -torch.mul(terms, logps, out=first).sum(-1)
        if rounding.logprobs is not None:
            picked, entropy = (x.to(rounding.logprobs).float() for x in (picked, entropy))
        return picked, entropy, top1, untempered, mass, whole, top_ids, top, ending, before

    chunks = _cut(chunk_rows, hidden, targets, slots, places)
    return TokenStats(*_joined(recomputed(chunk, *part) for part in chunks))


def _cut(most: int, *columns: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Even parts of at most ``most`` rows: a short last part would select another matmul kernel."""
    count = max(1, -(-len(columns[0]) // max(1, most)))
    return zip(*(column.tensor_split(count) for column in columns), strict=True)


def _joined(parts: Iterable[Columns]) -> Columns:
    columns = zip(*parts, strict=True)
    return tuple(None if column[0] is None else torch.cat(column) for column in columns)


def divide(logits: torch.Tensor, temperature: float, where: TemperatureIn) -> torch.Tensor:
    """Logits over the temperature in float32, rounded where the trainer rounds.

    >>> import torch
    >>> x = torch.tensor([12.375], dtype=torch.bfloat16)
    >>> [divide(x, 0.7, where).item() for where in ("logits", "logits-rounded")]
    [17.625, 17.75]
    """
    if where == "fp32":
        return logits.float() / temperature
    if where == "logits-rounded":
        return (logits / torch.tensor(temperature, dtype=logits.dtype)).float()
    return (logits / temperature).float()


def kept_mass(logps: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return probability that survives the cuts, per row of log-probabilities [n, V].

    The definition is vLLM's: min-p keeps what is at least that share of the likeliest; top-k then
    keeps everything not below the k-th largest (ties included); top-p then drops, from the least
    likely up, what sums to at most 1 - p of the *renormalised* rest, and always keeps the most
    likely token.
    """
    ascending = logps.sort(dim=-1).values
    if sampling.min_p > 0.0:
        floor = ascending[:, -1:] + math.log(sampling.min_p)
        ascending = ascending.masked_fill(ascending < floor, -torch.inf)
    if 0 < sampling.top_k < ascending.shape[-1]:
        threshold = ascending[:, -sampling.top_k, None]
        ascending = ascending.masked_fill(ascending < threshold, -torch.inf)
    mass = ascending.exp()
    if sampling.top_p < 1.0:
        tail = torch.softmax(ascending, -1).cumsum(-1) <= 1.0 - sampling.top_p
        tail[:, -1] = False
        mass = mass.masked_fill(tail, 0.0)
    return mass.sum(-1)
