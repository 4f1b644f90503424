"""What a trainer adapter gets and what it returns.

An adapter is a class that takes a :class:`TrainerJob` and has the methods of :class:`Trainer`; a
plain function ``(token_ids, lengths, mask, temperature) -> logprobs`` works too. All ranks of a
torchrun world make the same calls in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mismatch.errors import MismatchError, WrongAnswer
from mismatch.models.resolved import honours_softcap

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
Precision = Literal["own", "fp32"]
Variant = Literal["own", "repeated", "regrouped", "alone", "fp32"]
"""How the tokens are scored:

- ``own``: as the run does;
- ``repeated``: the same once more;
- ``regrouped``: with other micro-batches;
- ``alone``: one sequence per forward pass, so that no sequence can see another;
- ``fp32``: as ``own``, computed in float32.
"""


@dataclass(frozen=True)
class TrainerJob:
    """What an adapter loads, and how."""

    model: str
    """Directory of the checkpoint, or its name on the hub."""
    revision: str | None = None
    trust_remote_code: bool = False
    precision: Precision = "own"
    """``own``: as the framework's configuration says; ``fp32``: weights and computation. A class
    with the attribute ``float32 = False`` is never asked for it."""
    dtype: str = ""
    """What ``--train-dtype`` says of the computation in this precision."""
    config: str | None = None
    """Path of the framework's own configuration; None: its defaults."""
    overrides: tuple[str, ...] = ()
    """``key=value`` over that file, as on the framework's command line."""
    attention: str = "auto"
    """transformers' name of the attention implementation; auto: the framework's choice."""
    temperature: float = 1.0
    """Logits are divided by it before the softmax."""
    micro_batch_tokens: int = 4096
    """Tokens per forward pass where the framework's configuration leaves it open."""
    seed: int = 0


@dataclass(frozen=True)
class Tokens:
    """Sequences of token ids, one after another, and which of them the policy sampled."""

    ids: NDArray[np.int64]
    """[N] all sequences' prompts and responses, without padding."""
    offsets: NDArray[np.int64]
    """[S + 1] sequence ``s`` is ``ids[offsets[s]:offsets[s + 1]]``."""
    mask: NDArray[np.bool_]
    """[N] True for the action tokens; A of them in all."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return [S] tokens per sequence."""
        return np.diff(self.offsets)

    def sequences(self) -> list[NDArray[np.int64]]:
        """Return the ids of every sequence."""
        return np.split(self.ids, self.offsets[1:-1])

    def masks(self) -> list[NDArray[np.bool_]]:
        """Return the action mask of every sequence."""
        return np.split(self.mask, self.offsets[1:-1])


@dataclass(frozen=True)
class Scored:
    """The scores of the sequences that one rank took."""

    sequences: tuple[int, ...]
    """Which sequences these are, counted from 0."""
    logprobs: tuple[NDArray[np.float32], ...]
    """Of each sequence [a]: natural logarithms of its action tokens' probabilities, in order."""
    entropy: tuple[NDArray[np.float32], ...] | None = None
    """Of each sequence [a], nats."""
    dtype: str = "fp32"
    """In which the framework returned the log-probabilities."""


def short(dtype: Any) -> str:
    """Return the name of a dtype of torch, as bf16, fp16 or fp32 where it is one of them."""
    name = str(dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def require_logprobs(values: Any, who: str) -> None:
    """Refuse numbers that cannot be logarithms of probabilities; NaN is a result, and judged.

    Raises:
        MismatchError: one is above 0, by more than rounding.
    """
    largest = np.nanmax(values, initial=0.0)
    if largest > 1e-3:
        raise WrongAnswer(
            f"{who} returned {largest:.3g} as a log-probability",
            "return natural logarithms of probabilities, which are at most 0",
        )


def sinks_of(model: Any, attention: str) -> dict[str, bool | None]:
    """Return whether the attention that runs is known to honour what a model declares for it.

    These are the facts ``honours_sinks`` and, where scores are capped, ``honours_softcap``.

    transformers' eager attention adds the learned sinks of every family that has them; what other
    kernels do, their names do not say.
    """
    capped = honours_softcap(model.config, attention)
    facts: dict[str, bool | None] = {} if capped is None else {"honours_softcap": capped}
    if not any(hasattr(module, "sinks") for module in model.modules()):
        family = str(model.config.model_type)
        return facts if family == "gpt_oss" else facts | {"honours_sinks": None}
    return facts | {"honours_sinks": True} if attention == "eager" else facts


class Trainer(Protocol):
    """One loaded model of a framework."""

    def score(self, tokens: Tokens, variant: Variant) -> Scored:
        """Score this rank's share of the sequences; every rank takes part."""

    def facts(self) -> Facts:
        """Return what ran, for the fingerprint."""


@dataclass(frozen=True)
class Replaced:
    """A setting of the run that cannot run here, and what ran in its place."""

    what: str
    """The setting in a word or two: attention."""
    asked: str
    ran: str
    why: str
    """Why what was asked for cannot run here, e.g. ``it needs a GPU``."""
    instead: str = ""
    """How the user's configuration asks for what ran, so that the result holds for it."""
    causes: tuple[str, ...] = ()
    """What this can make that the run's own setting does not; ids of causes.toml."""


def require_known_attention(asked: str, job: TrainerJob) -> None:
    """Refuse an attention of a configuration file that is code of a hub or of a module.

    Raises:
        MismatchError: nobody named it, or allowed remote code, on the command line.
    """
    if any(mark in asked for mark in "/:") and asked != job.attention and not job.trust_remote_code:
        fault = f"the configuration asks for the attention {asked}, which is code from elsewhere"
        raise MismatchError(fault, f"if you trust it: --attention {asked}, or --trust-remote-code")


def attention_here(
    asked: str, model_type: str, on_gpu: bool, precision: Precision, packed: bool = False
) -> Replaced | None:
    """Return what runs in place of an attention implementation; None: it runs itself.

    Flash attention needs a GPU, and takes 16-bit numbers alone. gpt-oss has no sdpa.

    Args:
        asked: transformers' name, e.g. ``flash_attention_2`` or a kernel of the hub.
        packed: several sequences share a row.
    """
    if "flash" not in asked or (on_gpu and precision == "own"):
        return None
    if on_gpu:
        ran = "eager" if model_type == "gpt_oss" else "sdpa"
        return Replaced("attention", asked, ran, "flash attention takes 16-bit numbers alone")
    causes = ("packing-leak", "microbatch-dependence") if packed else ()
    instead = "attn_implementation: eager"
    return Replaced("attention", asked, "eager", "it needs a GPU", instead, causes)


@dataclass(frozen=True)
class Facts:
    """What an adapter says of itself."""

    code: str
    """Whose code computes the log-probabilities, e.g. ``verl 0.9.1, FSDPEngineWithLMHead``."""
    dtype: str
    """Of the computation: bf16, fp16 or fp32. "" where the trainer does not say: then the numbers
    are measured, and no levels apply."""
    layout: str = "padding"
    """``padding`` (a row per sequence) or ``packing`` (several sequences in a row)."""
    attention: str = ""
    """transformers' name of the attention that ran."""
    master_dtype: str = ""
    """Of the parameters at rest."""
    autocast: str | None = None
    micro_batch: str = ""
    """Its rule in words, e.g. ``16384 tokens``."""
    notes: tuple[str, ...] = ()
    """What of the configuration was not followed here, one sentence each."""
    replaced: tuple[Replaced, ...] = ()
    """What of the configuration could not run here, and what ran instead."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further settings, JSON data."""
