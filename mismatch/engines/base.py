"""The protocol of an engine, and the data that it takes and returns.

An engine samples token ids and scores given ids. It never sees text, rewards or the trainer.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from numpy.typing import NDArray

from mismatch.captures import Likeliest
from mismatch.errors import MismatchError, did_you_mean
from mismatch.run.interpreters import source_files
from mismatch.specs import EngineSpec
from mismatch.types import EXACT_KL, PREFILL, ROUTES, Floats, Sampling, SideFacts

if TYPE_CHECKING:
    from typing import Self  # Python 3.11; workers run on 3.10 too

    from mismatch.engines.distribution_capture import CaptureRequest


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """Derive a 31-bit seed for one sample of one prompt.

    Hashed, not counted: with ``seed + sample`` two runs with neighbouring seeds would share most of
    their random streams.
    """
    text = f"{seed}/{prompt}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def requests_of(count: int, sampling: Sampling, turn: int) -> list[tuple[int, int]]:
    """List (context, sample) of every request of a turn, the arguments of :func:`sample_seed`.

    Turn 1 samples each prompt several times. Later turns continue every sequence once, with sample
    numbers that no other turn uses.
    """
    if turn > 1:
        return [(context, sampling.samples_per_prompt + turn) for context in range(count)]
    return [(prompt, s) for prompt in range(count) for s in range(sampling.samples_per_prompt)]


def require_starts(starts: Sequence[int]) -> None:
    """Refuse to score a first token.

    Raises:
        MismatchError: a start below 1: nothing predicts the first token.
    """
    if min(starts, default=1) < 1:
        fault = "prefill from token 0: nothing predicts the first token"
        raise MismatchError(fault, "start at token 1 or later")


def require_ids(sequences: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Refuse what would crash an engine: ids outside the vocabulary, or no ids at all.

    Raises:
        MismatchError: naming the sequence and the id.
    """
    fix = "the tokenizer does not fit the model: save both together with save_pretrained()"
    for index, ids in enumerate(sequences):
        if not ids:
            raise MismatchError(f"sequence {index} is empty", "drop the prompt")
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocabulary:
                fault = f"sequence {index} holds id {token}, the vocabulary has {vocabulary}"
                raise MismatchError(fault, fix)


def argument_name(raw: str) -> str:
    """Spell ``--max-num-seqs`` as the engine's own code does."""
    return raw.lstrip("-").replace("-", "_")


def argument_names(package: str, python: str | None, *patterns: str) -> set[str]:
    """Return the fields of the classes in an engine's source: importing an engine takes long.

    Empty where the engine is not installed, or keeps its arguments elsewhere.

    Args:
        python, patterns: as of :func:`source_files`.
    """
    names: set[str] = set()
    for path in source_files(package, python, *patterns):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                fields = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
                names |= {each.id for each in fields if isinstance(each, ast.Name)}
    return names


def checked_arguments(
    spec: EngineSpec, engine: str, names: Collection[str], help_command: str
) -> dict[str, Any]:
    """Return ``--engine-arg`` pairs by name, checked against the engine's own list.

    Raises:
        MismatchError: an unknown name.
    """
    arguments: dict[str, Any] = {}
    for raw, value in spec.args:
        name = argument_name(raw)
        if name not in names:
            fault = f"--engine-arg {raw}: {engine} has no such engine argument"
            raise MismatchError(fault, did_you_mean(name, names, 2, 0.6) + f"see: {help_command}")
        arguments[name] = value
    return arguments


def refuse_own(spec: EngineSpec, options: Mapping[str, str], kept: Mapping[str, str]) -> None:
    """Refuse engine arguments that mismatch sets; needs no import of the engine.

    Args:
        options: arguments that options of mismatch set -> these options.
        kept: arguments that must stay as they are -> what mismatch needs.

    Raises:
        MismatchError: one of ``options`` or ``kept``.
    """
    for raw, _ in spec.args:
        name = argument_name(raw)
        if name in options:
            message = f"--engine-arg {raw}: mismatch sets this itself"
            raise MismatchError(message, f"use {options[name]}")
        if name in kept:
            raise MismatchError(f"--engine-arg {raw}: mismatch needs {kept[name]}", "drop it")


