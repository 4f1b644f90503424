"""What every kind of server has to be asked for, and what it has to answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mismatch.engines.base import ExpertLayout, Sample
from mismatch.engines.servers.http import RetryingClient
from mismatch.engines.sync_drivers import Held
from mismatch.types import Floats, Sampling

LARGEST_ID = 1 << 31


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says about itself.

    Example::

        ServerFacts("vllm", "0.32.0", "tiny", ("tiny", "tiny-gpt-oss"), max_model_len=1024)

    Attributes:
        kind: "vllm" or "sglang".
        model: the name that requests have to carry.
        names: every name or path under which it knows the model.
        max_model_len: tokens of a prompt and its response.
        dtype: "bf16" …; None: it does not say.
        spare: tokens of the context that it keeps free, beside one for scoring.
        started: a number that is another one after a restart; None: it gives none.
        weight_version: changes with the weights, where an operator sets it.
        configuration: a hash of its settings, where it gives one.
        details: other settings that belong into a fingerprint.
    """

    kind: str
    version: str
    model: str
    names: tuple[str, ...]
    max_model_len: int | None = None
    spare: int = 0
    dtype: str | None = None
    started: float | None = None
    weight_version: str | None = None
    configuration: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A sample, and what the server said about itself beside it.

    Attributes:
        identity: equal in all answers of one server with one configuration and weight version.
    """

    sample: Sample
    identity: str | None = None


def checked(sample: Sample) -> Sample:
    """A sample whose ids and logprobs can be true.

    Raises:
        ValueError: ids that are none, or logprobs that are no finite numbers.
    """
    if not all(type(token) is int and 0 <= token < LARGEST_ID for token in sample.token_ids):
        raise ValueError("ids that are none")
    if sample.likeliest is not None and len(sample.likeliest.ids) != len(sample.token_ids):
        raise ValueError("likeliest tokens of other positions")
    if len(sample.logprobs) != len(sample.token_ids) or not np.isfinite(sample.logprobs).all():
        raise ValueError("logprobs that are no numbers")
    return sample


def context_length(value: Any) -> int | None:
    """Tokens of the longest sequence; None: the server does not say.

    Raises:
        ValueError: that is no length.
    """
    if value is None:
        return None
    length = int(value)
    if length < 1:
        raise ValueError("a context of no tokens")
    return length


@dataclass(frozen=True, slots=True)
class ServerAPI(ABC):
    """The API of one kind of server. Stateless.

    Every method that asks raises ``Unavailable``, ``Refused`` or ``MismatchError`` as
    ``RetryingClient.post`` does; an answer that lacks what was asked for is ``Unavailable`` too, by
    :func:`mismatch.engines.servers.http.usable_answer` around them.
    """

    kind: ClassVar[str]
    allow: ClassVar[str]  # how an operator allows new weights
    client: RetryingClient
    facts: ServerFacts

    @classmethod
    @abstractmethod
    def describe(cls, client: RetryingClient, served: str | None) -> ServerFacts | None:
        """Facts of a server of this kind; None: it is another kind.

        Args:
            served: the model's name there, where several are served; None: the base model.
        """

    @abstractmethod
    def settings(
        self, law: Sampling, stop_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The sampling parameters as they are sent: all of them, so that no default slips in.

        Args:
            stop: texts that end a response too.
        """

    @abstractmethod
    def generate(
        self,
        ids: Sequence[int],
        settings: dict[str, Any],
        seed: int | None,
        layout: ExpertLayout | None,
        likeliest: int = 0,
    ) -> Answer:
        """One continuation of ``ids``.

        Args:
            layout: with routed experts, in these layers; None: without.
            likeliest: tokens to give with each sampled one, where the server does.
        """

    @abstractmethod
    def score(self, ids: Sequence[int], start: int) -> Floats:
        """Logprobs at T = 1 of the tokens ``start:``, by prefill; ``start`` is at least 1."""

    @abstractmethod
    def top_logprobs(
        self, ids: Sequence[int], settings: dict[str, Any], count: int
    ) -> dict[int, float]:
        """Token id -> logprob of the ``count`` most likely next tokens, as decoding reports it."""

    @abstractmethod
    def update_weights(self, directory: Path) -> None:
        """Load other weights from a folder that the server can read; caches stay."""

    @abstractmethod
    def drop_caches(self) -> None:
        """Forget the keys and values of earlier prompts."""

    def held(self, names: list[str], transposed: list[str]) -> Held | None:
        """What it holds, see :class:`mismatch.engines.sync_drivers.Driver`; None: it does not say.

        Raises:
            Unavailable: an answer that is none.
        """
        return None
