"""The spine: what the stages hand to each other.

Shape legend, used in every docstring of the project:
    N  sequences            P  prompts (each with N/P samples)
    T  all tokens of all sequences, concatenated (prompt and response)
    A  action tokens: those of T that the policy sampled, in the same order
    L  MoE layers           K  experts per token          E  experts

Every array is flat: sequence n owns tokens ``offsets[n]:offsets[n + 1]`` of T.
Log-probabilities are float64, in nats. ``delta = train - rollout``, without exception.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Bools as Bools
from mismatch.captures import Distributions, Likeliest, corruption
from mismatch.captures import Floats as Floats
from mismatch.captures import Ints as Ints
from mismatch.errors import CorruptCapture, EmptyComparison, MismatchError
from mismatch.facts import SideFacts as SideFacts
from mismatch.keys import Key
from mismatch.specs import Sampling as Sampling

RANK = "rank"  # of the trainer, that scored a token
CACHED = "cached_tokens"  # of the context of a token's turn, from the prefix cache; NaN: not said
Status = Literal["healthy", "tolerable", "inconclusive", "unfit", "broken"]  # ever worse
CheckStatus = Literal["passed", "warning", "inconclusive", "failed", "not_tested"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Token ids that an engine produced, with what is needed to score them again.

    Example: two samples of one prompt of two tokens::

        Rollout(
            token_ids=[5, 6, 7, 8,  5, 6, 9],      # [T] int64
            offsets=[0, 4, 7],                     # [N + 1]
            action_mask=[0, 0, 1, 1,  0, 0, 1],    # [T] bool: sampled by the policy
            turn=[0, 0, 1, 1,  0, 0, 1],           # [T] 0 prompt, then 1, 2 … per assistant turn
            prompt_index=[0, 0],                   # [N]
            finish_reason=("length", "stop"),      # [N]
            rewards=[0.0, 1.0],                    # [N] or None
            sampling=Sampling(max_tokens=2), fingerprint={"engine": "vllm", …},
        )
    """

    token_ids: Ints
    offsets: Ints
    action_mask: Bools
    turn: Ints
    prompt_index: Ints
    finish_reason: tuple[str, ...]
    sampling: Sampling
    fingerprint: SideFacts
    rewards: Floats | None = None

    def __post_init__(self) -> None:
        tokens, sequences = len(self.token_ids), len(self.offsets) - 1
        lengths = {
            "action_mask": (len(self.action_mask), tokens),
            "turn": (len(self.turn), tokens),
            "prompt_index": (len(self.prompt_index), sequences),
            "finish_reason": (len(self.finish_reason), sequences),
        }
        if self.rewards is not None:
            lengths["rewards"] = len(self.rewards), sequences
        for name, (got, want) in lengths.items():
            if got != want:
                raise MismatchError(f"rollout: {name} has {got} entries, expected {want}")
        if sequences < 1 or tokens == 0:
            raise EmptyComparison("rollout: it holds no sequence", "sample at least one prompt")
        if self.token_ids.min() < 0 or self.token_ids.max() >= 1 << 31:
            fault = "rollout.parquet: it holds an id that no vocabulary has"
            raise MismatchError(fault, "is it damaged? sample again: mismatch rollout")
        if self.offsets[0] != 0 or self.offsets[-1] != tokens:
            raise MismatchError("rollout: offsets do not cover the tokens")
        if (np.diff(self.offsets) < 1).any():
            raise MismatchError("rollout: a sequence without tokens")
        if self.action_mask[self.offsets[:-1]].any():
            raise MismatchError(
                "rollout: the first token of a sequence cannot be an action: nothing predicts it"
            )

    @property
    def actions(self) -> Ints:
        """Indices into T of the action tokens, [A]."""
        return np.flatnonzero(self.action_mask)

    @property
    def sequence_of_token(self) -> Ints:
        """Sequence of every token, [T]."""
        return np.repeat(np.arange(self.n_sequences), np.diff(self.offsets))

    @property
    def n_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_actions(self) -> int:
        return int(self.action_mask.sum())

    @property
    def n_prompts(self) -> int:
        return len(np.unique(self.prompt_index))

    @property
    def distinct_prompts(self) -> Ints:
        """Prompt of each sequence, [N], for intervals: prompts of equal ids are one."""
        numbers: dict[bytes, int] = {}
        of_prompt: dict[int, int] = {}
        for sequence, prompt in enumerate(self.prompt_index.tolist()):
            start, stop = self.offsets[sequence : sequence + 2]
            mask = self.action_mask[start:stop]
            if prompt in of_prompt or not mask.any():
                continue
            ids = self.token_ids[start : start + int(mask.argmax())]
            of_prompt[prompt] = numbers.setdefault(ids.astype(np.int64).tobytes(), prompt)
        of_sequence = [of_prompt.get(prompt, prompt) for prompt in self.prompt_index.tolist()]
        return np.array(of_sequence, np.int64)

    @property
    def first_samples(self) -> Ints:
        """The first sequence of each prompt, [P]."""
        return np.sort(np.unique(self.prompt_index, return_index=True)[1])

    def only(self, kept: Ints) -> Rollout:
        """Return these sequences alone; ``kept`` are [N'] indices, in rising order."""
        rows = np.flatnonzero(np.isin(self.sequence_of_token, kept))
        return replace(
            self,
            token_ids=self.token_ids[rows],
            offsets=np.concatenate([[0], np.cumsum(np.diff(self.offsets)[kept])]),
            action_mask=self.action_mask[rows],
            turn=self.turn[rows],
            prompt_index=self.prompt_index[kept],
            finish_reason=tuple(self.finish_reason[number] for number in kept.tolist()),
            rewards=None if self.rewards is None else self.rewards[kept],
        )

    def sequences(self) -> list[Ints]:
        """Token ids of each sequence, N arrays."""
        return np.split(self.token_ids, self.offsets[1:-1])


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts chosen for every forwarded token. Row t is the forward pass of token t.

    Action token t was predicted by the forward of t - 1, so its experts are row t - 1;
    the last token of a sequence is never forwarded by an engine and has no row there.

    Example: one MoE layer (the model's layer 3), top-2 of 8 experts, three tokens::

        Routing(layers=(3,), num_experts=8, ids=[[[1, 5]], [[0, 2]], [[0, 0]]],   # [T, L, K] uint8
                present=[True, True, False],                                      # [T]
                weights=[[[.7, .3]], …] or None,                                  # [T, L, K]
                margin=[[0.4], …] or None)                                        # [T, L]
    """

    layers: tuple[int, ...]
    num_experts: int
    ids: NDArray[Any]
    present: Bools
    weights: NDArray[np.float32] | None = None
    margin: NDArray[np.float32] | None = None

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])

    def validate(self, rollout: Rollout, source: str) -> None:
        """Raise :class:`CorruptCapture` naming layer and row if these ids cannot be true."""
        want = (len(rollout.token_ids), len(self.layers))
        if self.ids.ndim != 3 or self.ids.shape[:2] != want or len(self.present) != want[0]:
            fault = f"{source}: routed experts have shape {self.ids.shape}, expected {want} + (K,)"
            raise CorruptCapture(fault, "upgrade the engine, or run without routing: --no-routing")
        needed = rollout.actions - 1
        missing = needed[~self.present[needed]]
        if len(missing):
            self._corrupt(source, "no experts", int(missing[0]), None)
        found = corruption(self.ids, self.present, self.num_experts)
        if found is not None:
            self._corrupt(source, *found)

    def _corrupt(self, source: str, what: str, row: int, layer: int | None) -> None:
        where = "" if layer is None else f" at layer {self.layers[layer]}"
        fault = f"{source}: corrupt route capture: {what} for token {row}{where}"
        raise CorruptCapture(fault, "upgrade the engine, or run without routing: --no-routing")


KEYS_BYTES = 512 << 20  # of a scoring's selections; above it an even share of them is kept


@dataclass(frozen=True, slots=True)
class SparseKeys:
    """Keys that sparse attention selected, of tokens that had more than K to choose from.

    Attributes:
        rows: [R] indices into T, ascending; row t is the forward pass of token t.
        choices: of these R rows: its "experts" are positions in the token's own sequence.
    """

    rows: Ints
    choices: Routing

    @classmethod
    def of(
        cls, rollout: Rollout, layers: Sequence[int], arrays: Mapping[str, NDArray[Any]]
    ) -> SparseKeys | None:
        """Return selections from ``rows`` [R] in any order, ``ids`` [R, L, K] and ``margin``.

        None where they cannot be true: a key twice, or one behind the token itself.
        """
        order = np.argsort(arrays["rows"], kind="stable")
        rows, ids, margin = arrays["rows"][order], arrays["ids"][order], arrays.get("margin")
        position = rows - rollout.offsets[rollout.sequence_of_token[rows]]
        ranked = np.sort(ids, axis=2)
        if (ranked[:, :, -1] > position[:, None]).any() or (
            ranked[..., 1:] == ranked[..., :-1]
        ).any():
            return None
        present, candidates = np.ones(len(rows), np.bool_), int(np.diff(rollout.offsets).max())
        margin = None if margin is None else margin[order]
        return cls(rows, Routing(tuple(layers), candidates, ids, present, margin=margin))


def selecting_rows(rollout: Rollout, top_k: int) -> Ints:
    """Return the forwarded tokens that have more than K keys, rows of T."""
    lengths = np.diff(rollout.offsets)
    able = np.arange(len(rollout.token_ids)) - np.repeat(rollout.offsets[:-1], lengths) >= top_k
    able[rollout.offsets[1:] - 1] = False  # the last token of a sequence is not forwarded
    return np.flatnonzero(able)


def kept_rows(rollout: Rollout, top_k: int, layers: int) -> Ints:
    """Return those of :func:`selecting_rows` whose selections are kept: the same on both sides.

    All of them; where they would take more than ``KEYS_BYTES``, an even share of those that
    predict an action.
    """
    rows = selecting_rows(rollout, top_k)
    most = max(1, KEYS_BYTES // (layers * top_k * np.dtype(np.uint16).itemsize))
    if len(rows) > most:
        rows = np.intersect1d(rows, rollout.actions - 1)
    return rows[:: max(1, -(-len(rows) // most))]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What one back-end says about the action tokens of one rollout.

    Example::

        Scoring(name="vllm:decode", token_ids=[7, 8, 9], logprobs=[-.1, -2., -.3],   # [A]
                entropy=None, top1=None, fingerprint={…})

    Attributes:
        token_ids: [A] the ids that were scored; must equal the rollout's.
        logprobs: [A] float64 nats; NaN where the back-end gave none.
        entropy: [A] of the back-end's own distribution, nats, or None.
        top1: [A] id of the back-end's most likely token, or None.
        extra: named [A] float64 arrays: ``logprobs_untempered`` (at T = 1, where T ≠ 1),
            ``kept_mass`` (probability that survives top-p/top-k, where they are on), of a trainer
            on several ranks ``RANK``, and, of an engine that sampled, ``CACHED``.
        distributions: of all that could have come at some positions, or None.
        likeliest: the most likely tokens at all positions, or None.
        keys: what its sparse attention selected, or None.
    """

    name: str
    token_ids: Ints
    logprobs: Floats
    fingerprint: SideFacts
    entropy: Floats | None = None
    top1: Ints | None = None
    routing: Routing | None = None
    extra: dict[str, Floats] = field(default_factory=dict)
    distributions: Distributions | None = None
    likeliest: Likeliest | None = None
    keys: SparseKeys | None = None

    @property
    def key(self) -> Key:
        """The name, with its parts."""
        return Key(self.name)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with what it rests on.

    >>> Estimate(3e-4, 2e-4, 4e-4, n_tokens=8192, n_sequences=256, n_prompts=64).n_tokens
    8192

    ``low`` and ``high`` bound the 95 % interval; both None where none is defined (maxima).
    ``flags``: "heavy-tail" (few tokens carry the value), "few-prompts" …: the interval may be
    too narrow; "overflow": the value is infinite; "whole-dump": the value is of more tokens than
    the interval, which is left out where it excludes the value.
    """

    value: float
    low: float | None
    high: float | None
    n_tokens: int
    n_sequences: int
    n_prompts: int
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if "overflow" in self.flags and math.isnan(self.value):  # null in a document
            object.__setattr__(self, "value", math.inf)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two scorings of the same tokens. ``delta = train - rollout``.

    Attributes:
        sampled_by_left: the rollout side is the distribution that sampled these tokens, so that
            ``kl`` and ``k3_kl`` estimate KL(rollout ‖ train); otherwise they are divergence scores.
        breakdowns: name -> columns of equal length, for figures and tables (position, layer …).
    """

    rollout: str
    train: str
    sampled_by_left: bool
    metrics: dict[str, Estimate]
    routing: dict[str, Estimate] = field(default_factory=dict)
    breakdowns: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SidePair:
    """Two scorings of the same tokens of which neither is "rollout" or "train"; few metrics.

    ``delta = right - left``.
    """

    left: str
    right: str
    sampled_by_left: bool
    metrics: dict[str, Estimate]
    routing: dict[str, Estimate] = field(default_factory=dict)

    @classmethod
    def of(cls, c: Comparison) -> SidePair:
        return cls(c.rollout, c.train, c.sampled_by_left, c.metrics, c.routing)


# Of what is not tested: what engines, trainers and reports name alike.
PREFILL, EXACT_KL, ROUTES = "decode against prefill", "exact KL", "routing disagreement"
KEYS = "keys of sparse attention"


@dataclass(frozen=True, slots=True)
class NotTested:
    """Something that a run could not see.

    >>> str(NotTested("prefill", "this engine cannot rescore", "use --engine vllm"))
    'prefill: this engine cannot rescore; use --engine vllm'
    """

    what: str
    reason: str
    how: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}" + (f"; {self.how}" if self.how else "")

    @classmethod
    def of(cls, fingerprint: SideFacts) -> list[NotTested]:
        """Return what a worker left in its ``not_tested``."""
        return [cls(**entry) for entry in fingerprint.get("not_tested", ())]


