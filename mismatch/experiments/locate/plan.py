"""Which sequences of a run are recorded, and what runs on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from mismatch.analysis.square import precision_of
from mismatch.errors import MismatchError
from mismatch.experiments.locate.types import Role, Sequence, Site, SiteError
from mismatch.experiments.scoring_passes import plain_of, reference_of
from mismatch.models.config import ModelConfig
from mismatch.run.store import PLAIN, REFERENCE, TRAIN
from mismatch.specs import Dtype, EngineSpec, Pass, Sampling, TrainSpec
from mismatch.types import Fingerprint, Floats, Ints, Rollout

SEQUENCES, TOKENS = 8, 512  # recorded by default, and of each at most
FLOAT32_BYTES = 4
WHOLE = Sampling().top_k  # no token is cut
SHORT: dict[str, Dtype] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


def select(
    rollout: Rollout, delta: Floats | None, count: int, longest: int, seed: int
) -> tuple[Sequence, ...]:
    """The worst half by mean |delta|, and others at random; sequences keep their beginning.

    A decoder looks back only: the beginning of a sequence gives what it gives within the whole.

    Args:
        delta: [A] train - rollout of the action tokens; None: all are taken at random.
        longest: tokens of a sequence that are kept.

    Raises:
        MismatchError: no sequence has an action token that early.
    """
    able, means = [], {}
    ends = rollout.offsets[1:]
    owner = rollout.sequence_of_token[rollout.actions]
    for index, (start, end) in enumerate(zip(rollout.offsets[:-1], ends, strict=True)):
        if rollout.action_mask[start : min(end, start + longest)].any():
            able.append(index)
    if not able:
        raise MismatchError(
            f"no sequence has an action token among its first {longest} tokens",
            "raise --max-sequence-tokens",
        )
    if delta is not None:
        size = np.abs(np.nan_to_num(delta))
        means = {index: float(size[owner == index].mean()) for index in able}
    worst = sorted(able, key=lambda index: -means[index])[: (count + 1) // 2] if means else []
    rest = [index for index in able if index not in worst]
    drawn = np.random.default_rng(seed).permutation(rest)[: count - len(worst)]
    chosen = [(index, "worst") for index in worst] + [(int(index), "random") for index in drawn]
    return tuple(
        Sequence(index, int(min(ends[index] - rollout.offsets[index], longest)), why)  # type: ignore[arg-type]
        for index, why in sorted(chosen)
    )


def part_of(rollout: Rollout, sequences: Several[Sequence]) -> Rollout:
    """The rollout of these sequences alone, as far as they are kept.

    The law is that of all tokens: engines rescore without top-p and top-k.
    """
    spans = [(int(rollout.offsets[s.index]), s.tokens) for s in sequences]
    rows = np.concatenate([np.arange(start, start + size) for start, size in spans])
    index = np.asarray([sequence.index for sequence in sequences])
    return replace(
        rollout,
        token_ids=rollout.token_ids[rows],
        sampling=replace(rollout.sampling, top_p=1.0, top_k=WHOLE),
        offsets=np.concatenate([[0], np.cumsum([size for _, size in spans])]),
        action_mask=rollout.action_mask[rows],
        turn=rollout.turn[rows],
        prompt_index=rollout.prompt_index[index],
        finish_reason=tuple(rollout.finish_reason[number] for number in index),
        rewards=None if rollout.rewards is None else rollout.rewards[index],
    )


def actions_of(rollout: Rollout, sequences: Several[Sequence]) -> Ints:
    """Places among the rollout's action tokens [A] of those in :func:`part_of`, in its order."""
    action = np.cumsum(rollout.action_mask) - 1
    spans = [(int(rollout.offsets[s.index]), s.tokens) for s in sequences]
    rows = np.concatenate([np.arange(start, start + size) for start, size in spans])
    places: Ints = action[rows[rollout.action_mask[rows]]]
    return places


def values_of(config: ModelConfig) -> int:
    """Numbers that all sites of one token hold."""
    heads = config.heads * (2 * config.head_dim + (config.value_dim or config.head_dim))
    shared = config.kv_heads * (2 * config.head_dim + (config.value_dim or config.head_dim))
    return 2 * config.hidden + config.layers * (6 * config.hidden + heads + shared + config.experts)


