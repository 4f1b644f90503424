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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mismatch.specs import TemperatureIn
from mismatch.training.distributions import Rows, kept

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 192 << 20  # of the logits alive at once, in the head's dtype
STRIP_BYTES = 32 << 20  # of each of the two float32 buffers


@dataclass(frozen=True, slots=True)
class Law:
    """What is asked of every row: the sampling law of the rollout.

    >>> Law(temperature=0.0).scored_temperature
    1.0
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def scored_temperature(self) -> float:
        """Greedy decoding (T = 0) has no distribution of its own: it is scored at T = 1."""
        return self.temperature if self.temperature > 0 else 1.0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0


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
        untempered: logprob at T = 1, where the law's T is another; else None.
        kept_mass: probability that survives top-k, then top-p; None where nothing is cut.
        distributions: of the rows that are watched, [w, …]; see mismatch.training.distributions.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    top1: torch.Tensor
    untempered: torch.Tensor | None = None
    kept_mass: torch.Tensor | None = None
    distributions: torch.Tensor | None = None


def token_stats(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    law: Law | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    rounding: Rounding | None = None,
    watched: Rows | None = None,
) -> TokenStats:
    """Score ``targets`` under the distributions that ``head`` makes of ``hidden``.

    Args:
        hidden: [n, H], the positions that predict the targets.
        targets: [n] token ids.
        head: hidden states [c, H] to logits [c, V], in the dtype that the trainer would have.
        vocabulary: V, which sets how many rows fit into ``chunk_bytes``.
        rounding: what else the trainer rounds.
        watched: the rows whose distributions are kept.

    With gradients on, each strip is recomputed in the backward pass instead of being kept.
    """
    law, rounding = law or Law(), rounding or Rounding()
    logit_bytes = head(hidden[:0]).element_size()
    room = _Room.of(hidden, max(1, min(STRIP_BYTES // (4 * vocabulary), len(targets))), vocabulary)
    slots = targets.new_full((len(targets),), -1) if watched is None else watched.slots
    ids = None if watched is None else watched.ids
    ask = _Ask(law, rounding, watched is not None, ids)
    most = chunk_bytes // (logit_bytes * vocabulary)
    parts = [
        _run(_chunk, states, wanted, slot, head, ask, room)
        for states, wanted, slot in _cut(most, hidden, targets, slots)
    ]
    return TokenStats(*_joined(parts))


@dataclass(frozen=True, slots=True)
class _Ask:
    """What is the same for all rows."""

    law: Law
    rounding: Rounding
    watching: bool = False
    ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Room:
    """Where a strip puts its rows, [rows, V] float32; None: in new memory, as autograd needs it.

    Attributes:
        first: logits, divided logits, probabilities, in turn.
        second: log-probabilities.
    """

    rows: int
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None

    @classmethod
    def of(cls, hidden: torch.Tensor, rows: int, vocabulary: int) -> _Room:
        import torch

        if torch.is_grad_enabled():
            return cls(rows)
        both = hidden.new_empty(2, rows, vocabulary, dtype=torch.float32)
        return cls(rows, both[0], both[1])

    def part(self, count: int) -> _Room:
        """Room for ``count`` rows."""
        if self.first is None or self.second is None:
            return self
        return _Room(count, self.first[:count], self.second[:count])

    def upcast(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.float() if self.first is None else self.first.copy_(raw)


Columns = tuple[Any, ...]  # the fields of TokenStats


def _cut(most: int, *columns: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Even parts of at most ``most`` rows: a short last one would take another matmul kernel."""
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
    ask: _Ask,
    room: _Room,
) -> Columns:
    strips = _cut(room.rows, head(hidden), targets, slots)
    return _joined([_run(_strip, *columns, ask, room) for columns in strips])


def _strip(
    raw: torch.Tensor, targets: torch.Tensor, slots: torch.Tensor, ask: _Ask, room: _Room
) -> Columns:
    import torch

    law, rounding, room = ask.law, ask.rounding, room.part(len(raw))
    logits = room.upcast(raw)
    top1 = logits.detach().max(-1).indices
    untempered = None
    if law.scored_temperature != 1.0:
        plain = torch.log_softmax(logits, -1, out=room.second)
        untempered = plain.gather(-1, targets[:, None])[:, 0]
        if rounding.temperature_in == "fp32":
            logits = torch.div(logits, law.scored_temperature, out=room.first)
        else:
            logits = room.upcast(divide(raw, law.scored_temperature, rounding.temperature_in))
    logps = torch.log_softmax(logits, -1, out=room.second)
    picked = logps.gather(-1, targets[:, None])[:, 0]
    mass = None
    if law.truncates:
        with torch.no_grad():
            mass = kept_mass(logps, law.top_k, law.top_p)
    whole = kept(logps, slots, ask.ids) if ask.watching else None
    terms = torch.exp(logps, out=room.first)
    entropy = -torch.mul(terms, logps, out=room.first).sum(-1)
    if rounding.logprobs is not None:
        picked, entropy = (value.to(rounding.logprobs).float() for value in (picked, entropy))
    return picked, entropy, top1, untempered, mass, whole


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
