"""Which passes take a gradient, and of what batch. Pure.

The loss is ``-sum_t c_t · logprob_t``, with everything in c a constant to autograd: DAPO's
token-level loss (arXiv 2503.14476), c = A_i / (action tokens of the batch). A_i is GRPO's advantage
of sample i, (r - mean) / (std + 1e-6) within its prompt (arXiv 2402.03300).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.fixes.context import Context, context_of
from mismatch.experiments.fixes.planning import plan_fixes
from mismatch.experiments.scoring_passes import reference_of
from mismatch.metrics.importance_weights import group_advantages
from mismatch.specs import OWN_SCORER, CheckSpec, TrainSpec
from mismatch.types import Floats, Ints, Rollout

REWARDS = "rewards"
REFERENCE, BASELINE = "reference", "baseline"
# Fixes of the trainer whose gradient is worth a pass where --fix names none.
NATURAL = ("attention-sinks", "router-replay", "fp32-lm-head", "fp16", "fp32")


@dataclass(frozen=True, slots=True)
class Batch:
    """The prompts whose gradient is taken.

    Attributes:
        prompts: [P] prompt indices.
        deciding: how many of them have samples whose advantages differ.
        sequences, tokens: samples of these prompts, and their action tokens.
        advantages: "rewards", or how they were made where rewards do not differ.
        coefficients: [A] of every action token of the rollout; 0 outside the batch.
    """

    prompts: Ints
    deciding: int
    sequences: int
    tokens: int
    advantages: str
    coefficients: Floats


def choose_batch(rollout: Rollout, prompts: int, seed: int) -> Batch:
    """Choose at most ``prompts`` prompts, in seeded order, those that decide first.

    A prompt decides if its samples have different rewards; the others have advantages of 0 and no
    gradient, as they would in training. Where no prompt decides (no rewards, or all samples of each
    alike), advantages are signs: half of a prompt's samples +1, the others -1, less their mean.

    Raises:
        EmptyComparison: no action token.
    """
    if rollout.n_actions == 0:
        raise EmptyComparison("gradients: the rollout has no action token")
    advantage, source = np.zeros(rollout.n_sequences), REWARDS
    if rollout.rewards is not None:
        advantage = group_advantages(rollout.rewards, rollout.prompt_index)
    if not advantage.any():
        given = rollout.rewards is not None
        why = "all samples of each prompt have one reward" if given else "no rewards"
        advantage, source = _signs(rollout.prompt_index, seed), f"seeded signs: {why}"
    order = np.random.default_rng(seed).permutation(np.unique(rollout.prompt_index))
    decides = np.isin(order, rollout.prompt_index[advantage != 0.0])
    chosen = order[np.argsort(~decides, kind="stable")][:prompts]
    inside = np.isin(rollout.prompt_index, chosen)
    sequence = rollout.sequence_of_token[rollout.actions]
    tokens = int(inside[sequence].sum())
    return Batch(
        prompts=chosen.astype(np.int64),
        deciding=int(min(decides.sum(), len(chosen))),
        sequences=len(np.unique(sequence[inside[sequence]])),
        tokens=tokens,
        advantages=source,
        coefficients=np.where(inside, advantage, 0.0)[sequence] / tokens,
    )


def _signs(prompt: Ints, seed: int) -> Floats:
    """Return ±1 for every sequence, balanced and centred within its prompt; alone: +1 or -1."""
    signs = np.zeros(len(prompt))
    for index in np.unique(prompt):
        rows = np.flatnonzero(prompt == index)
        drawn = np.random.default_rng([seed, int(index)])
        half = np.where(np.arange(len(rows)) % 2 == 0, 1.0, -1.0) * drawn.choice([1.0, -1.0])
        signs[rows] = drawn.permutation(half - half.mean() if len(rows) > 1 else half)
    return signs


@dataclass(frozen=True, slots=True)
class Planned:
    """One pass with gradients.

    Attributes:
        id: "reference", "baseline", or a fix's id.
        label: the trainer in words.
    """

    id: str
    label: str
    spec: TrainSpec


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """What ``--gradients`` asks of a training world.

    Attributes:
        passes: the reference first; no two have the same settings.
        prompts: of the batch, at most.
        seed: of the choice of prompts, and of signs that stand in for rewards.
        same: fix -> the pass of equal settings, whose gradient it has.
        not_tested: one sentence each.
    """

    passes: tuple[Planned, ...]
    prompts: int
    seed: int
    same: dict[str, str] = field(default_factory=dict)
    not_tested: tuple[str, ...] = ()

    @property
    def made_by(self) -> str:
        """Twelve hex digits that change with anything in the plan."""
        text = json.dumps(asdict(self), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def plan_gradients(spec: CheckSpec, prompts: int, context: Context | None = None) -> GradientPlan:
    """Plan the reference, the trainer and its fixes: those of ``--fix``, else the natural fixes.

    Raises:
        MismatchError: a trainer whose gradient cannot be taken, or that is the reference itself.
    """
    if spec.train.scorer != OWN_SCORER:
        fault = f"the gradient of {spec.train.scorer}'s own code is not taken"
        raise MismatchError(fault, "--scorer fsdp takes that of the same settings in our trainer")
    # The plain kernels keep every score for the backward pass.
    reference = replace(reference_of(spec.train), attention="auto", experts="auto")
    fixes = plan_fixes(
        spec if spec.fixes else replace(spec, fixes=NATURAL), context or context_of(spec)
    )
    passes = [
        Planned(REFERENCE, "float32 reference", _with_gradients(reference)),
        Planned(BASELINE, "the trainer as it is", _with_gradients(spec.train)),
    ]
    if passes[1].spec == passes[0].spec:
        raise MismatchError("the trainer is the float32 reference itself", "nothing to compare")
    same: dict[str, str] = {}
    for variant in (each for each in fixes.variants if not each.folder):
        train = _with_gradients(variant.spec.train)
        equal = next((each.id for each in passes if each.spec == train), None)
        if equal is not None:
            same[variant.id] = equal
        else:
            passes.append(Planned(variant.id, variant.outcome().summary, train))
    elsewhere = [variant.id for variant in fixes.variants if variant.folder]
    not_tested = (
        f"gradient of {', '.join(elsewhere)}: these sample other tokens; the gradients here "
        "are of one batch",
    )
    return GradientPlan(tuple(passes), prompts, spec.seed, same, not_tested if elsewhere else ())


def _with_gradients(spec: TrainSpec) -> TrainSpec:
    # FSDP2 keeps a gradient in the dtype of its parameter at rest: float32, as frameworks do.
    master = "fp32" if spec.master_dtype == "auto" else spec.master_dtype
    return replace(spec, grad=True, routing=False, master_dtype=master)