def disk_bytes(config: ModelConfig, tokens: int, sides: int) -> int:
    """What is on disk at most while these sides are held against the reference.

    Each leaves what it recorded and what is new in it, in float32 at most; so does the reference.
    """
    return values_of(config) * tokens * FLOAT32_BYTES * (2 * sides + 1)


def require_disk(config: ModelConfig, tokens: int, sides: int, free: int) -> None:
    """Refuse what would fill a disk.

    Raises:
        MismatchError: more than ``free`` bytes.
    """
    needed = disk_bytes(config, tokens, sides)
    if needed > free:
        raise MismatchError(
            f"what {sides} sides record of {tokens:,} tokens takes up to {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free in the run directory",
            "lower --max-sequence-tokens or --sequences, or free some",
        )


def dtype_of(facts: Fingerprint | dict[str, object]) -> Dtype | None:
    """What a side computes in, whatever its cache holds; None where no plain forward does."""
    precision = precision_of(facts)
    return None if precision is None else SHORT.get(precision.partition("-")[0])


def trainer_of(train: TrainSpec) -> TrainSpec:
    """The run's trainer on one rank, by itself: nothing of the engine's in it."""
    return replace(
        train, sequence_parallel=1, replay_routing=None, replay_source=None, inject=(), grad=False,
        routing=False,
    )  # fmt: skip


def passes_of(train: TrainSpec, dtypes: set[Dtype]) -> list[Pass]:
    """The trainer, a plain forward in each reduced dtype, the float32 reference last."""
    plain = [
        Pass(f"{PLAIN}:{dtype}", replace(plain_of(train, dtype), routing=False))
        for dtype in sorted(dtypes - {"fp32"})
    ]
    reference = replace(reference_of(train), routing=False)
    alone = replace(trainer_of(train), micro_batch_tokens=reference.micro_batch_tokens)
    return [Pass(TRAIN, alone), *plain, Pass(REFERENCE, reference)]


EAGER = {  # all tokens go through the modules, and no graph hides them
    "vllm": ("enforce_eager",),
    "sglang": ("disable_cuda_graph", "disable_radix_cache"),
}


def eager(engine: EngineSpec) -> EngineSpec:
    """The engine as it can be watched: no graphs, no routes."""
    own = EAGER.get(engine.engine, ())
    args = [pair for pair in engine.args if pair[0].lstrip("-").replace("-", "_") not in own]
    given = (*args, *((name, True) for name in own))
    return replace(engine, args=given, routing=False, prefill=True)


