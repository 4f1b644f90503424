"""Differences of a metric: before and after a fix, one scoring and another, with their interval.

    paired      two scorings of the same tokens: whole prompts are resampled, both sides at once
    difference  two runs with different tokens: prompts that both runs hold are resampled as one,
                so that what they share cancels; without common prompts the two are independent

Both are other minus one. The interval of a mean or of a smooth function of means is the bootstrap's
(:mod:`mismatch.metrics.inference`), of the difference. Quantiles: each side's influence per prompt
is scaled by the width of a side's Woodruff interval (Bahadur's representation), and subtracted. Two
independent samples, and shares that differ in few prompts: the two intervals combined by MOVER (Zou
and Donner 2008, "Construction of confidence limits about effect measures"), which keeps their
asymmetry. Extremes have a difference and no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.inference import FEW_PROMPTS, RARE_PROMPTS, mover, student
from mismatch.metrics.registry import REAL, SHARE, Array, Combine, Metric, columns, first, floats
from mismatch.types import Estimate, Floats, Ints, Rollout

UNSEEN = -math.log(0.025)  # events that a Poisson count of 0 leaves possible, at 97.5 %


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens of one run, as metrics ask for them.

    Attributes:
        arrays: name -> [A], as :func:`mismatch.analysis.comparison.inputs` gives them.
        sequence: [A] sequence of each action token.
        prompt: [N] prompt of each sequence; equal numbers in two samples are the same prompt
            (:func:`common_prompts`).
    """

    arrays: Mapping[str, Array]
    sequence: Ints
    prompt: Ints


def paired(metric: Metric, old: Sample, new: Sample, *, seed: int = 0) -> Estimate:
    """``metric(new) - metric(old)`` on the same tokens, with its 95 % interval.

    Args:
        old, new: for instance the ``delta`` of two scorings against one rollout.

    Raises:
        EmptyComparison: no token.
        MismatchError: an array that the metric needs is missing or of another length, or the
            metric is undefined on a side.
    """
    before, after = _terms(metric, old), _terms(metric, new)
    bare = _bare(_value(metric, after) - _value(metric, before), old)
    if metric.kind == "extreme" or bare.flags:
        return bare
    if np.array_equal(before, after):
        return replace(bare, low=0.0, high=0.0)
    if metric.kind == "quantile":
        return _quantiles(metric, old, replace(old, arrays=new.arrays), bare, seed)
    estimator = Estimator(*_units(metric, old), seed=seed)
    if metric.kind == "mean":
        change = floats(after - before)
        if metric.unit == "share" and np.isin(change, (-1.0, 0.0, 1.0)).all():
            few = _few_events(metric, change, old, estimator)
            if few is not None:
                return _like(bare, few)
        return _like(bare, estimator.one(_plain(metric, first), {"terms": change}))
    width = columns(before).shape[1]

    def combine(means: Floats) -> Floats:
        return floats(metric.combine(means[..., width:]) - metric.combine(means[..., :width]))

    both = np.concatenate([columns(before), columns(after)], axis=1)
    return _like(bare, estimator.one(_plain(metric, combine), {"terms": both}))


def difference(metric: Metric, old: Sample, new: Sample, *, seed: int = 0) -> Estimate:
    """``metric(new) - metric(old)`` of two runs with different tokens.

    The counts of the estimate are those of both runs together; ``n_prompts`` counts a prompt that
    both hold once.

    Raises:
        EmptyComparison: a run without a token.
        MismatchError: an array that the metric needs is missing or of another length, or the
            metric is undefined on a side.
    """
    before, after = _terms(metric, old), _terms(metric, new)
    sequence = np.concatenate([old.sequence, new.sequence + len(old.prompt)])
    joint = Sample({}, sequence, np.concatenate([old.prompt, new.prompt]))
    bare = _bare(_value(metric, after) - _value(metric, before), joint)
    if metric.kind == "extreme" or bare.flags:
        return bare
    held = [_held(sample) for sample in (old, new)]
    if not np.isin(held[0], held[1]).any():
        return _independent(metric, old, new, bare, seed)
    if metric.kind == "quantile":
        estimate = _quantiles(metric, old, new, bare, seed)
    else:
        stacked, combine = _stacked(columns(before), columns(after), metric.combine)
        estimator = Estimator(*_units(metric, joint), seed=seed)
        estimate = _like(bare, estimator.one(_plain(metric, combine), {"terms": stacked}))
    few = min(len(prompts) for prompts in held) < FEW_PROMPTS
    return replace(estimate, flags=_united(estimate.flags, ("few-prompts",) if few else ()))


