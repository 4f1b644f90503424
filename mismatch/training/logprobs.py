"""Logprobs and entropies from hidden states, without ever holding [tokens, vocabulary].

The numerics are the trainer's: the head's matmul in its own dtype, then a float32 log-softmax over
the whole vocabulary. Only the token axis is cut, so each row sees the same arithmetic as in the
naive way; an online logsumexp over vocabulary chunks would differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 256 << 20  # of the float32 rows alive at once
ROWS_ALIVE = 3  # logits, log-probabilities, probabilities


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
class TokenStats:
    """Per row, [n], float32 nats (top1: int64).

    Attributes:
        untempered: logprob at T = 1, where the law's T is another; else None.
        kept_mass: probability that survives top-k, then top-p; None where nothing is cut.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    top1: torch.Tensor
    untempered: torch.Tensor | None = None
    kept_mass: torch.Tensor | None = None


def token_stats(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    law: Law | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenStats:
    """Score ``targets`` under the distributions that ``head`` makes of ``hidden``.

    Args:
        hidden: [n, H], the positions that predict the targets.
        targets: [n] token ids.
        head: hidden states [c, H] to logits [c, V], in the dtype that the trainer would have.
        vocabulary: V, which sets how many rows fit into ``chunk_bytes``.

    With gradients on, each chunk is recomputed in the backward pass instead of being kept.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    law = law or Law()
    rows = max(1, chunk_bytes // (ROWS_ALIVE * 4 * vocabulary))
    # Even chunks: a short last one would take another matmul kernel, and other last bits.
    count = max(1, -(-len(targets) // rows))
    parts = []
    for states, wanted in zip(hidden.tensor_split(count), targets.tensor_split(count), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, states, wanted, head, law, use_reentrant=False))
        else:
            parts.append(_chunk(states, wanted, head, law))
    columns: list[Any] = [
        None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)
    ]
    return TokenStats(*columns)


def _chunk(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    law: Law,
) -> tuple[torch.Tensor | None, ...]:
    import torch

    logits = head(hidden).float()
    tempered = logits if law.scored_temperature == 1.0 else logits / law.scored_temperature
    logps = torch.log_softmax(tempered, dim=-1)
    picked = logps.gather(-1, targets[:, None])[:, 0]
    untempered = None
    if law.scored_temperature != 1.0:
        untempered = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
    with torch.no_grad():
        kept = kept_mass(logps, law.top_k, law.top_p) if law.truncates else None
        top1 = logits.argmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    return picked, entropy, top1, untempered, kept


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