# Relative rounding of one operation in each dtype; float32 products differ by their order of sums.
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-12, "fp32": 2.0**-21}
BEYOND = 4.0  # times what the precision costs: a module that is a source
AMPLIFIES = 3.0  # times the error of its input: a module that is an amplifier
SPREADS = 4.0  # times the rounding: an input's error from which a gain is told


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one site and one sequence: sums of squares and a product, over tokens and features.

    ``y`` is the side's output, ``r`` the reference's in its own forward pass, ``s`` the reference's
    module on the side's input.

    Attributes:
        reference: sum of r²; ``own``: of y²; ``same``: of s².
        product: of y r.
        error: of (y - r)²; ``new``: of (y - s)²; ``inherited``: of (s - r)².
        flips, tokens: of a router: tokens with another set of experts, and all.
    """

    reference: float = 0.0
    own: float = 0.0
    same: float = 0.0
    product: float = 0.0
    error: float = 0.0
    new: float = 0.0
    inherited: float = 0.0
    flips: float = 0.0
    tokens: float = 0.0

    @classmethod
    def of(
        cls,
        own: NDArray[np.floating],
        reference: NDArray[np.floating],
        same: NDArray[np.floating],
        counted: NDArray[np.bool_] | None = None,
    ) -> Sums:
        """Of arrays [tokens, features]; what is no number counts as nothing, once as infinite.

        Args:
            counted: [tokens] those whose new error counts; the others chose between equals.

        Raises:
            ValueError: shapes that differ.
        """
        if not own.shape == reference.shape == same.shape:
            raise ValueError(f"shapes {own.shape}, {reference.shape}, {same.shape}")
        y, r, s = (np.asarray(array, np.float64) for array in (own, reference, same))
        lost = bool((np.isfinite(s) & ~np.isfinite(y)).any())
        finite = np.isfinite(y) & np.isfinite(r) & np.isfinite(s)
        y, r, s = (np.where(finite, array, 0.0) for array in (y, r, s))
        kept = slice(None) if counted is None else counted
        return cls(
            reference=float((r * r).sum()),
            own=float((y * y).sum()),
            same=float((s[kept] ** 2).sum()),
            product=float((y * r).sum()),
            error=float(((y - r) ** 2).sum()),
            new=math.inf if lost else float(((y - s)[kept] ** 2).sum()),
            inherited=float(((s - r) ** 2).sum()),
        )

    def __add__(self, other: Sums) -> Sums:
        names = [field.name for field in fields(self)]
        return Sums(*(getattr(self, name) + getattr(other, name) for name in names))


BySite = Mapping[Site, Several[Sums]]  # one entry a sequence, in one order


def total(sums: Several[Sums]) -> Sums:
    """Over sequences."""
    result = Sums()
    for part in sums:
        result = result + part
    return result


def ratio(part: float, whole: float) -> float:
    """Relative size from sums of squares; 0 of nothing, infinite where only the whole is nothing.

    >>> ratio(1.0, 4.0), ratio(0.0, 0.0)
    (0.5, 0.0)
    """
    if part == 0:
        return 0.0
    return math.sqrt(part / whole) if whole > 0 and math.isfinite(part) else math.inf


def site_errors(side: BySite, plain: BySite | None, dtype: str, layers: int) -> list[SiteError]:
    """Every site of one side, in the order of the forward pass.

    Args:
        plain: the same of the plain forward in the side's dtype; None: rounding alone.
        dtype: of the side, a key of ``ROUNDING``.
    """
    totals = {site: total(sums) for site, sums in side.items()}
    return [
        _site_error(site, side, plain, dtype, totals, layers)
        for site in sorted(totals, key=Site.order)
    ]


def _site_error(
    site: Site,
    side: BySite,
    plain: BySite | None,
    dtype: str,
    totals: Mapping[Site, Sums],
    layers: int,
) -> SiteError:
    sums, rounding = totals[site], ROUNDING[dtype]
    cost = None if plain is None or site not in plain else _new(plain[site])
    new = _new(side[site])
    excess = new / max(cost or 0.0, rounding)
    lowest = _lowest_excess(side[site], (plain or {}).get(site), rounding)
    gain = _gain(site, totals, layers, rounding)
    return SiteError(
        layer=site.layer,
        site=site.name,
        error=ratio(sums.error, sums.reference),
        cosine=_cosine(sums),
        new=new,
        cost=cost,
        excess=excess,
        lowest_excess=lowest,
        gain=gain,
        role=_role(lowest, gain),
        other_experts=sums.flips / sums.tokens if sums.tokens else None,
    )


def _new(sums: Several[Sums]) -> float:
    whole = total(sums)
    return ratio(whole.new, whole.same)


def _cosine(sums: Sums) -> float:
    norm = math.sqrt(sums.own * sums.reference)
    return sums.product / norm if norm else float(sums.own == sums.reference)


def _lowest_excess(side: Several[Sums], plain: Several[Sums] | None, rounding: float) -> float:
    """The smallest excess with any one sequence left out: no source rests on a single one."""
    excesses = []
    for index in range(len(side)):
        few = [*side[:index], *side[index + 1 :]] if len(side) > 1 else list(side)
        cost = 0.0
        if plain is not None and len(plain) == len(side):
            cost = _new([*plain[:index], *plain[index + 1 :]] if len(side) > 1 else plain)
        excesses.append(_new(few) / max(cost, rounding))
    return min(excesses, default=0.0)


def _gain(site: Site, totals: Mapping[Site, Sums], layers: int, rounding: float) -> float | None:
    """Relative error that leaves the reference's module over the largest that enters it."""
    entering = [
        ratio(totals[source].error, totals[source].reference)
        for source in site.inputs(layers)
        if source in totals
    ]
    if not entering or max(entering) < SPREADS * rounding:
        return None
    sums = totals[site]
    return ratio(sums.inherited, sums.reference) / max(entering)


def _role(lowest: float, gain: float | None) -> Role:
    if lowest > BEYOND:
        return "source"
    return "amplifier" if gain is not None and gain > AMPLIFIES else "passed on"