def excludes_zero(estimate: Estimate) -> bool | None:
    """Return whether a difference excludes 0 at 95 %; None where it has no interval.

    :func:`mismatch.metrics.inference.prompts_needed` of the estimate and 0 says how many prompts
    would tell it, where these do not.
    """
    if estimate.low is None or estimate.high is None:
        return None
    return estimate.low > 0.0 or estimate.high < 0.0


def common_prompts(first_run: Rollout, second_run: Rollout) -> tuple[Ints, Ints]:
    """Return numbers for the prompts of two runs, [N] each: the same tokens, the same number."""
    numbers: dict[bytes, int] = {}
    numbered = []
    for rollout in (first_run, second_run):
        first = np.array(
            [start + int(np.argmax(rollout.action_mask[start:stop]))
             for start, stop in zip(rollout.offsets[:-1], rollout.offsets[1:], strict=True)]
        )  # fmt: skip
        keys = [
            rollout.token_ids[start:stop].astype(np.int64).tobytes()
            for start, stop in zip(rollout.offsets[:-1], first, strict=True)
        ]
        numbered.append(np.array([numbers.setdefault(key, len(numbers)) for key in keys]))
    return numbered[0], numbered[1]


def _terms(metric: Metric, sample: Sample) -> Floats:
    tokens = len(sample.sequence)
    if tokens == 0:
        raise EmptyComparison(f"{metric.name}: no action tokens to compare")
    for name in metric.needs:
        if name not in sample.arrays:
            raise MismatchError(f"{metric.name} needs {name!r}, which a side does not have")
        if len(sample.arrays[name]) != tokens:
            given = len(sample.arrays[name])
            fault = f"{metric.name}: {name} has {given} tokens, expected {tokens}"
            raise MismatchError(fault, "compare scorings of the same tokens")
    with np.errstate(all="ignore"):
        terms = metric.terms(**{name: sample.arrays[name] for name in metric.needs})
    return floats(np.stack(terms, axis=1) if isinstance(terms, tuple) else terms)


def _value(metric: Metric, terms: Floats) -> float:
    value = metric.value(terms)
    if np.isnan(value):
        raise MismatchError(f"{metric.name} is undefined on a side: zero variance or entropy")
    return value


def _plain(metric: Metric, combine: Combine) -> Metric:
    """Return the metric of a difference, on terms that are there already."""

    def given(terms: Floats) -> Floats:
        return terms

    return replace(
        metric, kind="ratio", reduction="token", terms=given, combine=combine, bounds=REAL,
    )  # fmt: skip


def _bare(value: float, sample: Sample) -> Estimate:
    counts = len(sample.sequence), len(np.unique(sample.sequence)), len(_held(sample))
    return Estimate(value, None, None, *counts, flags=() if np.isfinite(value) else ("overflow",))


def _like(bare: Estimate, estimate: Estimate | None) -> Estimate:
    """Return the interval and flags of ``estimate``, which counted units."""
    assert estimate is not None  # finite terms, and both sides are defined
    return replace(bare, low=estimate.low, high=estimate.high, flags=estimate.flags)


def _units(metric: Metric, sample: Sample) -> tuple[Ints, Ints]:
    """Return what an estimator takes (sequence, prompt) so that one of its tokens is one term."""
    if metric.reduction == "token":
        return sample.sequence, sample.prompt
    present = np.unique(sample.sequence)
    return np.arange(len(present)), sample.prompt[present]


def _held(sample: Sample) -> Ints:
    """Return the prompts of the sequences that hold tokens."""
    return np.unique(sample.prompt[np.unique(sample.sequence)])


