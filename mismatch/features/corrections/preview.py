"""Weights in, :class:`Corrections` out: shares, effective sizes, distances with intervals, ranks.

Tokens are summed per sequence once; every estimate is a function of these sums, so that intervals
cost the same for long responses as for short responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch.analysis.plugins import RunArtefacts
from mismatch.errors import MismatchError
from mismatch.features.corrections.results import Against, Corrections, Preview
from mismatch.metrics.correction_settings import recipes
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.importance_weights import (
    CORRECTIONS,
    NONE,
    OVERRIDE,
    Correction,
    Ratios,
    Settings,
    group_advantages,
)
from mismatch.metrics.registry import (
    POSITIVE,
    REAL,
    SHARE,
    Bounds,
    Combine,
    Metric,
    floats,
    quotient,
)
from mismatch.metrics.tails import heavy_tail
from mismatch.specs import CheckSpec
from mismatch.types import Estimate, Floats, Pair, Rollout, Scoring

EQUAL = 1e-12  # relative; errors nearer than this are equal
NEAR = 1.01  # an error within 1 % of the best is as good
NOT_LAWFUL = (
    "residual bias and ranking: neither side is the distribution that sampled these tokens, so "
    "the ratio is not an importance ratio"
)


def preview(
    rollout: Rollout,
    left: Scoring,
    right: Scoring,
    *,
    sampled_by_left: bool,
    settings: Settings | None = None,
    batch: int | None = None,
    seed: int = 0,
) -> Corrections:
    """Try every correction on the tokens of one comparison. Nothing is sampled or scored again.

    Args:
        left: the rollout side; rho = exp(right - left).
        sampled_by_left: whether ``left`` is the distribution that sampled; else nothing is ranked.
        batch: sequences of one training batch; default: those of this rollout.
        seed: of the bootstrap.

    Raises:
        EmptyComparison: no action token.
        MismatchError: other token ids, non-finite logprobs, or a batch under 1.
    """
    pair = Pair.of(rollout, left, right)
    present = np.unique(pair.sequence)
    batch = len(present) if batch is None else batch
    if batch < 1:
        raise MismatchError("corrections: a batch has at least one sequence", "--batch 256")
    # A unit is a sequence: to the estimator each is one token.
    estimator = Estimator(np.arange(len(present)), pair.prompt[present], seed=seed)
    advantage = None
    if rollout.rewards is not None:
        advantage = group_advantages(rollout.rewards, rollout.prompt_index)[pair.sequence]
        if not advantage.any():  # where no rewards differ, none is known
            advantage = None
    ratios = Ratios.of(pair.delta, pair.sequence, pair.train, advantage)
    bench = Bench(ratios, estimator, batch)
    settings = settings or Settings()
    tried = bench.previews(settings, lawful=sampled_by_left)
    favoured, best, reason = choose(tried, batch) if sampled_by_left else (None, None, "")
    return Corrections(
        rollout=left.name,
        train=right.name,
        batch=batch,
        settings=settings,
        previews=tried,
        favoured=favoured,
        best=best,
        reason=reason or NOT_LAWFUL,
        clamped=ratios.clamped,
        heavy_tail=heavy_tail(ratios.token),
        not_tested=() if sampled_by_left else (NOT_LAWFUL,),
        recipes=() if best is None else recipes(best, settings),
    )


def _effective(means: Floats) -> Floats:
    """(sum w)² / (units · sum w²), from the means of (w, w², units)."""
    return floats(means[..., 0] ** 2 / (means[..., 1] * means[..., 2]))


@dataclass
class Bench:
    """One rollout's ratios and advantages, on which corrections are tried."""

    ratios: Ratios
    estimator: Estimator
    batch: int

    def __post_init__(self) -> None:
        code = self.ratios.code
        self.starts = np.flatnonzero(np.diff(code, prepend=-1))
        self.tokens = self.total(np.ones_like(self.ratios.token))
        known = self.ratios.advantage
        signal = np.ones_like(self.ratios.token) if known is None else known
        self.size, self.power = np.abs(signal), signal**2
        self.sizes, self.powers = self.total(self.size), self.total(self.power)

    def total(self, values: Floats) -> Floats:
        """Return sums per sequence, [N]. A pair's tokens lie in order of their sequence."""
        return floats(np.add.reduceat(values, self.starts))

    def gap(self, w: Floats) -> Floats:
        """Return sums of |w - ratio|, weighted by |A|, [N]."""
        return self.total(np.abs(w - self.ratios.token) * self.size)

    def square(self, w: Floats) -> Floats:
        """Return sums of w² A², [N]."""
        return self.total(w**2 * self.power)

    def estimate(self, columns: list[Floats], combine: Combine, bounds: Bounds) -> Estimate | None:
        """Return a smooth function of mean sums per sequence, with its interval by prompt."""
        metric = Metric(
            "correction", lambda terms: terms, "ratio", "1", combine=combine, bounds=bounds
        )
        estimate = self.estimator.one(metric, {"terms": np.stack(columns, axis=1)})
        return None if estimate is None else replace(estimate, n_tokens=len(self.ratios.token))

    def previews(self, settings: Settings, lawful: bool) -> tuple[Preview, ...]:
        """Return every correction, in order; the ranks filled in where ``lawful``."""
        weights = {each.id: each.weights(self.ratios, settings) for each in CORRECTIONS}
        previews: list[Preview] = []
        for correction in CORRECTIONS:
            w = weights[correction.id]
            kept = w > 0.0
            twins = [earlier.id for earlier in previews if np.array_equal(weights[earlier.id], w)]
            previews.append(
                Preview(
                    id=correction.id,
                    label=correction.label,
                    level=correction.level,
                    setting=correction.setting(settings),
                    kept_tokens=float(kept.mean()),
                    kept_sequences=float((self.total(kept.astype(np.float64)) > 0.0).mean()),
                    ess=self._ess(correction, w) if kept.any() else None,
                    weight_mean=float(w.mean()),
                    weight_std=float(w.std()),
                    weight_max=float(w.max()),
                    same_as=twins[0] if twins else None,
                    token=self._against(w) if lawful else None,
                )
            )
        return tuple(self._ranked(previews, weights) if lawful else previews)

    def _ess(self, correction: Correction, w: Floats) -> Estimate | None:
        sums = [self.total(w), self.total(w**2), self.tokens]
        if correction.level != "token":
            shared = sums[0] / self.tokens
            sums = [shared, shared**2, np.ones_like(shared)]
        return self.estimate(sums, _effective, SHARE)

    def _against(self, w: Floats) -> Against:
        away = self.total(w - self.ratios.token)
        bias = self.estimate([away, self.tokens], quotient, REAL)
        distance = self.estimate([self.gap(w), self.sizes], quotient, POSITIVE)
        assert bias is not None  # there are tokens …
        assert distance is not None  # … and where advantages are used, one that is not 0
        second = self.square(w).sum() / self.powers.sum()
        error = math.sqrt(distance.value**2 + second / self.batch)
        return Against(bias, distance, error, None, False)

    def _ranked(self, previews: list[Preview], weights: dict[str, Floats]) -> list[Preview]:
        """Return the previews with ranks by error, equal errors sharing one, and ties."""
        ranked = {correction.id for correction in CORRECTIONS if correction.ranked}
        errors = {
            shown.id: shown.token.error for shown in previews if shown.token and shown.id in ranked
        }
        first = min(errors, key=lambda id: errors[id])
        out = []
        for shown in previews:
            if shown.token and shown.id in errors:
                lower = sum(error < errors[shown.id] * (1.0 - EQUAL) for error in errors.values())
                near = errors[shown.id] <= errors[first] * NEAR
                tied = near or self._tied(weights[shown.id], weights[first])
                shown = replace(shown, token=replace(shown.token, rank=1 + lower, tied=tied))
            out.append(shown)
        return out

    def _tied(self, w: Floats, best: Floats) -> bool:
        """Whether the paired interval of the difference of squared errors contains 0."""

        def difference(means: Floats) -> Floats:
            gap = (means[..., 0] / means[..., 4]) ** 2 - (means[..., 1] / means[..., 4]) ** 2
            noise = (means[..., 2] - means[..., 3]) / means[..., 5] / self.batch
            return floats(gap + noise)

        gaps, squares = map(self.gap, (w, best)), map(self.square, (w, best))
        change = self.estimate([*gaps, *squares, self.sizes, self.powers], difference, REAL)
        if change is None or change.low is None or change.high is None:
            return False  # one prompt: nothing is known of the difference
        return change.low <= 0.0 <= change.high


