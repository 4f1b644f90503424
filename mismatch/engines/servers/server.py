"""What every kind of server is asked for, and what it has to answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from mismatch.engines.base import ExpertLayout, Sample
from mismatch.engines.servers.client import Client
from mismatch.types import Floats, SideFacts

LARGEST_ID = 1 << 31
Ids = Sequence[int]
Settings = dict[str, Any]  # of Server.settings: all parameters of sampling as they are sent


def checked(sample: Sample) -> Sample:
    """Return a sample whose ids and logprobs can be true.

    Raises:
        ValueError: they cannot.
    """
    if not all(type(token) is int and 0 <= token < LARGEST_ID for token in sample.token_ids):
        raise ValueError("token ids that are none")
    if sample.likeliest is not None and len(sample.likeliest.ids) != len(sample.token_ids):
        raise ValueError("likeliest tokens of other positions")
    if len(sample.logprobs) != len(sample.token_ids) or not np.isfinite(sample.logprobs).all():
        raise ValueError("logprobs that are no numbers")
    return sample


def context_length(value: Any) -> int | None:
    """Return the tokens of the longest sequence; None: the server does not say."""
    length = None if value is None else int(value)
    if length is not None and length < 1:
        raise ValueError("a context of no tokens")
    return length


@dataclass
class Server(ABC):
    """A server: how it is asked, what it says about itself, and what probes showed.

    Every request raises as :meth:`mismatch.engines.servers.client.Client.post` does; an answer that
    lacks what was asked for is a failed request too. None: it does not say, or could not be found.

    Attributes:
        settings: of a Sampling, stop ids and stop texts all parameters as they are sent.
        spare: tokens of the context that it keeps free, in addition to one for scoring.
        names: every name or path under which it knows the model; requests carry the first.
        max_model_len: tokens of a prompt and its response.
        details: other settings that belong into a fingerprint.
        configuration: a hash of its settings, or its weight version: the same in all its answers.
        tempered: its logprobs of sampled tokens are those after the temperature.
        truncated: they are renormalised over what top-p, top-k and min-p keep.
        prefill: it scores given tokens.
        layout: the layers whose routed experts it returns.
        reasons: capability -> why it is missing.
        texts: token ids of the probe texts.
        probe: logprobs of the probe tokens at the start.
        noise: mean |difference| of two probes then.
        drift: largest mean |difference| from the first probe.
    """

    kind: ClassVar[str]
    settings: ClassVar[Callable[..., Settings]]
    spare: ClassVar[int] = 0
    client: Client
    version: str
    names: tuple[str, ...]
    max_model_len: int | None = None
    dtype: str | None = None
    details: SideFacts = field(default_factory=SideFacts)
    configuration: str | None = None
    tempered: bool | None = None
    truncated: bool | None = None
    prefill: bool = True
    layout: ExpertLayout | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    texts: tuple[tuple[int, ...], ...] = ()
    probe: Floats = field(default_factory=lambda: np.empty(0))
    noise: float = 0.0
    drift: float = 0.0

    @property
    def url(self) -> str:
        return self.client.address

    @classmethod
    @abstractmethod
    async def recognised(cls, client: Client, served: str | None) -> Self | None:
        """Return a server of this kind; None, or a request refused: it is another kind.

        Args:
            served: the model's name there, where several are served; None: the base model.
        """

    @abstractmethod
    async def generate(
        self, ids: Ids, settings: Settings, seed: int | None = None, likeliest: int = 0
    ) -> tuple[Sample, str | None]:
        """Sample one continuation; what the server said about its configuration comes with it.

        Args:
            likeliest: tokens to return with each sampled one, where the server does.
        """

    @abstractmethod
    async def score(self, ids: Ids, start: int) -> Floats:
        """Return logprobs at T = 1 of the tokens ``start:`` (at least 1), by prefill."""