def by_prompt(samples: Sequence[Sample], prompts: int) -> list[list[Sample]]:
    """Cut a turn's samples, in the order of :func:`requests_of`, into those of each prompt."""
    size = len(samples) // prompts
    return [list(samples[i : i + size]) for i in range(0, len(samples), size)]


def context_needed(longest: int, limit: int | None) -> int:
    """Return the shortest context for these sequences, because a long one costs memory.

    Rounded up to 64 tokens for the kernels.
    """
    rounded = -(-longest // 64) * 64
    return min(rounded, limit or rounded)


GREEDY_TOP = 20  # outcomes of a position; vLLM gives no more unless it is told so at its start
Mode = Literal["decode", "prefill"]
TokenIds = Sequence[list[int]]  # of several sequences

# (finished sequences, all sequences, tokens so far)
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation of a prompt.

    Example: two tokens after a prompt of three, one MoE layer, top-2::

        Sample(token_ids=[7, 2], logprobs=[-0.1, -1.3], finish_reason="stop",
               routed=[[[1, 5]], [[0, 2]], [[3, 1]], [[1, 5]]])
    """

    token_ids: list[int]
    """The sampled ids, with the EOS or stop token where one was sampled."""
    logprobs: Floats
    """Of the sampled ids: float64 nats."""
    finish_reason: str
    """ "stop" (EOS, a stop token or a stop text) or "length"."""
    routed: NDArray[Any] | None = None
    """[rows, L, K] experts of the prompt's tokens, then of the sampled tokens; None: not captured.

    The last sampled token is never forwarded, so rows = prompt + sampled - 1.
    """
    routed_weights: NDArray[Any] | None = None
    """[rows, L, K] float32 weights that the experts were given; None: the engine does not say."""
    likeliest: Likeliest | None = None
    """The likeliest ids of each sampled token's position, where the engine was asked for them."""
    cached: int | None = None
    """Prompt tokens whose keys and values came from the prefix cache; None: not said."""
    keys: NDArray[Any] | None = None
    """[rows, L, K] positions that sparse attention selected, of the forwarded tokens that have more
    than K to choose from: those at K, K + 1, … of the sequence. None: not captured."""


@dataclass(frozen=True, slots=True)
class Continued:
    """A context continued greedily."""

    token_ids: list[int]
    likeliest: list[dict[int, float]]
    """Per sampled token: the likeliest ids of its position, itself included -> logprob at T = 1."""
    cached: int
    """Context tokens whose keys and values came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where the experts of a model are: L of its decoder layers, K of E experts in each."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def columns(self, experts: NDArray[Any]) -> NDArray[Any]:
        """Return [rows, L, K] of experts [rows, layers of the model, K].

        Another shape is returned as it is: it is refused once all tokens are saved.
        """
        if experts.ndim == 3 and experts.shape[1] > max(self.layers):
            return experts[:, list(self.layers)]
        return experts


# Capability -> what is not tested without it.
UNTESTED = {
    "prefill": PREFILL,
    "prefill_tempered": PREFILL,
    "routed_experts": ROUTES,
    "deterministic": "the same tokens from the same seed",
    "distributions": EXACT_KL,
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do for one spec and its sampling settings, before any weight is loaded."""

    decode: bool = True
    prefill: bool = True
    """It can score given token ids at T = 1."""
    prefill_tempered: bool = True
    """It can score them at the sampling temperature too, where that is not 1."""
    routed_experts: bool = True
    processed_logprobs: bool = True
    """It reports logprobs after temperature and truncation."""
    deterministic: bool = True
    """The same seed gives the same tokens."""
    distributions: bool = False
    """It can take whole distributions while it samples."""
    context: int | None = None
    """Tokens of the longest sequence that it takes; None: those of the model."""
    cache_reading: bool = False
    """Requests may leave its prefix cache unread."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Capability -> why it is missing, one sentence each."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Digests of the parameters as loaded (see mismatch.models.digests)."""

    digests: dict[str, Any]
    """Checkpoint name -> digest."""
    unmapped: tuple[str, ...] = ()
    """The engine's names for which no checkpoint name is known."""
    in_memory: bool = False
    """Digested as they run; False: as read, before the engine rearranged them."""
    of_adapter: tuple[str, ...] = ()
    """Parameters whose adapter is held otherwise than its files say."""
    adapter_scale: float | None = None
    """Factor of these adapters over that of their files; None: no one factor fits them all."""


class Engine(Protocol):
    """One engine with one model and one set of sampling settings.

    A context manager: weights are loaded inside it. It is made with ``sampling``, because engines
    fix their logprob mode when they load, and with ``longest``, the tokens of the longest sequence
    (prompt and response) that will come. A class may have ``prepare()``, called first in its
    process, before transformers is imported.
    """

    name: ClassVar[str]
    likeliest: int = 0  # most likely tokens to give with each sampled one
    sequences: int = 0  # most that come at once, set before it is entered; 0: not known

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None: ...

    @classmethod
    def capabilities(cls, spec: EngineSpec, sampling: Sampling) -> Capabilities:
        """Return what this engine can do here, without loading weights."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...

    def generate(self, prompts: TokenIds, progress: Progress, turn: int = 1) -> list[list[Sample]]:
        """Sample and return the samples of every prompt, in the order of the prompts.

        Args:
            turn: 1: ``samples_per_prompt`` of each; later: one continuation of each context, with
                separate seeds (:func:`requests_of`).

        Raises:
            MismatchError: the engine gave fewer samples or logprobs than asked for.
        """

    def prefill(
        self, sequences: TokenIds, starts: Sequence[int], temperature: float, progress: Progress
    ) -> list[Floats]:
        """Score the tokens ``start:`` of each sequence: float64 nats, at ``temperature``.

        Raises:
            MismatchError: a start below 1 (nothing predicts the first token).
        """

    def experts(self) -> ExpertLayout | None:
        """Return the layout of the captured experts; None: none are captured."""

    def weights(self) -> LoadedWeights:
        """Return digests of the parameters as they were loaded."""

    def fingerprint(self, mode: Mode) -> SideFacts:
        """Describe what ran, as the engine resolved it, not as it was asked for."""

    # Below: what an engine may leave out, as its ``Capabilities`` then say.

    def key_layers(self) -> tuple[int, ...]:
        """Return the decoder layers whose sparse selections its samples give; (): of none."""
        return ()

    def stop_at(self, texts: Sequence[str]) -> None:
        """End responses behind these texts too: the token that completes one is the last.

        Raises:
            MismatchError: this engine cannot.
        """
        raise MismatchError(f"{self.name} ends responses at end tokens only", "use --engine vllm")

    def capture_distributions(self, wanted: CaptureRequest | None) -> None:
        """Take whole distributions with the samples of each :meth:`generate` from now on.

        Only called with ``Capabilities.distributions``. None: take nothing.
        """
        raise NotImplementedError

    def captured_distributions(self) -> dict[str, NDArray[Any]]:
        """Return what was taken, as ``DistributionRecorder.collected`` does; empty: nothing."""
        raise NotImplementedError

    def continue_greedily(
        self, contexts: TokenIds, max_tokens: int, read_cache: bool, progress: Progress
    ) -> list[Continued]:
        """Return the ``max_tokens`` likeliest tokens after each context, whatever they are.

        Only called with ``Capabilities.cache_reading``.

        Args:
            read_cache: False: compute every token of the context. Both leave blocks in the cache
                that later requests may read.
        """
        raise NotImplementedError