NO_MLA = ("VLLM_MLA_DISABLE", "1")  # set for vLLM's engine in float32 on GPUs
WITHOUT_MLA = NotTested(
    "vLLM's kernels for MLA", "they take no float32: in float32 it runs without (VLLM_MLA_DISABLE)"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One semantic check.

    >>> Check("alignment", "passed", "best lag 0 (correlation 0.999)").status
    'passed'
    """

    id: str
    status: CheckStatus
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One headline metric against its level.

    >>> Judgement("k3_kl", "healthy", 3e-4, 1e-3, 1.3e-2, "NeMo-RL docs").status
    'healthy'
    """

    metric: str
    status: Status
    value: float
    healthy: float
    unfit: float
    source: str
    inconclusive: bool = False
    deciding_prompts: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one of the verdict's two questions.

    >>> Answer("broken", "check alignment failed: best lag is +1").status
    'broken'
    """

    status: Status
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The run's verdict: the worse of two answers.

    Attributes:
        reason: of the worse answer.
        levels: the column of the levels table that applied, e.g. "bf16 MoE".
        correctness: is something broken? By semantic checks and the square; never "unfit".
        fitness: can training tolerate it? By the levels of the metrics; never "broken".
    """

    status: Status
    reason: str
    levels: str
    judgements: tuple[Judgement, ...]
    correctness: Answer | None = None
    fitness: Answer | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict of a command that makes no whole report.

    >>> Judged("broken", "2 parameters are stale", 1).line
    'verdict: broken – 2 parameters are stale'

    Attributes:
        code: of the command, 0 or 1.
    """

    status: str
    reason: str
    code: int

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"verdict: {self.status} – {self.reason}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two scorings of one rollout, side by side: what every metric is computed from.

    Attributes:
        delta: [A] train - rollout.
        sequence: [A] sequence of each action token.
        prompt: [N] prompt of each sequence.
    """

    rollout: Floats
    train: Floats
    sequence: Ints
    prompt: Ints

    @property
    def delta(self) -> Floats:
        return self.train - self.rollout

    @classmethod
    def of(cls, rollout: Rollout, left: Scoring, right: Scoring) -> Pair:
        """Pair two scorings, after making sure that they speak of the same tokens.

        Raises:
            MismatchError: other token ids, another number of logprobs, or logprobs that are not
                finite (with the sequence named).
            EmptyComparison: no action token at all.
        """
        if rollout.n_actions == 0:
            raise EmptyComparison()
        actions = rollout.actions
        for scoring in (left, right):
            if not np.array_equal(scoring.token_ids, rollout.token_ids[actions]):
                fault = f"{scoring.name} scored other tokens than the rollout's"
                raise MismatchError(fault, "score the rollout's token ids, never re-tokenised text")
            if scoring.logprobs.shape != scoring.token_ids.shape:
                raise MismatchError(
                    f"{scoring.name}: {scoring.logprobs.size} logprobs for "
                    f"{len(scoring.token_ids)} tokens",
                    "give one log-probability per action token",
                )
            for what, values in (("entropies", scoring.entropy), ("most likely ids", scoring.top1)):
                if values is not None and len(values) != len(scoring.token_ids):
                    raise MismatchError(
                        f"{scoring.name}: {len(values)} {what} for {len(scoring.token_ids)} tokens",
                        "give one per action token",
                    )
            bad = ~np.isfinite(scoring.logprobs)
            if bad.any():
                first = int(np.flatnonzero(bad)[0])
                raise MismatchError(
                    f"{scoring.name}: {int(bad.sum())} logprobs are not finite; the first is in "
                    f"sequence {rollout.sequence_of_token[actions[first]]}, action token {first}",
                    "look for overflow (fp16) or padding that was scored as tokens",
                )
        return cls(
            left.logprobs.astype(np.float64),
            right.logprobs.astype(np.float64),
            rollout.sequence_of_token[actions],
            rollout.distinct_prompts,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was measured, judged and not tested; knows nothing about HTML.

    Attributes:
        fingerprints: scoring name -> what really ran on that side.
        comparisons: the first is the headline: what sampled against the trainer.
        noise_floor: pairs that should agree (prefill vs decode, trainer vs itself regrouped …);
            each with a few metrics only.
        not_tested: what this run could not see, and why.
        run: spec, command line, versions, seconds per stage, created (ISO time).
        analyses: id -> result, of those that were made, see mismatch/analysis/plugins.py.
    """

    model: str
    verdict: Verdict
    fingerprints: dict[str, SideFacts]
    comparisons: tuple[Comparison, ...]
    noise_floor: tuple[SidePair, ...]
    checks: tuple[Check, ...]
    not_tested: tuple[NotTested, ...]
    run: dict[str, Any]
    analyses: dict[str, Any] = field(default_factory=dict)

    def result(self, id: str) -> Any:
        """Return the result of one analysis, None where it was not made."""
        return self.analyses.get(id)

    def with_analyses(self, **results: Any) -> Report:
        """Return the same report with these results; None takes one out."""
        both = self.analyses | results
        return replace(self, analyses={id: r for id, r in both.items() if r is not None})
