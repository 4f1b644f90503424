"""The sampling law on logits, as vLLM defines it: temperature, then top-k, then top-p."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch.types import Sampling

if TYPE_CHECKING:
    import torch


def keep_mask(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Which tokens survive top-k and then top-p, [..., V] bool; ``logits`` are tempered already.

    Top-k keeps all that equal the k-th largest. Top-p is over what top-k left, renormalised: the
    smallest set of most likely tokens whose mass reaches ``top_p``, and always the most likely one.
    """
    import torch

    keep = torch.ones_like(logits, dtype=torch.bool)
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        keep = logits >= kth
    if sampling.top_p < 1.0:
        left = logits.masked_fill(~keep, -torch.inf)
        ordered, order = left.sort(dim=-1)
        below = ordered.softmax(dim=-1).cumsum(dim=-1)  # mass of this token and all less likely
        dropped = below <= 1.0 - sampling.top_p
        dropped[..., -1] = False
        keep &= ~torch.zeros_like(keep).scatter(-1, order, dropped)
    return keep


def law_logprobs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities of the law that samples, float32, -inf where it never goes.

    At T = 0 (greedy) there is no such law: the raw log-probabilities at T = 1.
    """
    import torch

    if sampling.temperature == 0:
        return logits.float().log_softmax(dim=-1)
    tempered = logits.float() / sampling.temperature
    if sampling.truncates:
        tempered = tempered.masked_fill(~keep_mask(tempered, sampling), -torch.inf)
    return tempered.log_softmax(dim=-1)
