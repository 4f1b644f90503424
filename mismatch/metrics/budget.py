"""Where the mismatch comes from: each step between the engine and the trainer, measured.

    train - decode = (train - reference) + (reference - prefill) + (prefill - decode)

holds exactly for every token, so it holds for mean delta. For the spread of delta, the share of a
step is ``cov(step, delta) / var(delta)``: the shares sum to 1, and one may be negative (a step that
undoes part of another), so they are drawn as a waterfall and never as a stack. KL, mean |delta| and
maxima do not add along a chain. Measurements beside the chain say how large noise alone is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.inference import PERCENTILE_FROM, PromptSums, central, student
from mismatch.metrics.registry import POSITIVE, REAL, Bounds, Combine, Kind, Metric, first, floats
from mismatch.types import Estimate, Floats, Ints

Named = tuple[str, Floats]  # a scoring's name and its logprobs, [A] nats


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the chain, or one measurement beside it: right - left, per token.

    >>> same = Estimate(0.0, 0.0, 0.0, n_tokens=8192, n_sequences=256, n_prompts=64)
    >>> Step("vllm:decode", "vllm:prefill", mean=same, size=same, share=same).left
    'vllm:decode'

    Attributes:
        mean: mean of right - left, nats; adds up along the chain.
        size: mean |right - left|, nats; does not.
        share: of the spread of delta. In the chain ``cov(step, delta) / var(delta)``; beside it
            ``sd(right - left) / sd(delta)``. None where delta does not vary.
    """

    left: str
    right: str
    mean: Estimate
    size: Estimate
    share: Estimate | None


@dataclass(frozen=True, slots=True)
class Gap:
    """A step that was not run.

    >>> Gap("trainer repeated", "the noise floor was switched off").reason
    'the noise floor was switched off'
    """

    step: str
    reason: str


@dataclass(frozen=True, slots=True)
class Budget:
    """The error budget of one run.

    Attributes:
        mean: mean delta over the whole chain, nats.
        spread: standard deviation of delta, nats.
        steps: from the engine's decode to the trainer; their means add up to ``mean``.
        beside: repeated, regrouped, with gradients, replayed …
        gaps: what was not run, and why.
        notes: what a reader of the steps must know.
    """

    left: str
    right: str
    mean: Estimate
    spread: Estimate
    steps: tuple[Step, ...]
    beside: tuple[Step, ...] = ()
    gaps: tuple[Gap, ...] = ()
    notes: tuple[str, ...] = ()


def error_budget(
    chain: Sequence[Named],
    beside: Sequence[tuple[Named, Named]],
    *,
    sequence: Ints,
    prompt: Ints,
    seed: int = 0,
    gaps: Sequence[Gap] = (),
    notes: Sequence[str] = (),
) -> Budget:
    """Split delta over a chain of scorings of the same tokens.

    Args:
        chain: from the law that sampled to the trainer, at least two.
        beside: (left, right) pairs that would agree without noise.
        sequence: [A] sequence of each action token.
        prompt: [N] prompt of each sequence.

    Raises:
        EmptyComparison: no token.
        MismatchError: fewer than two scorings, other lengths, or logprobs that are not finite.
    """
    if len(chain) < 2:
        raise MismatchError("an error budget needs two scorings at least")
    for name, values in [*chain, *(side for pair in beside for side in pair)]:
        _require(name, values, len(sequence))
    estimator = Estimator(sequence, prompt, seed=seed)
    delta = chain[-1][1] - chain[0][1]
    links = list(itertools.pairwise(chain))
    cluster = np.unique(np.asarray(prompt)[sequence], return_inverse=True)[1]
    return Budget(
        left=chain[0][0],
        right=chain[-1][0],
        mean=_one(estimator, MEAN, delta),
        spread=_one(estimator, SPREAD, _squared(delta)),
        steps=tuple(_step(estimator, cluster, *link, delta, SHARE_OF_SPREAD) for link in links),
        beside=tuple(_step(estimator, cluster, *pair, delta, RELATIVE_SPREAD) for pair in beside),
        gaps=tuple(gaps),
        notes=tuple(notes),
    )


