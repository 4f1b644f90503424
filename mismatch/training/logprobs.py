"""Logprobs and entropies from hidden states, without ever holding [tokens, vocabulary].

The numerics are the trainer's: the head's matmul in its own dtype, then a float32 log-softmax over
the whole vocabulary. Only the token axis is cut, so each row sees the same arithmetic as in the
naive way; an online logsumexp over vocabulary chunks would differ in the last bits.

It is cut twice. Chunks are large, for the head: few rows read the whole weight for little work, and
some matmul kernels round differently below a few hundred rows (bfloat16 on AMX: at 256 and fewer).
Strips of a chunk are small, for the float32 rows that the softmax takes. Without gradients two
buffers serve all strips: fresh memory of this size goes back to the system at every step, and
getting it again costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Distributions
from mismatch.errors import MismatchError
from mismatch.specs import Sampling, TemperatureIn
from mismatch.types import Ints, Rollout

if TYPE_CHECKING:
    import torch


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
        """The positions of this rollout that the engine captured; None where it captured none."""
        if engine is None:
            return None
        slots = np.full(len(rollout.token_ids), -1, np.int64)
        slots[rollout.actions[engine.positions]] = np.arange(len(engine.positions))
        return cls(engine, slots)

    def rows(self, targets: Ints) -> CapturedRows:
        """Which rows to keep of the tokens ``targets`` [n], indices into T."""
        import torch

        slots = self.slots[targets]
        ids = self.engine.ids
        return CapturedRows(torch.from_numpy(slots), None if ids is None else torch.from_numpy(ids))

    def joined(self, parts: Sequence[tuple[Ints, NDArray[np.float32]]]) -> Distributions:
        """The distributions of all micro-batches, in the engine's order.

        Args:
            parts: (targets, indices into T; rows of :func:`select_rows`) of each micro-batch.

        Raises:
            MismatchError: a position is missing, or occurs twice.
        """
        slots = np.concatenate([self.slots[targets] for targets, _ in parts])
        slots = slots[slots >= 0]
        order = np.argsort(slots, kind="stable")
        if not np.array_equal(slots[order], np.arange(len(self.engine.positions))):
            raise MismatchError(
                f"{len(slots)} distributions were taken, {len(self.engine.positions)} asked for",
                "a rank lost its part; run the pass again",
            )
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
    """The rows to keep of log-probabilities [n, V]: whole, or at the ids and the log of the rest.

    Returns:
        [kept, V] or [kept, k + 1], float32, in the order of the rows.
    """
    import torch

    selected = slots >= 0
    if not selected.any():
        return logps.new_empty((0, logps.shape[-1] if ids is None else ids.shape[-1] + 1))
    rows = logps.detach()[selected.nonzero()[:, 0].to(logps.device)]
    if ids is None:
        return rows
    columns = ids[slots[selected]].to(logps.device)
    rest = rows.scatter(-1, columns, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([rows.gather(-1, columns), rest], dim=-1)


CHUNK_BYTES = 192 << 20  # of the logits alive at once, in the head's dtype
STRIP_BYTES = 32 << 20  # of each of the two float32 buffers


@dataclass(frozen=True, slots=True)
class Rounding:
    """Where a trainer rounds on its way from logits to logprobs; the default: nowhere.

    Attributes:
        temperature_in: as in :class:`mismatch.specs.TrainSpec`.
        logprobs: dtype that logprobs and entropies are rounded to; None: they stay float32.
    """

    temperature_in: TemperatureIn = "fp32"
    logprobs: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Per row, [n], float32 nats (top1: int64).

    Attributes:
        untempered: logprob at T = 1, where the sampling temperature is another; else None.
        kept_mass: probability that survives top-k, then top-p; None where nothing is cut.
        distributions: of the captured rows, as from :func:`select_rows`.
        likeliest_ids, likeliest: [n, k] the k most likely ids (int32), and their logprobs.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    top1: torch.Tensor
    untempered: torch.Tensor | None = None
    kept_mass: torch.Tensor | None = None
    distributions: torch.Tensor | None = None
    likeliest_ids: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None


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
) -> TokenStats:
    """Logprobs and entropies of ``targets`` under the distributions predicted from ``hidden``.

    Args:
        hidden: [n, H], the positions that predict the targets.
        targets: [n] token ids.
        head: hidden states [c, H] to logits [c, V], in the dtype that the trainer would have.
        vocabulary: V, which sets how many rows fit into ``chunk_bytes``.
        sampling: default: temperature 1, nothing cut.
        rounding: where the trainer rounds beside the head.
        captured: the rows whose full distributions are kept.
        likeliest: k, of the most likely ids that are kept of every row.

    With gradients on, each strip is recomputed in the backward pass instead of being kept.
    """
    sampling, rounding = sampling or Sampling(), rounding or Rounding()
    logit_bytes = head(hidden[:0]).element_size()
    buffers = _Buffers.of(
        hidden, max(1, min(STRIP_BYTES // (4 * vocabulary), len(targets))), vocabulary
    )
    slots = targets.new_full((len(targets),), -1) if captured is None else captured.slots
    ids = None if captured is None else captured.ids
    settings = _Settings(sampling, rounding, captured is not None, ids, min(likeliest, vocabulary))
    most = chunk_bytes // (logit_bytes * vocabulary)
    parts = [
        _run(_chunk, states, ids_of_chunk, slot, head, settings, buffers)
        for states, ids_of_chunk, slot in _cut(most, hidden, targets, slots)
    ]
    return TokenStats(*_joined(parts))


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings that all rows share."""

    sampling: Sampling
    rounding: Rounding
    capturing: bool = False
    ids: torch.Tensor | None = None
    likeliest: int = 0


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Reused memory for the rows of a strip, [rows, V] float32; None: allocate, as autograd needs.

    Attributes:
        first: logits, then divided logits, then probabilities.
        second: log-probabilities.
    """

    rows: int
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None

    @classmethod
    def of(cls, hidden: torch.Tensor, rows: int, vocabulary: int) -> _Buffers:
        import torch

        if torch.is_grad_enabled():
            return cls(rows)
        both = hidden.new_empty(2, rows, vocabulary, dtype=torch.float32)
        return cls(rows, both[0], both[1])

    def part(self, count: int) -> _Buffers:
        """The first ``count`` rows."""
        if self.first is None or self.second is None:
            return self
        return _Buffers(count, self.first[:count], self.second[:count])

    def upcast(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.float() if self.first is None else self.first.copy_(raw)


Columns = tuple[Any, ...]  # the fields of TokenStats


def _cut(most: int, *columns: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Even parts of at most ``most`` rows: a short last part would select another matmul kernel."""
    count = max(1, -(-len(columns[0]) // max(1, most)))
    return zip(*(column.tensor_split(count) for column in columns), strict=True)


def _run(work: Callable[..., Columns], *args: Any) -> Columns:
    import torch
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return work(*args)
    columns: Columns = checkpoint(work, *args, use_reentrant=False)
    return columns


def _joined(parts: list[Columns]) -> Columns:
    import torch

    columns = zip(*parts, strict=True)
    return tuple(None if column[0] is None else torch.cat(column) for column in columns)


def _chunk(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    slots: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    settings: _Settings,
    buffers: _Buffers,
) -> Columns:
    strips = _cut(buffers.rows, head(hidden), targets, slots)
    return _joined([_run(_strip, *columns, settings, buffers) for columns in strips])


def _strip(
    raw: torch.Tensor,
    targets: torch.Tensor,
    slots: torch.Tensor,
    settings: _Settings,
    buffers: _Buffers,
) -> Columns:
    import torch

    sampling, rounding, buffers = settings.sampling, settings.rounding, buffers.part(len(raw))
    logits = buffers.upcast(raw)
    top1 = logits.detach().max(-1).indices
    untempered = None
    if sampling.scored_temperature != 1.0:
        plain = torch.log_softmax(logits, -1, out=buffers.second)
        untempered = plain.gather(-1, targets[:, None])[:, 0]
        if rounding.temperature_in == "fp32":
            logits = torch.div(logits, sampling.scored_temperature, out=buffers.first)
        else:
            logits = buffers.upcast(
                divide(raw, sampling.scored_temperature, rounding.temperature_in)
            )
    logps = torch.log_softmax(logits, -1, out=buffers.second)
    picked = logps.gather(-1, targets[:, None])[:, 0]
    mass = None
    if sampling.truncates:
        with torch.no_grad():
            mass = kept_mass(logps, sampling.top_k, sampling.top_p)
    whole = select_rows(logps, slots, settings.ids) if settings.capturing else None
    top = logps.detach().topk(settings.likeliest, dim=-1) if settings.likeliest else None
    terms = torch.exp(logps, out=buffers.first)
    entropy = -torch.mul(terms, logps, out=buffers.first).sum(-1)
    if rounding.logprobs is not None:
        picked, entropy = (value.to(rounding.logprobs).float() for value in (picked, entropy))
    ids, values = (None, None) if top is None else (top.indices.int(), top.values)
    return picked, entropy, top1, untempered, mass, whole, ids, values


def divide(logits: torch.Tensor, temperature: float, where: TemperatureIn) -> torch.Tensor:
    """Logits over the temperature in float32, rounded where the trainer rounds.

    >>> import torch
    >>> x = torch.tensor([12.375], dtype=torch.bfloat16)
    >>> [divide(x, 0.7, where).item() for where in ("logits", "logits-rounded")]
    [17.625, 17.75]
    """
    import torch

    if where == "fp32":
        return logits.float() / temperature
    if where == "logits-rounded":
        return (logits / torch.tensor(temperature, dtype=logits.dtype)).float()
    return (logits / temperature).float()


def kept_mass(logps: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Probability that survives top-k and then top-p, per row of log-probabilities [n, V].

    The definition is vLLM's: top-k keeps everything not below the k-th largest (ties included);
    top-p then drops, from the least likely up, what sums to at most 1 - p of the *renormalised*
    rest, and always keeps the most likely token.
    """
    import torch

    ascending = logps.sort(dim=-1).values
    if 0 < top_k < ascending.shape[-1]:
        threshold = ascending[:, -top_k, None]
        ascending = ascending.masked_fill(ascending < threshold, -torch.inf)
    mass = ascending.exp()
    if top_p < 1.0:
        tail = torch.softmax(ascending, -1).cumsum(-1) <= 1.0 - top_p
        tail[:, -1] = False
        mass = mass.masked_fill(tail, 0.0)
    return mass.sum(-1)
