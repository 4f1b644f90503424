"""What only a recorded run shows: its steps, all of its tokens, and whose columns they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch.analysis.cause_results import Cause, Evidence
from mismatch.features.recorded.rows import RowGroups
from mismatch.metrics.inference import student
from mismatch.metrics.row_sums import Step
from mismatch.reports.formatting import number
from mismatch.types import Estimate, Judgement, Pair

LEAST_STEPS = 5
# Of fewer steps, down to three: tokens of each, of which twice the mean is 6 standard errors.
FEW_STEPS, FEW_TOKENS = 3, 1_000
GROWS = 2.0  # times the first steps' mean |delta|; steps of a clean run differ by 1.3
APART = 1.5  # times the mean over the steps, from which a step's own number decides
IN_ORDER = 0.7  # rank correlation of mean |delta| with the step; of 8 equal steps 1 in 40 has it
STEP_TOKENS = 2_000  # of a step whose own numbers decide; fewer have too wide an interval
# Metrics of the levels table, and what a step has of them.
OF_STEP = {"logprob_abs_diff_mean": "abs_diff", "k3_kl": "k3", "clip_fraction": "clipped"}
ERRORS = 4.0  # standard errors, beyond which a mean ratio is not 1


@dataclass(frozen=True)
class Growth:
    """How mean |delta| grows over the steps of a run."""

    first: int
    last: int
    """Steps."""
    before: float
    after: float
    """Median mean |delta| of the first and of the last fifth of the steps, nats."""

    def sentence(self) -> str:
        """Say how far apart the sides are at first and at last."""
        return (
            f"mean |delta| grows over the steps: {number(self.before)} nats from step {self.first}"
            f", {number(self.after)} up to step {self.last} ({self.after / self.before:.1f}×)"
        )


def growth_of(steps: Sequence[Step]) -> Growth | None:
    """Return how the mismatch grows; None where it does not, or where steps are few."""
    held = [step for step in steps if step.tokens]
    few = len(held) < LEAST_STEPS
    if len(held) < FEW_STEPS or (few and min(step.tokens for step in held) < FEW_TOKENS):
        return None
    sizes = np.array([step.abs_diff for step in held])
    part = max(1, len(held) // 5)
    before, after = float(np.median(sizes[:part])), float(np.median(sizes[-part:]))
    if not after > GROWS * before > 0:
        return None
    from scipy.stats import spearmanr

    if not spearmanr(np.arange(len(sizes)), sizes).statistic > IN_ORDER:
        return None
    return Growth(held[0].step, held[-1].step, before, after)


def worst_of(steps: Sequence[Step], name: str) -> Step | None:
    """Return the step with the largest of a number, of those with enough tokens."""
    held = [step for step in steps if step.tokens >= STEP_TOKENS]
    return max(held, key=lambda step: getattr(step, name), default=None)


def of_all(metrics: dict[str, Estimate], whole: Step) -> dict[str, Estimate]:
    """Return metrics with their values of all tokens; an interval that excludes one is left out."""
    found = dict(metrics)
    for name, of_step in OF_STEP.items():
        if (each := metrics.get(name)) is None:
            continue
        value = getattr(whole, of_step)
        inside = each.low is not None and each.high is not None and each.low <= value <= each.high
        flags = each.flags if inside else ("overflow",) * bool(np.isinf(value))
        low, high = (each.low, each.high) if inside else (None, None)
        found[name] = replace(each, value=value, low=low, high=high, flags=(*flags, "whole-dump"))
    return found


def judged_by_steps(
    judgements: Sequence[Judgement], steps: Sequence[Step]
) -> tuple[Judgement, ...]:
    """Return judgements with the numbers of the worst step, where those decide."""
    judged = []
    for each in judgements:
        name = OF_STEP.get(each.metric, "")
        worst = worst_of(steps, name) if name else None
        # No step hides in a mean that is nearly as large: its interval decides.
        if worst is not None and getattr(worst, name) > APART * each.value:
            value = getattr(worst, name)
            if not value <= each.unfit and each.status != "unfit":
                each = replace(each, status="unfit", value=value, inconclusive=False)
            elif not value <= each.healthy and each.status == "healthy":
                each = replace(each, status="tolerable", value=value)
        judged.append(each)
    return tuple(judged)


def disagreement(whole: Step | None, steps: Sequence[Step], compared: float, tokens: int) -> str:
    """Say what k3 is of all tokens and at the worst step, where the compared tokens hide it."""
    worst = worst_of(steps, "k3")
    parts = []
    if whole is not None and whole.k3 > GROWS * compared:
        parts.append(f"{number(whole.k3)} of all {whole.tokens:,} tokens")
    if worst is not None and worst.k3 > GROWS * compared:
        parts.append(f"{number(worst.k3)} at step {worst.step} ({worst.tokens:,} tokens)")
    if not parts:
        return ""
    return f"k3 is {' and '.join(parts)}, and {number(compared)} of the {tokens:,} compared tokens"


@dataclass(frozen=True)
class Columns:
    """What is wrong with the two columns; "" where nothing is seen."""

    fault: str = ""
    fix: str = ""
    unseen: str = ""
    """Why it cannot be seen whether they are swapped."""


def columns_of(pair: Pair) -> Columns:
    """Return whether one column is a copy of the other, or the two are swapped.

    Tokens are drawn from the rollout's distribution p: the mean of q/p is 1, whatever the trainer's
    q is. Of swapped columns the mean is that of p/q, which is larger by mean(delta²), about
    2 KL(p ‖ q). The sign of the mean of delta shows the same with half the strength.
    """
    delta = pair.delta
    if not np.any(delta):
        return Columns(
            f"all {len(delta):,} values of the trainer equal the sampler's to the last bit",
            "is one a copy of the other, e.g. of a trainer that takes the sampler's values "
            "(bypass_mode, an on-policy override)? record what the trainer computes itself",
        )
    prompt = pair.prompt[pair.sequence]
    low, high = (ratio_off(sign * delta, prompt) for sign in (1.0, -1.0))
    if abs(low.errors) > ERRORS and abs(high.errors) < 2.0:
        return Columns(
            "the columns fit better the other way round: the mean of exp(train - rollout) is "
            f"{abs(low.errors):.0f} standard errors from 1, that of exp(rollout - train) "
            f"{abs(high.errors):.1f}",
            "is rollout what the engine gave, and train what the trainer computed?",
        )
    shown = float(np.mean(delta * delta)) / low.error if low.error else 0.0
    if shown >= ERRORS:
        return Columns()
    tokens = float(f"{len(delta) * (ERRORS / shown) ** 2:.2g}") if shown else 0.0
    needs = f"; about {tokens:,.0f} would" if tokens else ""
    size = f"{len(delta):,} tokens that are {number(float(np.abs(delta).mean()))} nats apart"
    return Columns(unseen=f"whether the two columns are swapped: {size} cannot tell{needs}")


@dataclass(frozen=True)
class RatioOff:
    """How far the mean of exp(delta) is from 1, by prompts."""

    errors: float = 0.0
    """In standard errors."""
    error: float = 0.0
    """The standard error; 0: there is none."""


def ratio_off(delta: np.ndarray, prompt: np.ndarray) -> RatioOff:
    """Return how many standard errors, by prompts, the mean of exp(delta) is from 1."""
    kinds, kind = np.unique(prompt, return_inverse=True)
    if len(kinds) < LEAST_STEPS:
        return RatioOff()
    with np.errstate(over="ignore"):
        sums = np.bincount(kind, np.expm1(delta))
    if not np.isfinite(sums).all():
        return RatioOff()
    count = np.bincount(kind)
    mean = sums.sum() / count.sum()
    error = np.sqrt(((sums - mean * count) ** 2).sum() * len(kinds) / (len(kinds) - 1))
    error *= student(len(kinds) - 1) / 1.96 / count.sum()
    if not error > 0 or not np.isfinite(error):
        return RatioOff()
    return RatioOff(float(mean / error), float(error))


def causes_of(
    rows: RowGroups | None, growth: Growth | None, steps: Sequence[Step]
) -> tuple[Cause, ...]:
    """Return causes that rows and steps show, suspected: nothing was run."""
    if rows is not None and rows.shifted:
        places = Evidence("rows that shift partway through", ", ".join(map(str, rows.shifted)))
        lag = Evidence("tokens by which", rows.shifted_by)
        return (Cause("misalignment", "suspected", "either", None, (places, lag)),)
    if growth is not None:
        grown = Evidence("mean |delta|, last steps over first", growth.after / growth.before, "1")
        alike = ("lora-not-applied", "prefix-cache-stale")
        return (Cause("stale-weights", "suspected", "engine", None, (grown,), alike),)
    best = rows.shared[0] if rows is not None and rows.off and rows.shared else None
    if rows is not None and rows.with_position > 1 and best and best.attribute == "step":
        return ()  # longer responses of a step are farther apart
    if best is None or best.attribute not in ("step", "weight_version"):
        return ()
    which = Evidence("rows that are off", f"{best.attribute} {', '.join(best.values)}")
    stale = Cause("stale-weights", "suspected", "engine", None, (which,), ("prefix-cache-stale",))
    if best.attribute == "weight_version":
        return (stale,)
    return stale, Cause("prefix-cache-stale", "suspected", "engine", None, (which,))
