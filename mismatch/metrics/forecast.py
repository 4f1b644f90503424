"""What importance weights will look like at a planned response length.

S, the sum of delta over the first T tokens of a response, has mean ``T mu`` and variance

    V(T) = T g(0) + 2 sum over lags k <= K of (T - k) g(k) + b (T - K)(T - K - 1)

(the variance of a sum of a stationary series; b, the covariance at all lags beyond K, is what a
whole sequence has in common and grows with T²). mu, g and b come from this run's tokens: g(k) over
8 lags, and on until two in a row cannot be told from 0; b only where it can. S is then taken as
normal, which turns (mu, V) into effective sample sizes and rejection rates. Heavy tails break that
last step, and are flagged.

Before it is believed, the same fit is made on the first half of the positions and has to predict
the spread at the full length. That vouches for a factor of 2, not for a factor of 100: every
forecast says how far it reaches beyond the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.autocovariance import (
    CAP,
    AutocovarianceFit,
    DeltaSequences,
    below,
    capped_ess,
)
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.registry import POSITIVE, REAL, SHARE, Bounds, Combine, Metric, floats
from mismatch.metrics.tails import heavy_tail, hill_index
from mismatch.types import Estimate, Floats, Ints

TARGET = 16_384  # tokens
LEAST_TOKENS = 32  # of the responses that the check needs
LEAST_SEQUENCES, LEAST_PROMPTS = 32, 8  # that have to be that long
CHECK_WRONG = 0.1  # relative error of the held-back check that is worth a flag
FAR = 2.0  # reach beyond which nothing was checked
GEO_BAND = (0.999, 1.001)


@dataclass(frozen=True, slots=True)
class Row:
    """One response length.

    Attributes:
        spread: standard deviation of S, nats.
        ess: effective share of the sequences with weights min(exp(S), 2): ``ess_seq``.
        ess_untruncated: the same with weights exp(S); a sample never shows less than 1/N.
        truncated: share with exp(S) > 2: sequence TIS truncates it, a sequence mask drops it.
        outside: share with exp(S) outside [1/2, 2]: what a two-sided sequence mask drops.
        geo_rejected: share with exp(S/T) outside [0.999, 1.001]: geometric rejection.
    """

    length: int
    spread: Estimate
    ess: Estimate
    ess_untruncated: Estimate
    truncated: Estimate
    outside: Estimate
    geo_rejected: Estimate


@dataclass(frozen=True, slots=True)
class HeldBack:
    """The fit on early positions against what the later ones show, on the same sequences.

    Attributes:
        fitted: positions that the fit saw.
        length: positions that it had to predict.
        predicted, observed: standard deviation of S at ``length``, nats.
        error: predicted / observed - 1, with its interval.
    """

    fitted: int
    length: int
    predicted: float
    observed: float
    error: Estimate


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of one comparison.

    Attributes:
        target: the planned response length, tokens.
        longest: the length that enough responses of this run reach (32, of 8 prompts).
        reach: target / longest.
        floor: 1 / N, below which no effective share of a sample can fall.
        mean, variance: of delta, per token; None where there was not enough.
        inflation: long-run variance of a token over its own: 1 without autocorrelation.
        lags: autocovariances that are counted.
        persistent: b, nats²; None where it cannot be told from 0.
        tail_index: Hill index of |delta|; None where there is no tail.
        observed: (length, sd of S) as the run shows it, over responses at least that long.
        rows: lengths from ``longest`` to ``target``; empty where there was not enough.
        missing: why there are no rows.
        flags: "heavy-tail", "few-prompts", "beyond-check", "check-failed", "persistent".
    """

    target: int
    longest: int
    reach: float
    floor: float
    mean: Estimate | None = None
    variance: Estimate | None = None
    inflation: Estimate | None = None
    lags: int = 0
    persistent: float | None = None
    tail_index: float | None = None
    check: HeldBack | None = None
    observed: tuple[tuple[int, float], ...] = ()
    rows: tuple[Row, ...] = ()
    missing: str = ""
    flags: tuple[str, ...] = ()

    def at_floor(self, row: Row) -> bool:
        """Whether no effective size could be seen there, had the sample any."""
        return row.ess_untruncated.value <= self.floor * (1 + 1e-9)