# A bias of a third of the noise adds 5.4 % to the root mean square error of a batch.
NEGLIGIBLE = 1.0 / 3.0
ONE_PROMPT = (
    "undecided: all tokens come from one prompt, so that nothing tells the mismatch, or one "
    "correction from another, from chance; the ranks are of these tokens alone"
)


def choose(previews: Sequence[Preview], batch: int) -> tuple[str | None, str | None, str]:
    """Return the favoured correction, the best real one, and the reason.

    None is needed while the worst that the mismatch can do to a batch stays under a third of the
    batch's sampling noise, or where no correction is measurably nearer to the ratio. Else the
    least error wins; of those that are as good, the one that interferes least. The override
    never does: it is not ranked. Nothing is favoured where every interval allows for chance.
    """
    by_id = {shown.id: shown.token for shown in previews if shown.token}
    names = {shown.id: shown.label for shown in previews}
    # previews come in the order of interference: the first of those tied interferes least
    real = [id for id in by_id if id not in (NONE, OVERRIDE)]
    leader = min(real, key=lambda id: by_id[id].rank or len(by_id))
    best = next((id for id in real if by_id[id].tied and by_id[leader].tied), leader)
    plain, noise = by_id[NONE], 1.0 / math.sqrt(batch)
    worst = plain.distance.value if plain.distance.high is None else plain.distance.high
    if plain.distance.high is None and worst > 0.0:
        return None, best, ONE_PROMPT
    if worst == 0.0:
        return NONE, best, "none needed: both sides agree, and every weight is exactly 1"
    if worst <= NEGLIGIBLE * noise:
        batches = math.floor((noise / worst) ** 2)
        needless = (
            f"none needed: the mismatch can shift a batch by at most {worst:.2g}, under a third of "
            f"the sampling noise of {noise:.2g} from {batch:,} sequences. Noise averages out and a "
            f"bias does not: in the worst case it would take {batches:,} batches to show"
        )
        return NONE, best, needless
    sizes = (
        f"the mismatch can shift a batch by up to {worst:.2g}, compared with sampling noise of "
        f"{noise:.2g} from {batch:,} sequences"
    )
    if plain.tied:
        none_helps = "no correction is measurably nearer to the token ratio"
        return NONE, best, f"none helps: {sizes}, but {none_helps}"
    others = [names[id] for id, each in by_id.items() if id not in (best, NONE) and each.tied]
    company = f"; as good: {', '.join(others)}" if others else ""
    fall = f"with the correction the error falls from {plain.error:.2g} to {by_id[best].error:.2g}"
    return best, best, f"{names[best]}: {sizes}; {fall}{company}"


def measure(run: RunArtefacts, spec: CheckSpec) -> Corrections:
    lawful = run.comparison.sampled_by_left
    return preview(run.rollout, run.decode, run.train, sampled_by_left=lawful, seed=spec.seed)