def _stacked(before: Floats, after: Floats, combine: Combine) -> tuple[Floats, Combine]:
    """Units of both runs in one table: terms and a count per run, so that each keeps its mean."""
    width = before.shape[1]
    terms = np.zeros((len(before) + len(after), 2 * width + 2))
    terms[: len(before), :width], terms[: len(before), width] = before, 1.0
    terms[len(before) :, width + 1 : -1], terms[len(before) :, -1] = after, 1.0

    def of_means(means: Floats) -> Floats:
        first = means[..., :width] / means[..., width, None]
        second = means[..., width + 1 : -1] / means[..., -1, None]
        return floats(combine(second) - combine(first))

    return terms, of_means


def _independent(metric: Metric, old: Sample, new: Sample, bare: Estimate, seed: int) -> Estimate:
    sides = [
        Estimator(sample.sequence, sample.prompt, seed=seed + number).one(metric, sample.arrays)
        for number, sample in enumerate((old, new))
    ]
    assert sides[0] is not None
    assert sides[1] is not None
    flags = _united(sides[0].flags, sides[1].flags)
    interval = mover(sides[0], sides[1])
    if interval is None:
        return replace(bare, flags=flags)
    return replace(bare, low=interval[0], high=interval[1], flags=flags)


def _few_events(
    metric: Metric, change: Floats, sample: Sample, estimator: Estimator
) -> Estimate | None:
    """Estimate a share that changes in few prompts: Wilson's intervals of gains and losses.

    Where nothing was gained (or lost), so many events may just not have been seen as a count of 0
    leaves possible, each as large as those seen on the other side.
    """
    of_unit, of_sequence = _units(metric, sample)
    where = of_sequence[of_unit]
    seen = [len(np.unique(where[change == sign])) for sign in (-1.0, 1.0)]
    if max(seen) >= RARE_PROMPTS or max(seen) == 0:
        return None
    share = replace(_plain(metric, first), kind="mean", bounds=SHARE)
    sides = []
    for sign, prompts in zip((-1.0, 1.0), seen, strict=True):
        side = estimator.one(share, {"terms": floats(change == sign)})
        assert side is not None
        if not prompts:
            each = float(np.abs(change).sum()) / max(seen)
            side = replace(side, low=0.0, high=min(1.0, UNSEEN * each / len(change)))
        sides.append(side)
    interval = mover(sides[0], sides[1])
    flags = _united((*sides[0].flags, "few-events"), sides[1].flags, without="no-events")
    estimate = replace(sides[1], value=float(change.mean()), low=None, high=None, flags=flags)
    return estimate if interval is None else replace(estimate, low=interval[0], high=interval[1])


def _quantiles(metric: Metric, old: Sample, new: Sample, bare: Estimate, seed: int) -> Estimate:
    """Difference of two quantiles: influences per prompt, scaled by each side's own interval."""
    prompts = np.unique(np.concatenate([_held(old), _held(new)]))
    influence = np.zeros(len(prompts))
    flags: tuple[str, ...] = ()
    for sign, sample in ((-1.0, old), (1.0, new)):
        quantile = Estimator(sample.sequence, sample.prompt, seed=seed).one(metric, sample.arrays)
        assert quantile is not None
        flags = _united(flags, quantile.flags)
        if quantile.low is None or quantile.high is None:
            return replace(bare, flags=flags)
        terms = _terms(metric, sample)
        under = terms <= quantile.value
        sequences = np.unique(sample.sequence)
        of_unit = sample.sequence if metric.reduction == "token" else sequences
        cluster = np.searchsorted(prompts, sample.prompt[of_unit])
        residual = floats(
            np.bincount(cluster, weights=under - under.mean(), minlength=len(prompts))
        )
        error = _error(residual, len(_held(sample)))
        arm = (quantile.high - quantile.low) / (2.0 * student(len(_held(sample)) - 1))
        influence -= sign * residual * (arm / error if error > 0.0 else 0.0)
    reach = student(len(prompts) - 1) * _error(influence, len(prompts))
    return replace(bare, low=bare.value - reach, high=bare.value + reach, flags=flags)


def _error(residual: Floats, prompts: int) -> float:
    return math.sqrt(prompts / (prompts - 1) * float((residual**2).sum()))


def _united(flags: tuple[str, ...], others: tuple[str, ...], without: str = "") -> tuple[str, ...]:
    return tuple(flag for flag in dict.fromkeys([*flags, *others]) if flag != without)