def length_forecast(
    delta: Floats, *, sequence: Ints, prompt: Ints, target: int = TARGET, seed: int = 0
) -> Forecast:
    """Forecast from the tokens of one comparison.

    Args:
        delta: [A] train - rollout, nats, in order of position within each sequence.
        sequence: [A] sequence of each action token, ascending.
        prompt: [N] prompt of each sequence.
        target: the planned response length, tokens.

    Raises:
        EmptyComparison: no token.
        MismatchError: a target under 1, arrays of different lengths, or deltas that are not finite.
    """
    _require(delta, sequence, target)
    of_sequence, lengths = np.unique(sequence, return_counts=True)
    longest = _longest(lengths, prompt[of_sequence])
    bare = Forecast(target, longest, target / max(longest, 1), 1.0 / len(lengths))
    if longest < LEAST_TOKENS:
        prompts = len(np.unique(prompt[of_sequence]))
        return replace(bare, missing=_too_short(longest, len(lengths), prompts))
    if not delta.any():
        return replace(bare, missing="delta is 0 everywhere: every weight is 1 at every length")
    try:
        return _forecast(bare, delta, sequence, prompt, seed)
    except Unfit as reason:
        return replace(bare, missing=str(reason))


class Unfit(Exception):
    """The tokens give no variance to forecast with; the text says why."""