def _require(name: str, values: Floats, tokens: int) -> None:
    if tokens == 0:
        raise EmptyComparison()
    if len(values) != tokens:
        raise MismatchError(
            f"{name} has {len(values)} logprobs, expected {tokens}",
            "score the rollout's own tokens",
        )
    if not np.isfinite(values).all():
        raise MismatchError(f"{name}: {int((~np.isfinite(values)).sum())} logprobs are not finite")


def _step(
    estimator: Estimator,
    cluster: Ints,
    left: Named,
    right: Named,
    delta: Floats,
    share: Metric,
) -> Step:
    """``cluster`` [A] numbers the prompts of the tokens from 0."""
    step = right[1] - left[1]
    # Centred first: the products lose no digits where a constant shift is large.
    away, apart = step - step.mean(), delta - delta.mean()
    terms = np.stack([away, apart, away * apart, apart * apart, away * away], axis=1)
    estimate = estimator.one(share, {"terms": terms}) if terms[:, 3].any() else None
    if estimate is not None and "heavy-tail" in estimate.flags:
        sums = PromptSums.of(terms, cluster, estimator.n_prompts, share.combine)
        estimate = _within(estimate, estimator, sums)
    return Step(
        left[0],
        right[0],
        _one(estimator, MEAN, step),
        _one(estimator, SIZE, np.abs(step)),
        estimate,
    )


def _within(share: Estimate, estimator: Estimator, sums: PromptSums) -> Estimate:
    """The share's interval, cut to the union of the percentile interval and Student's t.

    Where one prompt carries delta, resamples without it have next to no standard error, and
    bootstrap-t would stretch to thousands of per cent.
    """
    if share.low is None or share.high is None or estimator.n_prompts >= PERCENTILE_FROM:
        return share
    percentiles = central(sums.resampled(estimator.weights)[0]) or (-np.inf, np.inf)
    arm = student(estimator.n_prompts - 1) * sums.error
    low, high = min(percentiles[0], sums.value - arm), max(percentiles[1], sums.value + arm)
    return replace(share, low=max(share.low, low), high=min(share.high, high))


def _one(estimator: Estimator, metric: Metric, terms: Floats) -> Estimate:
    estimate = estimator.one(metric, {"terms": terms})
    assert estimate is not None  # a mean of finite numbers is always defined
    return estimate


def _squared(delta: Floats) -> Floats:
    away = delta - delta.mean()
    return floats(np.stack([away, away * away], axis=1))


def _terms(terms: Floats) -> Floats:
    return terms


def _deviation(means: Floats) -> Floats:
    return floats(np.sqrt(np.maximum(means[..., 1] - means[..., 0] ** 2, 0.0)))


def _covariance_share(means: Floats) -> Floats:
    step, delta, product, square, _ = np.moveaxis(means, -1, 0)
    variance = square - delta * delta
    return np.where(variance > 0.0, (product - step * delta) / variance, np.nan)


def _relative_spread(means: Floats) -> Floats:
    step, delta, _, square, own = np.moveaxis(means, -1, 0)
    variance = square - delta * delta
    inner = np.maximum(own - step * step, 0.0) / variance
    return np.where(variance > 0.0, np.sqrt(inner), np.nan)


def _metric(name: str, kind: Kind, combine: Combine, unit: str, bounds: Bounds) -> Metric:
    """A number of the budget alone: outside the registry, because no comparison has it."""
    return Metric(name, _terms, kind, unit, combine=combine, bounds=bounds)


MEAN = _metric("budget_mean", "mean", first, "nats", REAL)
SIZE = _metric("budget_size", "mean", first, "nats", POSITIVE)
SPREAD = _metric("budget_spread", "ratio", _deviation, "nats", POSITIVE)
SHARE_OF_SPREAD = _metric("budget_share", "ratio", _covariance_share, "share", REAL)
RELATIVE_SPREAD = _metric("budget_relative", "ratio", _relative_spread, "share", POSITIVE)