def _forecast(bare: Forecast, delta: Floats, sequence: Ints, prompt: Ints, seed: int) -> Forecast:
    of_sequence, lengths = np.unique(sequence, return_counts=True)
    of_prompt, longest, target = prompt[of_sequence], bare.longest, bare.target
    estimator = Estimator(np.arange(len(lengths)), of_prompt, seed=seed)  # a unit is a sequence
    lines = DeltaSequences.of(delta, lengths)
    fit = AutocovarianceFit.of(lines, of_prompt, min(longest // 2, target - 1))
    check = _held_back(lines, of_sequence, prompt, longest, seed)
    lengths_shown = grid(longest, target)
    wanted = [*_of_tokens(fit), *(m for n in lengths_shown for m in _at(fit, n))]
    estimates = estimator.all(wanted, {"terms": fit.terms})
    if len(estimates) < len(wanted):
        raise Unfit("not enough: the fit gives no positive variance at every length")
    estimates = {name: _counted(estimate, fit) for name, estimate in estimates.items()}
    flags = {
        "heavy-tail": heavy_tail(delta * delta),
        "persistent": fit.persistent,
        "beyond-check": bare.reach > FAR,
        "check-failed": _failed(check.error),
    }
    index = hill_index(delta)
    return replace(
        bare,
        mean=estimates["mean"],
        variance=estimates["variance"],
        inflation=estimates["inflation"],
        lags=fit.lags,
        persistent=fit.beyond if fit.persistent else None,
        tail_index=index if math.isfinite(index) else None,
        check=check,
        observed=_observed(lines, lengths, longest),
        rows=_falling(tuple(_row(estimates, fit, length, bare.floor) for length in lengths_shown)),
        flags=(*estimates["mean"].flags, *(flag for flag, set_ in flags.items() if set_)),
    )


def grid(longest: int, target: int) -> list[int]:
    """The lengths that are reported: from the data's to the target, doubling."""
    if target <= longest:
        return [target]
    doublings = math.ceil(math.log2(target / longest))
    return [longest * 2**step for step in range(doublings)] + [target]


def _require(delta: Floats, sequence: Ints, target: int) -> None:
    if target < 1:
        raise MismatchError(f"a response length of {target} tokens", "--forecast-length 16384")
    if not len(delta):
        raise EmptyComparison()
    if len(delta) != len(sequence):
        raise MismatchError(f"{len(delta)} deltas for {len(sequence)} tokens")
    if not np.isfinite(delta).all():
        raise MismatchError(f"{int((~np.isfinite(delta)).sum())} deltas are not finite")
    if (np.diff(sequence) < 0).any():
        raise MismatchError("tokens are not in order of their sequence")


def _too_short(longest: int, sequences: int, prompts: int) -> str:
    reached = f"only {longest} tokens are reached by so many"
    if longest == 0:
        reached = f"the run has {sequences} responses of {prompts} prompts"
    return (
        f"not enough: {LEAST_SEQUENCES} responses of {LEAST_PROMPTS} prompts must have at least "
        f"{LEAST_TOKENS} tokens, and {reached}"
    )


def _longest(lengths: Ints, prompt: Ints) -> int:
    """The length that 32 sequences of 8 prompts reach; 0 where there are not so many."""
    order = np.argsort(-lengths, kind="stable")
    _, first = np.unique(prompt[order], return_index=True)
    if len(lengths) < LEAST_SEQUENCES or len(first) < LEAST_PROMPTS:
        return 0
    rank = max(LEAST_SEQUENCES - 1, int(np.sort(first)[LEAST_PROMPTS - 1]))
    return int(lengths[order[rank]])


def _metric(name: str, combine: Combine, bounds: Bounds = REAL) -> Metric:
    """A number of the forecast alone; its units are sequences, each with its row of terms."""
    return Metric(name, _terms, "ratio", combine=combine, bounds=bounds)


def _of_tokens(fit: AutocovarianceFit) -> list[Metric]:
    """Mean, variance and long-run variance of a token."""

    def inflation(means: Floats) -> Floats:
        """(g(0) + 2 sum g(k)) / g(0), the common part left out: what short memory does."""
        shift, square, near = np.moveaxis(means[..., 1:4] / means[..., :1], -1, 0)
        own = square - shift**2
        return np.where(own > 0.0, (own + near - 2 * fit.lags * shift**2) / own, np.nan)

    return [
        _metric("mean", lambda means: fit.moments(means, 1)[0]),
        _metric("variance", lambda means: fit.moments(means, 1)[1], POSITIVE),
        _metric("inflation", inflation, POSITIVE),
    ]


def _of_sums(length: int) -> dict[str, Callable[[Floats, Floats], Floats]]:
    """Shares of a row, each a function of the mean and the variance of S at one length."""
    edge, low, high = math.log(CAP), *(length * math.log(end) for end in GEO_BAND)
    return {
        "ess": capped_ess,
        "truncated": lambda m, v: 1 - below(edge, m, v),
        "outside": lambda m, v: 1 - below(edge, m, v) + below(-edge, m, v),
        "geo_rejected": lambda m, v: 1 - below(high, m, v) + below(low, m, v),
    }


def _at(fit: AutocovarianceFit, length: int) -> list[Metric]:
    """What a row needs."""

    def of(name: str, value: Callable[[Floats, Floats], Floats], bounds: Bounds = SHARE) -> Metric:
        def combine(means: Floats) -> Floats:
            mu, variance = fit.moments(means, length)
            return value(mu * length, variance)

        return _metric(f"{name}@{length}", combine, bounds)

    shares = [of(name, value) for name, value in _of_sums(length).items()]
    return [of("log_variance", lambda _, v: _log(v), REAL), *shares]


def _counted(estimate: Estimate, fit: AutocovarianceFit) -> Estimate:
    """Tokens counted; heavy tails are judged once, on the tokens, and not on sums of theirs."""
    kept = tuple(flag for flag in estimate.flags if flag != "heavy-tail")
    return replace(estimate, n_tokens=int(fit.terms[:, 0].sum()), flags=kept)


def _terms(terms: Floats) -> Floats:
    return terms


def _log(values: Floats) -> Floats:
    return floats(np.log(np.where(values > 0.0, values, np.nan)))


def _through(estimate: Estimate, turn: Callable[[float], float]) -> Estimate:
    """An estimate of log V as one of a monotone function of V: the interval goes along."""
    value = turn(math.exp(min(estimate.value, 700.0)))
    if estimate.low is None or estimate.high is None:
        return replace(estimate, value=value)
    low, high = (turn(math.exp(min(end, 700.0))) for end in (estimate.low, estimate.high))
    return replace(estimate, value=value, low=min(low, high), high=max(low, high))


def _row(estimates: dict[str, Estimate], fit: AutocovarianceFit, length: int, floor: float) -> Row:
    """One length. Where no common part b could be told from 0, the intervals reach to what its own
    upper limit would give: it grows with the square of the length, so that a b too small to be
    seen may rule a long response."""
    log_variance = estimates[f"log_variance@{length}"]
    spread = _through(log_variance, math.sqrt)
    row = Row(
        length,
        spread=spread,
        ess_untruncated=_through(log_variance, lambda v: max(math.exp(-v), floor)),
        **{name: estimates[f"{name}@{length}"] for name in ("ess", "truncated", "outside")},
        geo_rejected=estimates[f"geo_rejected@{length}"],
    )
    if spread.high is None or fit.unseen == 0.0:
        return row
    lags = min(fit.lags, length - 1)
    most = spread.high**2 + fit.unseen * (length - lags) * (length - lags - 1)
    mean, variance = np.array(estimates["mean"].value * length), np.array(most)
    ends: dict[str, float] = {
        "spread": math.sqrt(most),
        "ess_untruncated": max(math.exp(-most), floor),
    } | {name: float(value(mean, variance)) for name, value in _of_sums(length).items()}
    moved: dict[str, Any] = {name: _reaching(getattr(row, name), end) for name, end in ends.items()}
    return replace(row, **moved)


def _reaching(estimate: Estimate, end: float) -> Estimate:
    """The estimate, its interval with ``end`` inside."""
    if estimate.low is None or estimate.high is None:
        return estimate
    return replace(estimate, low=min(estimate.low, end), high=max(estimate.high, end))


def _falling(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Effective shares never grow with the length: a longer response has all that a shorter has."""
    kept: list[Row] = []
    for row in rows:
        last = kept[-1] if kept else row
        lower: dict[str, Any] = {
            name: _at_most(getattr(row, name), getattr(last, name))
            for name in ("ess", "ess_untruncated")
        }
        kept.append(replace(row, **lower))
    return tuple(kept)


def _at_most(estimate: Estimate, other: Estimate) -> Estimate:
    if estimate.low is None or other.low is None or estimate.high is None or other.high is None:
        return replace(estimate, value=min(estimate.value, other.value))
    return replace(
        estimate,
        value=min(estimate.value, other.value),
        low=min(estimate.low, other.low),
        high=min(estimate.high, other.high),
    )


def _held_back(
    lines: DeltaSequences, of_sequence: Ints, prompt: Ints, longest: int, seed: int
) -> HeldBack:
    """Fit on the first half of the positions, predict the spread of S at the full length.

    Only sequences that reach the full length take part, on both sides: what they show late is
    not to be laid at the door of those that ended early.
    """
    reaches = lines.lengths >= longest
    whole = lines.only(reaches).first(longest)
    numbers = of_sequence[reaches]
    half = longest // 2
    early = whole.first(half)
    fit = AutocovarianceFit.of(early, prompt[numbers], half // 2)
    total = whole.sums(whole.away)
    terms = np.concatenate([fit.terms, np.stack([total, total**2], axis=1)], axis=1)

    def error(means: Floats) -> Floats:
        predicted = fit.moments(means[..., :6], longest)[1]
        observed = means[..., 7] - means[..., 6] ** 2
        ratio = np.where((predicted > 0) & (observed > 0), predicted / observed, np.nan)
        return floats(np.sqrt(ratio) - 1.0)

    metric = _metric("held_back", error, (-1.0, np.inf))
    estimator = Estimator(np.arange(len(numbers)), prompt[numbers], seed=seed)
    excess = estimator.one(metric, {"terms": terms})
    if excess is None:
        raise Unfit("not enough: early positions give no positive variance for later ones")
    observed = float(total.std())
    return HeldBack(half, longest, observed * (1.0 + excess.value), observed, _counted(excess, fit))


def _failed(error: Estimate) -> bool:
    if error.low is None or error.high is None:
        return abs(error.value) > CHECK_WRONG
    return abs(error.value) > CHECK_WRONG and not error.low <= 0.0 <= error.high


def _observed(lines: DeltaSequences, lengths: Ints, longest: int) -> tuple[tuple[int, float], ...]:
    """Spread of S at lengths of the data, each over the sequences that are at least so long."""
    points = []
    for length in [longest // 8, longest // 4, longest // 2, longest]:
        part = lines.only(lengths >= length).first(length)
        points.append((length, float((part.sums(part.away)).std())))
    return tuple(points)
